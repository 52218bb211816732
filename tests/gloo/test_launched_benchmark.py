"""The operator benchmark as a job of torchrun: rank 0 speaks for all, and no rank is left behind."""

import csv
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from charm_megatron.cli.main import app
from charm_megatron.processes.ports import free_port
from charm_megatron.schedule.passes import DIRECTIONS

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]
SCRIPT = "scripts/torchrun/bench_operator.sh"
SIZES = ("--tokens-per-rank", "32", "--heads", "2", "--head-dim", "8", "--repetitions", "1", "--warm-up", "0")
RACE = (*SIZES, "--schedules", "ring,charm", "--dtype", "float32")
END_S = 60  # later ranks and peers of a lost one give up after 10 to 30 s by themselves

# The command, in which rank 1 fails once its group is made: on its own, or with all others at once.
FAULTY = """
import os
from charm_megatron.bench import rank as operator_rank

def fail(workload, rank, num_ranks):
    if rank == 1 or {all}:
        raise {error}
    return right(workload, rank, num_ranks)

right, operator_rank.shard_of = operator_rank.shard_of, fail
from charm_megatron.cli.main import main
main()
"""


def start(
    *arguments: str | Path, node: int = 0, num_nodes: int = 1, ranks: int = 2, port: int = 0
) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "NUM_NODES": str(num_nodes),
        "NODE_RANK": str(node),
        "RANKS_PER_NODE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port or free_port()),
        "PYTHON": sys.executable,
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.Popen(
        [str(word) for word in arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def torchrun(script: Path, *arguments: str) -> subprocess.Popen[str]:
    words = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={free_port()}",
    )
    return start(*words, script, "bench", "operator", *arguments)


def end(job: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        stdout, stderr = job.communicate(timeout=END_S)
    finally:
        job.kill()
    return job.returncode, stdout, stderr


def test_one_node_is_one_domain_and_rank_0_alone_prints_and_writes(tmp_path: Path) -> None:
    files = {end: tmp_path / f"rows.{end}" for end in ("json", "csv", "png")}
    options = ("--json", files["json"], "--csv", files["csv"], "--picture", files["png"])
    code, stdout, stderr = end(start(SCRIPT, *RACE, *options))
    assert code == 0, stderr
    assert stdout.count("1 x 2 ranks of this job: MHA, mask none") == 1, stdout
    assert stdout.count("charm") == 2, "one row a pass"
    assert "rror" not in stderr, stderr
    rows = json.loads(files["json"].read_text("utf-8"))
    assert [(row["schedule"], row["pass"]) for row in rows] == list(product(("ring", "charm"), DIRECTIONS))
    assert all(0 < row["error"] < 1e-5 for row in rows)
    with files["csv"].open(encoding="utf-8", newline="") as file:
        assert [row["network"] for row in csv.DictReader(file)] == ["1 x 2 ranks of this job"] * 4
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_two_nodes_are_two_domains_and_computation_may_be_modelled_on_cpus(tmp_path: Path) -> None:
    path, port = tmp_path / "rows.json", free_port()
    options = (*RACE, "--ccr", "0.5,2", "--json", path)
    nodes = [start(SCRIPT, *options, node=node, num_nodes=2, port=port) for node in (1, 0)]
    (later_code, later_out, later_err), (code, stdout, stderr) = map(end, nodes)
    assert (code, later_code) == (0, 0), stderr + later_err
    assert stdout.count("2 x 2 ranks of this job") == 1
    assert later_out == ""
    rows = json.loads(path.read_text("utf-8"))
    assert [row["ccr"] for row in rows] == pytest.approx([0.5] * 4 + [2.0] * 4)
    across = {row["schedule"]: row["bytes_planned"] for row in rows if row["pass"] == "forward"}
    assert across["charm"] != across["ring"], "charm plans for two domains"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--schedules", "chram"), "error: unknown schedule 'chram'; did you mean 'charm'?"),
        (
            ("--suite", "smoke"),
            "error: a suite shapes networks of its own; start it without torchrun",
        ),
        (("--colour", "red"), "No such option: --colour"),
    ],
)
def test_what_is_wrong_with_the_command_is_said_once(arguments: tuple[str, ...], sentence: str) -> None:
    code, stdout, stderr = end(start(SCRIPT, *RACE, *arguments))
    assert code != 0
    assert stdout == ""
    assert stderr.count(sentence) == 1, stderr
    assert "exitcode  : 2" in stderr, "torchrun's own report"
    assert stderr.count("Traceback") == 1, "torchrun's own"


@pytest.mark.parametrize("is_all", [False, True])
def test_a_rank_that_fails_ends_all_and_says_why_once(tmp_path: Path, is_all: bool) -> None:
    script = tmp_path / "faulty.py"
    error = "__import__('charm_megatron.errors').errors.TransferTimeout('no luck')"
    script.write_text(FAULTY.format(all=is_all, error=error), "utf-8")
    code, stdout, stderr = end(torchrun(script, *RACE))
    assert code != 0
    assert stdout == ""
    assert stderr.count("no luck") == 1, stderr
    assert ("error: rank 1 failed: no luck" in stderr) or is_all
    assert stderr.count("Traceback") == 1, "torchrun's own"


def test_a_mistake_of_ours_keeps_the_traceback_of_the_rank_that_made_it(tmp_path: Path) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY.format(all=False, error="KeyError('lost')"), "utf-8")
    code, _, stderr = end(torchrun(script, *RACE))
    assert code != 0
    assert stderr.count("error: rank 1 failed: Traceback") == 1, stderr
    assert stderr.count("KeyError: 'lost'") == 1
    assert stderr.count("Traceback") == 2, "one is torchrun's own"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--compute", "modelled"), "modelled computation"),
        (("--ccr", "1"), "modelled computation"),
    ],
)
def test_on_gpus_what_cannot_be_timed_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(app, ["bench", "operator", *RACE, *options])
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
