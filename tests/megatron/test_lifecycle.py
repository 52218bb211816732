"""However a run ends, no process of it stays."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from charm_megatron.train.run_folder import read_rows
from tests.megatron.small_run import BASE

pytestmark = pytest.mark.megatron

Started = tuple[subprocess.Popen[str], list[psutil.Process]]


def wait_until(is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.1)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """A run of two ranks that trains by now, and all its processes."""
    config = tmp_path / "long.yaml"
    megatron = {**BASE, "context_parallel_size": 2, "train_iters": 100_000}
    config.write_text(yaml.safe_dump({"launch": {"ranks": 2}, "megatron": megatron}))
    command = [
        sys.executable,
        "-m",
        "charm_megatron",
        "pretrain",
        str(config),
        "--out",
        str(tmp_path / "run"),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as launcher:
        wait_until(lambda: launcher.poll() is not None or (tmp_path / "run" / "metrics.jsonl").exists())
        assert launcher.poll() is None, launcher.communicate()[1]
        yield launcher, psutil.Process(launcher.pid).children(recursive=True)
        launcher.kill()


def assert_all_gone(processes: list[psutil.Process]) -> None:
    wait_until(lambda: not any(process.is_running() for process in processes), timeout_s=60.0)


def rank_process(processes: list[psutil.Process], rank: int) -> psutil.Process:
    (found,) = (
        process
        for process in processes
        if Path(f"/proc/{process.pid}/fd/1").resolve().name == f"rank{rank}.log"
    )
    return found


def test_ctrl_c_ends_every_rank(started: Started) -> None:
    launcher, processes = started
    launcher.send_signal(signal.SIGINT)
    _, stderr = launcher.communicate(timeout=90)
    assert launcher.returncode == 130
    assert stderr.startswith("interrupted; /")
    assert stderr.endswith("/run holds no checkpoint yet\n")
    assert_all_gone(processes)


INTERRUPTED_WHILE_IMPORTING = """
import os, runpy, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored

class Interrupter:
    def find_spec(name, path=None, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter)
runpy.run_module("charm_megatron", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["typer", "charm_megatron.cli.main", "charm_megatron.train.pretrain"])
def test_ctrl_c_in_the_first_second_is_no_traceback(tmp_path: Path, module: str) -> None:
    program = INTERRUPTED_WHILE_IMPORTING.format(module=module)
    command = [sys.executable, "-c", program, "pretrain", "gpt_tiny_cpu", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_a_second_run_in_the_same_folder_is_refused(started: Started, tmp_path: Path) -> None:
    launcher, _ = started
    for options in ([], ["--resume"]):
        again = [*map(str, launcher.args), *options]  # type: ignore[union-attr]
        done = subprocess.run(again, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert f"/run is in use by process {launcher.pid} on " in done.stderr
    assert launcher.poll() is None


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "4"},
            "error: RANK and WORLD_SIZE are set, but not MASTER_ADDR and MASTER_PORT",
        ),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "error: RANK 2 is none of WORLD_SIZE 2",
        ),
        (
            {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
            "error: srun started 2 of this program, and each would start all ranks; let srun start one torchrun",
        ),
    ],
)
def test_ranks_that_cannot_meet_leave_no_folder(
    tmp_path: Path, environment: dict[str, str], sentence: str
) -> None:
    command = [
        sys.executable,
        "-m",
        "charm_megatron",
        "pretrain",
        "gpt_tiny_cpu",
        "--out",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(sentence)
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_ranks_end_with_a_launcher_that_is_killed(started: Started) -> None:
    launcher, processes = started
    launcher.kill()
    launcher.communicate()
    assert_all_gone(processes)


def test_a_killed_rank_ends_the_others_and_is_named(started: Started) -> None:
    launcher, processes = started
    os.kill(rank_process(processes, 1).pid, signal.SIGKILL)
    _, stderr = launcher.communicate(timeout=90)
    assert launcher.returncode == 1
    assert stderr.startswith("error: rank 1 failed: killed by SIGKILL\nlast lines of ")
    assert "rank1.log" in stderr
    assert_all_gone(processes)


def test_ranks_of_torchrun_are_used_as_they_are(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    megatron = {**BASE, "context_parallel_size": 2, "train_iters": 3}
    config.write_text(yaml.safe_dump({"megatron": megatron}))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("-m", "charm_megatron", "pretrain", str(config), "--out", str(tmp_path / "run")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [row["iteration"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]
    assert (tmp_path / "run" / "loss.png").exists()
