"""One run at a time writes to a run folder."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from charm_megatron.config import RunConfig
from charm_megatron.errors import InvalidInput
from charm_megatron.train.lock import locked, require_unlocked
from charm_megatron.train.run_folder import RunFolder

pytestmark = pytest.mark.pure

HOLDER = """
import sys, time
from pathlib import Path
from charm_megatron.train.lock import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    """Another process that has locked `folder`."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    return holder


def test_a_second_writer_is_refused_and_told_who_the_first_is(tmp_path: Path) -> None:
    RunFolder(tmp_path).create(RunConfig())
    with hold(tmp_path) as holder:
        sentence = f"{tmp_path} is in use by process {holder.pid} on {socket.gethostname()}, since 20"
        for enter in (
            lambda: require_unlocked(tmp_path),
            RunFolder(tmp_path).check_new,
            RunFolder(tmp_path).check_resumable,
            RunFolder(tmp_path).locked().__enter__,
        ):
            with pytest.raises(InvalidInput, match=sentence):
                enter()
        holder.kill()


def test_the_lock_of_a_process_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    with hold(tmp_path) as holder:
        holder.send_signal(signal.SIGKILL)
    assert json.loads((tmp_path / "lock.json").read_text())["pid"] == holder.pid
    require_unlocked(tmp_path)
    with locked(tmp_path):
        assert (tmp_path / "lock.json").exists()
    assert list(tmp_path.iterdir()) == []
