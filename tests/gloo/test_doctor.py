"""`charm-megatron doctor` on ranks of this machine, and as a job of torchrun."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from charm_megatron.cli.main import app
from charm_megatron.doctor import probe, ranks, rounds
from charm_megatron.doctor.link import Told
from charm_megatron.processes.ports import free_port

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]
END_S = 120
QUIET = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT")

TORCH = {"problem": None, "cuda": None, "gpus": [], "nccl": None, "gloo": True}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is imported here already need not be imported by a process of its own."""
    monkeypatch.setattr(probe, "probe", lambda name: TORCH if name == "torch" else {"problem": None})
    monkeypatch.setenv("COLUMNS", "110")
    for name in QUIET:
        monkeypatch.delenv(name, raising=False)


def doctor(*arguments: str) -> tuple[int, str, str]:
    """The command in this process, from which ranks are forked."""
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, result.stdout, result.stderr


def faults(report: dict[str, Any]) -> dict[str, str]:
    """What is wrong, but with speed: that is the machine's affair."""
    parts = (report[part] for part in ("packages", "settings", "places", "links"))
    found = [one for part in parts for one in part if one["verdict"] == "fault"]
    return {one["name"]: one["found"] for one in found if "slow" not in one["found"]}


def test_all_pairs_of_ranks_of_this_machine_are_measured_both_ways() -> None:
    code, stdout, stderr = doctor("--ranks", "3", "--size", "1", "--json")
    report = json.loads(stdout)
    assert stderr == ""
    assert faults(report) == {}
    assert code == (0 if report["is_well"] else 1)
    assert [(pair["first"], pair["second"]) for pair in report["pairs"]] == list(combinations(range(3), 2))
    for pair in report["pairs"]:
        assert pair["latency_s"] > 0
        assert pair["there_bytes_per_s"] > 0
        assert pair["back_bytes_per_s"] > 0
    assert report["domains"] == [[0, 1, 2]]


def test_tables_show_each_part_and_a_fault_of_the_environment_is_code_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no0")
    code, stdout, stderr = doctor("--ranks", "4", "--domains", "2", "--size", "1")
    assert (code, stderr) == (1, "")
    for words in ("Packages", "NCCL_P2P_DISABLE", "GLOO_SOCKET_IFNAME", "Places", "inside", "across"):
        assert words in stdout
    assert "faults found" in stdout.splitlines()[-1]


def test_a_single_rank_has_no_links_and_a_hint_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    code, stdout, stderr = doctor("--ranks", "1")
    assert (code, stderr) == (0, "")
    assert "hint" in stdout
    assert "no pair of ranks" in stdout
    assert stdout.splitlines()[-1] == "nothing is wrong"


def test_a_pair_that_does_not_talk_is_dead_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = rounds.Seat.told_of

    def told_of(self: rounds.Seat, number: int, pairs: Sequence[rounds.Pair]) -> Told | None:
        return Told() if self.rank == 1 and (1, 2) in pairs else right(self, number, pairs)

    monkeypatch.setattr(rounds.Seat, "told_of", told_of)
    code, stdout, stderr = doctor("--ranks", "4", "--size", "1", "--deadline", "1", "--json")
    assert (code, stderr) == (1, "")
    report = json.loads(stdout)
    assert list(faults(report)) == ["ranks 1 and 2"]
    assert faults(report)["ranks 1 and 2"].startswith("dead")
    assert sum(pair["latency_s"] is not None for pair in report["pairs"]) == 5


def test_a_rank_that_crashes_is_named_in_one_line_and_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(seat: rounds.Seat, told: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(ranks, "follow", crash)
    code, stdout, stderr = doctor("--ranks", "2")
    assert (code, stdout) == (1, "")
    assert stderr == "error: rank 1 failed: killed by SIGKILL\n"


def torchrun(*arguments: str) -> tuple[int, str, str]:
    launch = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}")
    done = subprocess.run(
        [sys.executable, *launch, "-m", "charm_megatron", "doctor", *arguments],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_under_torchrun_the_ranks_are_those_of_the_job_and_rank_0_prints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    code, stdout, stderr = torchrun("--size", "1", "--json")
    report = json.loads(stdout)
    assert code == 1, "torchrun's own"
    assert "exitcode  : 1" in stderr, "torchrun's own report of rank 0"
    assert faults(report) == {"CUDA_LAUNCH_BLOCKING": "1"}
    assert report["ranks"] == "ranks of this job"
    assert len(report["pairs"]) == 1
    assert "ranks 0-1" in report["places"][0]["found"]


def test_under_torchrun_bad_input_is_said_once() -> None:
    code, stdout, stderr = torchrun("--ranks", "2")
    assert code != 0
    assert stdout == ""
    assert stderr.count("error: --ranks and --network start ranks of their own") == 1
    assert "exitcode  : 2" in stderr, "torchrun's own report"


def test_a_rank_that_is_not_told_where_to_meet_ends_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, stdout, stderr = doctor()
    assert (code, stdout) == (2, "")
    assert "MASTER_ADDR and MASTER_PORT" in stderr
