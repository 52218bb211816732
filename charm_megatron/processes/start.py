"""Starts one rank: a process that runs a function, reports over a pipe, and ends with its parent.

A rank leads a process group of its own. All that it starts (Megatron's checkpoint writer starts a manager and more)
can so be ended with it, and Ctrl-C on the terminal reaches the starter only, which ends the ranks.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from charm_megatron.liveness.beats import heartbeats
from charm_megatron.processes.failure import Failure, failure_of
from charm_megatron.processes.follow import Beat, OnReport, RankProcess
from charm_megatron.processes.output import last_lines_of, redirect_output
from charm_megatron.processes.server import ForkServer

Report = Callable[[Any], None]
"""Sends something that can be pickled to the starter."""


@dataclass(frozen=True)
class _Finished:
    """The last report of a rank that has done its work."""

    result: Any


def start_rank(
    rank: int,
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    *,
    server: ForkServer | None = None,
    log: Path | None = None,
    enter: Callable[[int], None] | None = None,
    leave: Callable[[], None] | None = None,
    name: str | None = None,
) -> RankProcess:
    """Starts a process that runs `function(report, *args)`, and finishes with what it returns; then calls `leave`.

    It is forked from this process, in which no CUDA context may exist, or from `server`, which then gets everything
    pickled. What it prints goes to `log` if given. It calls `enter(rank)` first, while it has a single thread: to
    enter a network namespace, say. Raises `LaunchError` where `server` has ended.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    everything = (sender, function, args, rank, log, enter, leave)
    if server is not None:
        process = server.start_process(_main, everything, name or f"rank{rank}")
    else:
        process = multiprocessing.get_context("fork").Process(target=_main, args=everything, name=name)
        process.start()
    sender.close()
    return _FunctionRank(rank, name, process, receiver, log)


class _FunctionRank(RankProcess):
    """A rank that runs a function."""

    def __init__(
        self,
        rank: int,
        name: str | None,
        process: BaseProcess,
        reports: "Connection[Any, Any]",
        log: Path | None,
    ) -> None:
        super().__init__(rank, name)
        self._process, self._reports, self._log = process, reports, log
        self._may_report = True

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "the process was started"
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    @property
    def sources(self) -> list[Any]:
        """The end of its reports would stay ready forever, and is left out once it was read."""
        return [self._process.sentinel, *([self._reports] if self._may_report else [])]

    def receive(self, on_report: OnReport) -> None:
        """Keeps a failure or a result, and hands on everything else."""
        try:
            while self._may_report and self._reports.poll():
                report = pickle.loads(self._reports.recv_bytes())
                self.heard_at_s = time.monotonic()
                if isinstance(report, Failure):
                    self.failure, self.standing = report, report.standing
                elif isinstance(report, Beat):
                    self.standing = report.standing
                elif isinstance(report, _Finished):
                    self.is_finished, self.result = True, report.result
                else:
                    on_report(self.rank, report)
        except (EOFError, ConnectionResetError):
            self._may_report = False

    def join(self, timeout_s: float | None) -> None:
        self._process.join(timeout_s)

    def last_words(self) -> str:
        """The end of its log; without a log, the traceback of what ended it."""
        assert self.failure is not None, "only a rank that failed is asked"
        if self._log is not None:
            return f"\nlast lines of {self._log}:\n{last_lines_of(self._log)}"
        return f"\n{self.failure.traceback}".rstrip()

    def close(self) -> None:
        self._reports.close()
        self._process.close()


def _main(
    sender: "Connection[Any, Any]",
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    log: Path | None,
    enter: Callable[[int], None] | None,
    leave: Callable[[], None] | None,
) -> None:
    """Entry point of a rank's process; exits with 0 or 1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    lock = threading.Lock()

    def send(report: Any) -> None:
        # By value: with `sender.send` torch would share tensors through this process, which is about to end.
        pickled = pickle.dumps(report)
        with lock:
            sender.send_bytes(pickled)

    try:
        if enter is not None:
            enter(rank)
        _lead_group_that_ends_with_parent()
        if log is not None:
            redirect_output(log)
        with heartbeats(lambda standing: send(Beat(standing))):
            send(_Finished(function(send, *args)))
            if leave is not None:
                leave()
    except BaseException as error:
        if log is not None:
            traceback.print_exc()
        send(failure_of(error))
        sys.exit(1)


def _lead_group_that_ends_with_parent() -> None:
    """Makes this process a group leader that is killed, with its group, once its parent process is gone.

    A parent that is killed cannot end its children itself. A thread can wait for that, since the main thread
    releases Python's lock where it waits for its peers.
    """
    os.setpgid(0, 0)
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is started by multiprocessing"

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()
