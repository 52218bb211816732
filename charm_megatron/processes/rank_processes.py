"""Runs one process a rank and collects what they write."""

import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from charm_megatron.errors import LaunchError, TransferTimeout

GATHER_S = 1.0
"""How long after a first failure others may go on: the cause of it may be about to show."""

POLL_S = 0.02
NUM_LINES = 15

OnLine = Callable[[int, str], None]
"""Called with a rank and a line it has written, from one thread at a time."""


@dataclass(frozen=True)
class RankOutput:
    """What a rank has written."""

    rank: int
    stdout: str
    stderr: str


class _Running:
    """A process, and the threads that read its two pipes."""

    def __init__(
        self, rank: int, process: subprocess.Popen[bytes], on_line: OnLine | None, lock: threading.Lock
    ):
        self.rank, self.process = rank, process
        self.lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self.failed_at_s: float | None = None
        self._on_line, self._lock = on_line, lock
        assert process.stdout is not None, "started with pipes"
        assert process.stderr is not None, "started with pipes"
        pipes = {"stdout": process.stdout, "stderr": process.stderr}
        self._readers = [
            threading.Thread(target=self._read, args=pipe, daemon=True) for pipe in pipes.items()
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, pipe: IO[bytes]) -> None:
        with pipe:
            for raw in pipe:
                line = raw.decode(errors="replace")
                self.lines[name].append(line)
                if self._on_line is not None:
                    with self._lock:
                        self._on_line(self.rank, line.rstrip("\n"))

    def finish(self) -> None:
        """Ends the process if it runs, and reads the rest."""
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join(GATHER_S)  # a grandchild may hold the pipe open

    @property
    def output(self) -> RankOutput:
        return RankOutput(self.rank, "".join(self.lines["stdout"]), "".join(self.lines["stderr"]))


def run_processes(
    start: Callable[[int], subprocess.Popen[bytes]],
    ranks: Sequence[int],
    timeout_s: float | None,
    on_line: OnLine | None,
) -> list[RankOutput]:
    """Runs `start(rank)` for all ranks until all have ended; after a failure, the others are killed.

    Raises `LaunchError` with the end of the first failure's output, `TransferTimeout` after `timeout_s`.
    """
    running: list[_Running] = []
    lock = threading.Lock()
    try:
        # extend() keeps those that were started when a later one fails to start.
        running.extend(_Running(rank, start(rank), on_line, lock) for rank in ranks)
        late = _wait(running, timeout_s)
    finally:
        for one in running:
            one.finish()
    failed = [one for one in running if one.failed_at_s is not None]
    if failed:
        raise _error(min(failed, key=lambda one: (one.process.returncode >= 0, one.failed_at_s)))
    if late:
        raise TransferTimeout(f"ranks {', '.join(map(str, late))} have not ended after {timeout_s:g} s")
    return [one.output for one in running]


def _wait(running: Sequence[_Running], timeout_s: float | None) -> list[int]:
    """Returns when all have ended, some time after one has failed, or after `timeout_s`; the ranks that still run."""
    started_s = time.monotonic()
    end_s = None if timeout_s is None else started_s + timeout_s
    while True:
        now_s = time.monotonic()
        left = []
        for one in running:
            code = one.process.poll()
            if code is None:
                left.append(one.rank)
            elif code and one.failed_at_s is None:
                one.failed_at_s = now_s
                end_s = min(now_s + GATHER_S, now_s + GATHER_S if end_s is None else end_s)
        if not left or (end_s is not None and now_s >= end_s):
            return left
        time.sleep(POLL_S)


def _error(one: _Running) -> LaunchError:
    lines = [*one.lines["stdout"], *one.lines["stderr"]][-NUM_LINES:]
    said = "".join(f"\n  {line.rstrip()}" for line in lines)
    return LaunchError(f"rank {one.rank} ended with code {one.process.returncode}{said and ':'}{said}")
