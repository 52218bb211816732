"""A run folder is made only where it can be, and a resumed run continues its rows."""

from datetime import datetime
from pathlib import Path

import pytest

from charm_megatron.config import RunConfig, load_run_config
from charm_megatron.errors import InvalidInput
from charm_megatron.train.plot import draw_losses
from charm_megatron.train.run_folder import RunFolder, append_row, default_path, read_rows
from tests.checkpoints import save_checkpoint

pytestmark = pytest.mark.pure


def test_the_default_folder_is_named_by_configuration_and_time() -> None:
    path = default_path(Path("configs/run/tiny.yaml"), datetime(2026, 1, 2, 3, 4, 5))
    assert path == Path("runs/tiny-20260102-030405")


def test_a_folder_that_is_not_empty_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match=r"is not empty; give another --out$"):
        RunFolder(tmp_path).check_new()
    RunFolder(tmp_path).create(RunConfig())
    save_checkpoint(tmp_path / "checkpoints", 2)
    with pytest.raises(InvalidInput, match="is not empty; give another --out, or --resume"):
        RunFolder(tmp_path).check_new()


def test_a_run_that_ended_before_its_first_checkpoint_is_not_sent_in_a_circle(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.create(RunConfig())
    with pytest.raises(
        InvalidInput, match="ended before its first checkpoint; give another --out, or remove"
    ):
        folder.check_new()
    with pytest.raises(InvalidInput, match="ended before its first; start it again with another --out, or"):
        folder.check_resumable()
    assert folder.standing() == f"{tmp_path} holds no checkpoint yet"
    save_checkpoint(folder.checkpoints, 4)
    assert folder.standing() == f"{tmp_path} holds a checkpoint of iteration 4, which --resume continues"
    assert folder.check_resumable() == 4


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match=r"cannot write to .*: .*file is not a folder"):
        RunFolder(tmp_path / "file" / "run").check_new()
    with pytest.raises(InvalidInput, match="cannot write to /proc/run"):
        RunFolder(Path("/proc/run")).create(RunConfig())


def test_a_folder_without_checkpoint_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="holds no checkpoint to continue"):
        RunFolder(tmp_path).check_resumable()


def test_a_new_folder_holds_the_configuration_and_can_be_discarded(tmp_path: Path) -> None:
    config = RunConfig(megatron={"num_layers": 2, "cp_comm_type": ["charm", "charm"], "lr": 1e-3})
    folder = RunFolder(tmp_path / "a" / "b")
    folder.create(config)
    assert load_run_config(folder.config) == config
    folder.discard([tmp_path / "a" / "b", tmp_path / "a"])
    assert list(tmp_path.iterdir()) == []


def test_rows_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for iteration in (1, 2, 3):
        append_row(folder.metrics, {"iteration": iteration, "loss": None})
    append_row(folder.evaluation, {"iteration": 3, "part": "test", "loss": 1.0})
    assert folder.rewind(2) == []
    assert [row["iteration"] for row in read_rows(folder.metrics)] == [1, 2]
    assert read_rows(folder.evaluation) == []


def test_a_row_that_was_cut_short_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_row(path, {"iteration": 1})
    with path.open("a") as file:
        file.write('{"iteration": 2, "lo')
    assert read_rows(path) == [{"iteration": 1}]


def test_lines_that_a_power_loss_left_are_dropped_and_said(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    append_row(folder.metrics, {"iteration": 1})
    with folder.metrics.open("ab") as file:
        file.write(b"\0" * 40 + b"\n\xff\n[1]\n")
    append_row(folder.metrics, {"iteration": 2})
    append_row(folder.metrics, {"iteration": 3})
    with folder.metrics.open("ab") as file:
        file.write(b"\0" * 40)
    assert [row["iteration"] for row in read_rows(folder.metrics)] == [1, 2, 3]
    assert folder.rewind(2) == [
        "dropped 4 lines that are no row of metrics.jsonl: cut short or overwritten when the run ended"
    ]
    assert folder.metrics.read_text() == '{"iteration": 1}\n{"iteration": 2}\n'
    assert folder.rewind(2) == []


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_the_picture_is_drawn_whatever_rows_there_are(tmp_path: Path, num_steps: int) -> None:
    steps = [{"iteration": i + 1, "loss": None if i else 5.0, "grad_norm": 1.0} for i in range(num_steps)]
    evaluations = [{"iteration": 1, "part": "validation", "loss": 4.0}]
    draw_losses(tmp_path / "loss.png", steps, evaluations, "title")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
