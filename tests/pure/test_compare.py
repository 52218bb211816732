"""`charm-megatron compare` on run folders: differences, times, and folders that are none."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from charm_megatron.cli.main import app
from charm_megatron.config import CharmConfig, LaunchConfig, RunConfig
from charm_megatron.train.compare import compare_runs
from charm_megatron.train.run_folder import RunFolder, append_row

pytestmark = pytest.mark.pure


def make_run(path: Path, schedule: str, losses: dict[int, float | None], step_time_s: float = 0.1) -> Path:
    folder = RunFolder(path)
    config = RunConfig(
        launch=LaunchConfig(ranks=4),
        charm=CharmConfig(schedule=schedule),
        megatron={"context_parallel_size": 4},
    )
    folder.create(config)
    for iteration, loss in losses.items():
        row = {"iteration": iteration, "loss": loss, "grad_norm": 1.0 + (loss or 0) / 10}
        time_s = 5.0 if iteration == 1 else step_time_s
        append_row(folder.metrics, {**row, "step_time_s": time_s, "tokens": iteration * 512})
    append_row(folder.evaluation, {"iteration": max(losses), "part": "validation", "loss": 2.5})
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        make_run(tmp_path / "ring", "ring", {1: 6.0, 2: 5.0, 3: 4.0}, 0.2),
        make_run(tmp_path / "charm", "charm", {2: 5.0, 3: 4.25, 4: 3.0}, 0.1),
    ]


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def test_differences_are_over_the_iterations_that_both_have(runs: list[Path]) -> None:
    first, second = compare_runs(runs)
    assert (first.num_shared, first.loss_difference, first.speed) == (None, None, 1.0)
    assert second.num_shared == 2
    assert second.loss_difference == pytest.approx(0.25)
    assert second.grad_norm_difference == pytest.approx(0.025)


def test_the_first_iteration_counts_for_no_time(runs: list[Path]) -> None:
    first, second = compare_runs(runs)
    assert first.step_time_s == pytest.approx(0.2)
    assert second.speed == pytest.approx(2.0)
    assert first.tokens_per_s == pytest.approx(512 / 0.2)


def test_nan_in_a_run_is_a_difference_and_not_lost(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", "ring", {1: 6.0, 2: 5.0, 3: 4.0})
    other = make_run(tmp_path / "other", "charm", {1: 6.0, 2: float("nan"), 3: 4.5})
    difference = compare_runs([one, other])[1].loss_difference
    assert difference is not None
    assert difference != difference


def test_the_command_prints_a_table_and_writes_rows_and_a_picture(runs: list[Path], tmp_path: Path) -> None:
    picture, rows = tmp_path / "both.svg", tmp_path / "both.json"
    result = invoke(*runs, "--picture", picture, "--json", rows)
    assert result.exit_code == 0, result.stderr
    assert "largest difference of loss" in result.stdout
    assert "2.50e-01" in result.stdout
    assert picture.read_text("utf-8").count("<path") > 10
    written = json.loads(rows.read_text("utf-8"))
    assert [row["schedule"] for row in written] == ["ring", "charm"]
    assert written[1]["loss_difference"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ring"], "compare takes two run folders or more"),
        (["ring", "nothing"], "nothing is no run folder: it has no config.yaml"),
        (["ring", "empty"], "empty has no iteration with a loss in metrics.jsonl"),
        (["ring", "charm", "--picture", "x.bmp"], "--picture x.bmp does not end in .png, .svg, .pdf"),
    ],
)
def test_what_is_no_run_is_one_sentence(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    RunFolder(tmp_path / "empty").create(RunConfig())
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr == f"error: {sentence}\n"
