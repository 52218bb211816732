"""The process of one rank: its log, its environment, its end.

A rank leads a process group of its own. All that it starts (Megatron's checkpoint writer starts a manager and
more) can so be ended with it, and Ctrl-C on the terminal reaches the launcher only, which ends the ranks.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from charm_megatron.config import RunConfig
from charm_megatron.errors import InvalidInput
from charm_megatron.train.run_folder import RunFolder


@dataclass(frozen=True)
class Place:
    """Which rank a process is, of how many, and where they meet."""

    rank: int
    world_size: int
    port: int
    num_threads: int

    @property
    def environment(self) -> dict[str, str]:
        """The variables that torch.distributed and Megatron read."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
        }


@dataclass(frozen=True)
class RankJob:
    """What a run is to do: the same on every rank, and sent to each."""

    config: RunConfig
    folder: RunFolder
    argv: tuple[str, ...]


@dataclass(frozen=True)
class Event:
    """Something that a rank reports while it runs."""

    kind: str
    row: dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """Why a rank failed, by its own account. `time_s` is the machine's monotonic clock."""

    message: str
    is_invalid_input: bool
    time_s: float


def rank_main(place: Place, job: RankJob, log: Path, reports: "Connection[Any, Any]") -> None:
    """Entry point of a rank's process: runs the job, reports events and failure, exits with 0 or 1."""
    lead_group_that_ends_with_parent()
    redirect_output(log)
    os.environ.update(place.environment)
    # Megatron demands it for tensor and context parallelism on GPUs before Blackwell.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    try:
        # The server has imported torch already, so that OMP_NUM_THREADS would come too late.
        import torch

        from charm_megatron.train.job import run_rank

        torch.set_num_threads(place.num_threads)
        run_rank(job, lambda kind, row: reports.send(Event(kind, row)))
    except BaseException as error:
        traceback.print_exc()
        reports.send(failure_of(error))
        sys.exit(1)


def failure_of(error: BaseException) -> Failure:
    """What a rank reports of the exception that ends it."""
    is_invalid_input = isinstance(error, InvalidInput)
    kind = "" if is_invalid_input else f"{type(error).__name__}: "
    return Failure(kind + reason(error), is_invalid_input, time.monotonic())


def reason(error: BaseException) -> str:
    """What an exception says, in one line; of a bare `assert`, what it asserts."""
    words = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    if words or not frames:
        return words
    return f"{(frames[-1].line or '').removeprefix('assert ')} does not hold"


def lead_group_that_ends_with_parent() -> None:
    """Makes this process a group leader that is killed, with its group, once its parent process is gone.

    A parent that is killed cannot end its children itself. A thread can wait for that, as the main thread
    gives up Python's lock where it waits for its peers.
    """
    os.setpgid(0, 0)
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is started by multiprocessing"

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()


def redirect_output(path: Path) -> None:
    """Sends what this process and its children print to `path`, also what is printed from C++."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    # A file is block-buffered by default; the last lines before a crash are the ones that matter.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
