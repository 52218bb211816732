"""Runs one command per rank, and collects what they write."""

import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from charm_megatron.processes.follow import OnReport, RankProcess, run_to_end
from charm_megatron.processes.output import last_lines

READ_S = 1.0
"""How long after the end of a command its output is read: a process that it has started may hold the pipe open."""

OnLine = Callable[[int, str], None]
"""Called with a rank and a line it has written, from one thread at a time."""


@dataclass(frozen=True)
class RankOutput:
    """What a rank has written."""

    rank: int
    stdout: str
    stderr: str


class CommandRank(RankProcess):
    """A rank that runs a command, and the threads that read its two pipes."""

    def __init__(
        self, rank: int, process: subprocess.Popen[bytes], on_line: OnLine | None, lock: threading.Lock
    ) -> None:
        super().__init__(rank)
        self._process, self._on_line, self._lock = process, on_line, lock
        self._lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._end = os.pidfd_open(process.pid)
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
                self._lines[name].append(line)
                if self._on_line is not None:
                    with self._lock:
                        self._on_line(self.rank, line.rstrip("\n"))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    @property
    def sources(self) -> list[Any]:
        return [self._end]

    def receive(self, on_report: OnReport) -> None:
        """A command has nothing to report but its end."""
        self.is_finished = self.exit_code == 0

    def join(self, timeout_s: float | None) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return

    def last_words(self) -> str:
        """The last lines that it wrote."""
        output = self.output()
        said = last_lines(output.stdout + output.stderr)
        return f"; its last lines:\n{said}" if said else ""

    def close(self) -> None:
        os.close(self._end)

    def output(self) -> RankOutput:
        """What it wrote, once it has ended."""
        for reader in self._readers:
            reader.join(READ_S)
        return RankOutput(self.rank, "".join(self._lines["stdout"]), "".join(self._lines["stderr"]))


def run_commands(
    start: Callable[[int], subprocess.Popen[bytes]],
    ranks: Sequence[int],
    timeout_s: float | None,
    on_line: OnLine | None,
) -> list[RankOutput]:
    """Runs `start(rank)`, with pipes and a process group of its own, for all ranks until all have ended.

    After a failure the others are killed. Raises `LaunchError` with the end of the first failure's output,
    `TransferTimeout` after `timeout_s`.
    """
    lock = threading.Lock()
    started: list[CommandRank] = []

    def start_rank(rank: int) -> CommandRank:
        started.append(CommandRank(rank, start(rank), on_line, lock))
        return started[-1]

    run_to_end(start_rank, ranks, lambda rank, report: None, timeout_s=timeout_s)
    return [one.output() for one in started]
