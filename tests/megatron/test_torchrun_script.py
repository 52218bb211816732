"""scripts/torchrun/pretrain.sh on one node: SIGUSR1 saves and ends well, and the run can be continued."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from charm_megatron.processes.output import last_lines_of
from charm_megatron.processes.ports import free_port
from charm_megatron.train.run_folder import RunFolder, read_rows
from tests.megatron.test_lifecycle import wait_until

pytestmark = pytest.mark.megatron

ROOT = Path(__file__).parents[2]
SETTINGS = ("megatron.seq_length=64", "megatron.num_layers=2", "megatron.eval_iters=0", "charm.domains=2")


def start(folder: RunFolder, *options: str) -> subprocess.Popen[bytes]:
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    with folder.path.with_name("log").open("ab") as log:
        return subprocess.Popen(
            [
                "scripts/torchrun/pretrain.sh",
                "configs/run/gpt_tiny_cpu.yaml",
                str(folder.path),
                *words,
                *options,
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHON": sys.executable, "MASTER_PORT": str(free_port())},
            stdout=log,
            stderr=log,
        )


def test_usr1_saves_and_the_run_continues(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    script = start(folder, "--set", "megatron.train_iters=100000")
    try:
        wait_until(lambda: script.poll() is not None or len(read_rows(folder.metrics)) >= 3, timeout_s=120.0)
        script.send_signal(signal.SIGUSR1)
        assert script.wait(timeout=60) == 0, last_lines_of(tmp_path / "log")
    finally:
        script.terminate()
    saved = folder.check_resumable()
    assert saved == len(read_rows(folder.metrics)) >= 3
    script = start(folder, "--resume", "--set", f"megatron.train_iters={saved + 2}")
    assert script.wait(timeout=120) == 0, last_lines_of(tmp_path / "log")
    assert [row["iteration"] for row in read_rows(folder.metrics)] == list(range(1, saved + 3))
