"""Starts the ranks of a job on this machine, and lets none of them outlive it.

A server process imports torch and Megatron once and forks every rank (multiprocessing's "forkserver"). The
launcher itself imports neither; nothing on it or on the server touches CUDA.
"""

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from charm_megatron.errors import InvalidInput, LaunchError
from charm_megatron.train.rank import (
    Event,
    Failure,
    Place,
    RankJob,
    failure_of,
    lead_group_that_ends_with_parent,
    rank_main,
    redirect_output,
)
from charm_megatron.train.run_folder import RunFolder

GATHER_FAILURES_S = 2.0
"""How long after a first failure to wait for others, which may have happened earlier."""

TERMINATE_S = 3.0
"""How long a rank has between SIGTERM and SIGKILL."""

NUM_LOG_LINES = 15

KILLED = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)
"""Exit codes of a process that the kernel ended."""


def run_ranks(job: RankJob, num_ranks: int, on_event: Callable[[Event], None]) -> None:
    """Runs the job on `num_ranks` new processes until all have finished.

    Raises `InvalidInput` where a rank says so, `LaunchError` where one fails otherwise. Every process is
    gone when this returns or raises.
    """
    start_server()
    port, num_threads = free_port(), threads_per_rank(num_ranks)
    ranks: list[_Rank] = []
    try:
        with _interrupts_as_bytes() as interrupts:
            for rank in range(num_ranks):
                place = Place(rank, num_ranks, port, num_threads)
                ranks.append(_Rank(rank, (place, job, job.folder.log(rank))))
            _follow(ranks, job.folder, on_event, interrupts)
    finally:
        _end(ranks)


class _Rank:
    """One rank as the launcher sees it."""

    def __init__(self, rank: int, args: tuple[Any, ...]) -> None:
        self.rank = rank
        self.failure: Failure | None = None
        self._may_report = True
        self.reports, sender = multiprocessing.Pipe(duplex=False)
        self.process = _start(rank_main, (*args, sender), f"rank{rank}")
        sender.close()

    @property
    def sources(self) -> list[Any]:
        """What becomes ready when the rank reports or ends. The end of its reports would stay ready forever."""
        return [self.process.sentinel, *([self.reports] if self._may_report else [])]

    def receive(self, on_event: Callable[[Event], None]) -> None:
        """Handles the reports that are there."""
        try:
            while self._may_report and self.reports.poll():
                report = self.reports.recv()
                if isinstance(report, Failure):
                    self.failure = report
                else:
                    on_event(report)
        except EOFError:
            self._may_report = False

    def note_exit(self) -> None:
        """Makes a failure of an exit without a report: the process was killed, or crashed outside Python."""
        code = self.process.exitcode
        if code and self.failure is None:
            name = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            self.failure = Failure(name, False, time.monotonic())


@contextmanager
def _interrupts_as_bytes() -> Iterator[socket.socket]:
    """Inside, Ctrl-C makes a byte readable instead of raising an exception.

    The exception can come anywhere, also where Python only prints and forgets it, as in a destructor; then the
    job would go on. Outside the main thread, where Python raises none, there is nothing to turn into bytes.
    """
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    with reader, writer:
        if threading.current_thread() is not threading.main_thread():
            yield reader
            return

        def note(signal_number: int, frame: object) -> None:
            with suppress(BlockingIOError):
                writer.send(b"!")

        previous = signal.signal(signal.SIGINT, note)
        try:
            yield reader
        finally:
            signal.signal(signal.SIGINT, previous)


def _follow(
    ranks: Sequence[_Rank],
    folder: RunFolder,
    on_event: Callable[[Event], None],
    interrupts: socket.socket,
) -> None:
    """Waits until all ranks have finished well, or one has failed; raises `KeyboardInterrupt` for Ctrl-C."""
    running = list(ranks)
    deadline_s: float | None = None
    while running and (deadline_s is None or time.monotonic() < deadline_s):
        timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        ready = wait([interrupts, *(source for rank in running for source in rank.sources)], timeout_s)
        if interrupts in ready:
            raise KeyboardInterrupt
        for rank in list(running):
            # An end that is noticed before the last reports are read would lose them.
            has_ended = rank.process.exitcode is not None
            rank.receive(on_event)
            if has_ended:
                rank.note_exit()
                running.remove(rank)
        if deadline_s is None and any(rank.failure for rank in ranks):
            deadline_s = time.monotonic() + GATHER_FAILURES_S
    failed = [rank for rank in ranks if rank.failure]
    if failed:
        raise _error(min(failed, key=_blame), folder)


def _blame(rank: _Rank) -> tuple[bool, float]:
    """Sorts the rank whose failure caused those of the others first.

    The peers of a rank that was killed notice a lost connection, at almost the same time. Nothing that
    happens to a peer makes the kernel kill a rank.
    """
    assert rank.failure is not None, "only ranks that failed are compared"
    return rank.process.exitcode not in KILLED, rank.failure.time_s


def _error(rank: _Rank, folder: RunFolder) -> Exception:
    assert rank.failure is not None, "only ranks that failed are reported"
    if rank.failure.is_invalid_input:
        return InvalidInput(rank.failure.message)
    log = folder.log(rank.rank)
    return LaunchError(
        f"rank {rank.rank} failed: {rank.failure.message}\nlast lines of {log}:\n{last_lines(log)}"
    )


def last_lines(log: Path, num_lines: int = NUM_LOG_LINES) -> str:
    """The end of a log, indented."""
    text = log.read_text("utf-8", errors="replace") if log.exists() else ""
    return "\n".join(f"  {line}" for line in text.splitlines()[-num_lines:])


def _end(ranks: Sequence[_Rank]) -> None:
    """Ends what still runs, first by asking, and everything that the ranks have started."""
    for signal_number, patience_s in ((signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, None)):
        for rank in ranks:
            _signal_group(rank.process, signal_number)
        deadline_s = None if patience_s is None else time.monotonic() + patience_s
        for rank in ranks:
            rank.process.join(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
    for rank in ranks:
        rank.reports.close()
        rank.process.close()


def _signal_group(process: ForkServerProcess, signal_number: int) -> None:
    """Signals a process and its group; the group outlives its leader where it had children."""
    assert process.pid is not None, "the process was started"
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal_number)
    if process.exitcode is None:
        # It may not have made its group yet.
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal_number)


def call_in_server(function: Callable[..., Any], *args: Any) -> Any:
    """Runs `function` in a process forked from the server, and returns what it returns.

    Raises `InvalidInput` where the function does, `LaunchError` where it fails otherwise.
    """
    start_server()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="charm-megatron-") as folder:
        log = Path(folder) / "log"
        process = _start(_call, (function, args, log, sender), "check")
        sender.close()
        try:
            result = receiver.recv()
        except EOFError:
            process.join()
            result = Failure(f"ended with code {process.exitcode}", False, time.monotonic())
        finally:
            _signal_group(process, signal.SIGKILL)
            process.join()
            receiver.close()
        if not isinstance(result, Failure):
            return result
        if result.is_invalid_input:
            raise InvalidInput(result.message)
        raise LaunchError(f"{result.message}\n{last_lines(log)}")


def _call(
    function: Callable[..., Any], args: tuple[Any, ...], log: Path, sender: "Connection[Any, Any]"
) -> None:
    lead_group_that_ends_with_parent()
    redirect_output(log)
    try:
        sender.send(function(*args))
    except Exception as error:
        sender.send(failure_of(error))


def _start(target: Callable[..., None], args: tuple[Any, ...], name: str) -> ForkServerProcess:
    process = multiprocessing.get_context("forkserver").Process(target=target, args=args, name=name)
    try:
        process.start()
    except (EOFError, OSError) as error:
        raise LaunchError(
            f"the process that imports Megatron ended; run `{IMPORT_COMMAND}` to see why"
        ) from error
    return process


PRELOADED = "charm_megatron.train.preload"
IMPORT_COMMAND = f"{Path(sys.executable).name} -m {PRELOADED}"


def start_server() -> None:
    """Starts the server that forks ranks, unless it runs. Returns before its imports are done."""
    multiprocessing.set_forkserver_preload([PRELOADED])
    with _silence(), _interrupts_ignored():
        forkserver.ensure_running()


@contextmanager
def _silence() -> Iterator[None]:
    """Sends the output of processes that are started inside the block nowhere: imports print warnings."""
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
        yield
    finally:
        for descriptor, original in zip((1, 2), saved, strict=True):
            os.dup2(original, descriptor)
            os.close(original)
        os.close(nowhere)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes that are started inside the block ignore Ctrl-C; the launcher ends them."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def free_port() -> int:
    """A TCP port of this machine that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def threads_per_rank(num_ranks: int) -> int:
    """OMP_NUM_THREADS where it is set, else an even share of the cores that this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() else max(1, len(os.sched_getaffinity(0)) // num_ranks)
