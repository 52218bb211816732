"""Launch scripts name configurations and options that exist."""

import json
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from charm_megatron.cli.main import app
from charm_megatron.config import load_run_config
from charm_megatron.paper.tables_6_7 import ITERATIONS
from charm_megatron.planner import cut_problem, plan
from charm_megatron.sharding import make_sharding
from charm_megatron.topology import even_domains
from charm_megatron.workload import NO_MASK

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_row_of_tables_6_and_7_has_a_command_and_a_configuration() -> None:
    done = run("scripts/reproduce_tables_6_7.sh", "print", "--partition=a b")
    assert done.returncode == 0, done.stderr
    seen = set()
    for line in done.stdout.splitlines():
        out, program, *words = shlex.split(line)
        assert program == "sbatch"
        assert "--partition=a b" in words
        script = words.index("scripts/slurm/pretrain.sbatch")
        settings = words[script + 3 :: 2]
        config = load_run_config(ROOT / words[script + 1], settings)
        flags = config.megatron
        seen.add(
            (flags["hidden_size"], flags["micro_batch_size"], flags["seq_length"], config.charm.schedule)
        )
        assert out == f"CHARM_OUT=runs/tables_6_7/{words[2].removeprefix('--job-name=')}"
    hidden = {"gpt_350m": 1024, "gpt_1_3b": 2048}
    rows = {(hidden[row.config], row.batch, row.seq_len) for row in ITERATIONS}
    assert seen == {(*row, schedule) for row in rows for schedule in ("ring", "charm")}


def test_speedups_are_those_that_the_paper_prints() -> None:
    printed = [2.08, 2.06, 1.92, 1.79, 1.83, 1.88, 1.81, 1.72, 1.30, 1.54, 1.61, 1.68, 1.76, 1.96, 2.10, 2.17]
    assert [row.ring_ms / row.charm_ms for row in ITERATIONS] == pytest.approx(printed, abs=0.011)


def test_times_of_runs_are_shown_beside_the_papers(tmp_path: Path) -> None:
    for schedule, time_s in (("ring", 3.0), ("charm", 1.5)):
        folder = tmp_path / f"gpt_350m-table_7_16x16384-{schedule}"
        folder.mkdir()
        times_s = [60.0] * 10 + [time_s] * 3
        rows = [{"iteration": i, "step_time_s": took_s} for i, took_s in enumerate(times_s, 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = CliRunner().invoke(app, ["bench", "tables-6-7", str(tmp_path)], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    (row,) = (line.split() for line in result.stdout.splitlines() if "16384 H100" in " ".join(line.split()))
    assert row == [
        "7",
        "gpt_350m",
        "16",
        "16384",
        "H100",
        "3385.1",
        "1925.7",
        "1.76x",
        "3000.0",
        "1500.0",
        "2.00x",
    ]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ('{"iteration": 1}\n', "row 1 must have step_time_s, a positive number of seconds"),
        (
            '{"iteration": 1, "step_time_s": 1}\n{"iteration": 2, "step_time_s": "2"}\n',
            "row 2 must have step_time_s",
        ),
        ("{}\n", "metrics.jsonl holds no row of an iteration"),
        ("3\n", "metrics.jsonl holds no row of an iteration"),
        ("step_time_s: 3\n", "metrics.jsonl holds no row of an iteration"),
        (None, "holds no run folder such as gpt_350m-table_6_16x2048-ring"),
    ],
)
def test_run_folders_that_hold_something_else_are_refused(
    tmp_path: Path, rows: str | None, sentence: str
) -> None:
    if rows is not None:
        folder = tmp_path / "gpt_350m-table_7_16x16384-ring"
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(rows)
    for runs, said in ((tmp_path, sentence), (tmp_path / "none", "none is not a folder")):
        result = CliRunner().invoke(app, ["bench", "tables-6-7", str(runs)])
        assert result.exit_code == 2
        assert result.stdout == ""
        assert said in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "environment", "sentence"),
    [
        ((), {}, "usage: scripts/torchrun/pretrain.sh CONFIG OUT [OPTION ...]"),
        (("configs/run/gpt_tiny_cpu.yaml",), {}, "usage: "),
        (("configs/run/gpt_tiny_cpu.yaml", "out"), {"PYTHON": "/no/python"}, "run scripts/setup first"),
        (("configs/run/gpt_tiny_cpu.yaml", "out"), {"NUM_NODES": "2"}, "set NODE_RANK and MASTER_ADDR"),
        (
            ("configs/run/gpt_tiny_cpu.yaml", "out"),
            {"NUM_NODES": "3", "NODE_RANK": "0", "MASTER_ADDR": "x"},
            "launch.ranks 4 of configs/run/gpt_tiny_cpu.yaml does not split evenly over 3 nodes",
        ),
        (("configs/run/none.yaml", "out"), {}, "error: cannot read configuration configs/run/none.yaml"),
        (("configs/run/gpt_8b_long.yaml", "out", "--set", "variant=1k"), {}, "has no variant '1k'"),
    ],
)
def test_the_torchrun_script_says_what_is_missing(
    words: tuple[str, ...], environment: dict[str, str], sentence: str
) -> None:
    done = run("scripts/torchrun/pretrain.sh", *words, **{"PYTHON": sys.executable, **environment})
    assert done.returncode != 0
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


STUBS = {
    "scontrol": "echo node0",
    # What would be started: the container's options, then the ranks' command.
    "srun": 'printf "%q " "$@" >>"$STARTED"; echo >>"$STARTED"; echo a table',
}


def submit_bench(folder: Path, ranks: int, *options: str, **more: str) -> tuple[str, list[list[str]]]:
    """Runs bench_operator.sbatch where srun only notes what it is given; gives what was said, and the notes."""
    started = folder / "started"
    for name, body in STUBS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    variables = {"SUBMIT_DIR": str(ROOT), "JOB_ID": "7", "JOB_NODELIST": "node[0-1]", "NNODES": "2"}
    done = run(
        "scripts/slurm/bench_operator.sbatch",
        *options,
        PATH=f"{folder}:/usr/bin:/bin",
        STARTED=str(started),
        CHARM_OUT=str(folder / "out"),
        SLURM_GPUS_ON_NODE=str(ranks),
        **{f"SLURM_{name}": value for name, value in variables.items()},
        **more,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, [shlex.split(line) for line in started.read_text("utf-8").splitlines()]


@pytest.mark.parametrize(("ranks", "has_ulysses"), [(8, True), (6, False)])
def test_without_options_lengths_are_raced_that_every_schedule_can_be_planned_for(
    tmp_path: Path, ranks: int, has_ulysses: bool
) -> None:
    said, started = submit_bench(tmp_path, ranks)
    assert said.count("a table") == len(started) == 4
    lengths = []
    for words in started:
        options = words[words.index("--json") :]
        values = dict(pairwise(options))
        lengths.append(int(values["--tokens-per-rank"]))
        assert values["--json"] == f"{tmp_path}/out/tokens_per_rank_{lengths[-1]}.json"
        schedules = values["--schedules"].split(",")
        assert ("ulysses" in schedules) == has_ulysses
        for name in schedules:
            heads = int(values["--heads"])
            sharding = make_sharding("contiguous", 2 * ranks, 2 * ranks * lengths[-1])
            domains = even_domains(2 * ranks, 2)
            plan(name, cut_problem(name, sharding, domains, NO_MASK, num_heads=heads, num_kv_heads=heads))
    assert lengths == [256, 1680, 6720, 13440]
    assert [16 * length for length in lengths[1:]] == [26880, 107520, 215040], "the paper's, on 16 ranks"


def test_a_container_is_asked_for_with_the_repository_in_it(tmp_path: Path) -> None:
    _, (words,) = submit_bench(tmp_path, 8, "--no-fuse", CHARM_CONTAINER="image", CHARM_MOUNTS="/data:/data")
    assert "--container-image=image" in words
    assert f"--container-mounts={ROOT}:{ROOT},/data:/data" in words
    assert words[-1] == "--no-fuse"
