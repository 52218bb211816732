"""Runs ranks to their end: hears their reports, finds out which failed first, and ends the others."""

import os
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import wait
from typing import Any

from charm_megatron.errors import InvalidInput, LaunchError, TransferTimeout
from charm_megatron.liveness.beats import SILENT_S
from charm_megatron.liveness.root import Root, find_root
from charm_megatron.liveness.standing import Standing
from charm_megatron.processes.failure import KILLED, Failure, failure_by_exit
from charm_megatron.processes.sockets import LATER_S

GATHER_S = 2.0
"""How long after a first failure to wait for others, which may have happened earlier."""

KERNEL_S = LATER_S + 1.0
"""How much longer, where the kernel may be about to give up the connection that keeps a rank waiting."""

TERMINATE_S = 3.0
"""How long a rank has between SIGTERM and SIGKILL."""

POLL_S = 0.5
"""An end may go unnoticed where a process that the rank has started holds its pipes open: hence a look now and then."""

PAUSE_S = 2.0
"""Between two looks at the ranks: the starter itself was stopped, and has no right to call others silent."""

OnReport = Callable[[int, Any], None]
"""Called with a rank and what it reports."""


@dataclass(frozen=True)
class Beat:
    """A rank lives, and does this."""

    standing: Standing


class RankProcess(ABC):
    """A rank as its starter sees it: the leader of a process group."""

    def __init__(self, rank: int, name: str | None = None) -> None:
        self.rank = rank
        self.name = name or f"rank {rank}"
        self.failure: Failure | None = None
        self.is_finished = False
        """Whether it has done what it was started for."""
        self.result: Any = None
        self.standing: Standing | None = None
        """What it said last of what it does; None where it says nothing of that."""
        self.heard_at_s: float | None = None
        """When it last beat or reported, by the monotonic clock; None before the first time."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """The process, and its group."""

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""

    @property
    @abstractmethod
    def sources(self) -> list[Any]:
        """What becomes ready when the rank reports or ends."""

    @abstractmethod
    def receive(self, on_report: OnReport) -> None:
        """Handles the reports that are there."""

    @abstractmethod
    def join(self, timeout_s: float | None) -> None:
        """Waits for the end of the process."""

    @abstractmethod
    def last_words(self) -> str:
        """What it printed before it failed, to follow the sentence that says how it failed."""

    @abstractmethod
    def close(self) -> None:
        """Frees what is held for a process that has ended."""

    def note_exit(self) -> None:
        """Makes a failure of an exit before the rank had finished, or with a code that is not 0."""
        code = self.exit_code
        assert code is not None, "the process has ended"
        if self.failure is None and (code or not self.is_finished):
            self.failure = failure_by_exit(code)


def run_to_end(
    start: Callable[[int], RankProcess],
    ranks: Sequence[int],
    on_report: OnReport,
    *,
    timeout_s: float | None = None,
    leave_s: float | None = None,
    deadline_s: float | None = None,
) -> list[RankProcess]:
    """Starts the ranks and returns them when all have ended; no process of theirs is left, in any case.

    With `leave_s` ranks are done when all have finished; they then have so long to end, in whatever way. With
    `deadline_s`, that of transfers, a rank fails that has beaten, and then not for a little longer. Raises
    `InvalidInput` where a rank says so, `LaunchError` where one fails otherwise, which names the rank or the link that
    kept the others waiting; `TransferTimeout` after `timeout_s`, `KeyboardInterrupt` for Ctrl-C.
    """
    started: list[RankProcess] = []
    try:
        with _interrupts_as_bytes() as interrupts:
            # extend() keeps those that were started when a later one fails to start.
            started.extend(start(rank) for rank in ranks)
            silence_s = inf if deadline_s is None else deadline_s + LATER_S
            limits = _Limits(timeout_s or inf, leave_s, silence_s)
            _follow(started, on_report, interrupts, limits)
    finally:
        _end(started)
    return started


@dataclass(frozen=True)
class _Limits:
    """Seconds, as `run_to_end` takes them, and how long a rank may be silent."""

    timeout_s: float
    leave_s: float | None
    silence_s: float


def _follow(
    ranks: Sequence[RankProcess], on_report: OnReport, interrupts: socket.socket, limits: _Limits
) -> None:
    """Returns when all ranks have ended or finished; raises for the one that failed first, or that is to blame."""
    running = list(ranks)
    looked_at_s = time.monotonic()
    deadline_s = looked_at_s + limits.timeout_s
    is_settled = False  # what the outcome is
    has_asked_kernel = False
    while running:
        if (left_s := deadline_s - time.monotonic()) <= 0:
            if not is_settled or has_asked_kernel or _is_final(ranks, running):
                break
            has_asked_kernel = True
            left_s = KERNEL_S
            deadline_s = time.monotonic() + left_s
        ready = wait([interrupts, *(s for rank in running for s in rank.sources)], min(POLL_S, left_s))
        if interrupts in ready:
            raise KeyboardInterrupt
        # Before reports are read: an end that is noticed in between would lose the last ones.
        ended = [rank for rank in running if rank.exit_code is not None]
        for rank in running:
            rank.receive(on_report)
        may_leave = limits.leave_s is not None and all(rank.is_finished for rank in ranks)
        for rank in ended:
            running.remove(rank)
            if not may_leave:
                rank.note_exit()
        looked_at_s = _looked(running, looked_at_s)
        is_silent = bool(_silent(running, limits.silence_s))
        if not is_settled and (may_leave or is_silent or any(rank.failure for rank in ranks)):
            is_settled = True
            patience_s = 0.0 if is_silent else GATHER_S
            deadline_s = time.monotonic() + (limits.leave_s or 0.0 if may_leave else patience_s)
    if error := _outcome(ranks, running, is_settled, limits):
        raise error


def _looked(running: Sequence[RankProcess], before_s: float) -> float:
    """When the ranks are looked at; where the last time is long ago, they could not be heard in between."""
    now_s = time.monotonic()
    if now_s - before_s > PAUSE_S:
        for rank in running:
            rank.heard_at_s = now_s if rank.heard_at_s is not None else None
    return now_s


def _silent(running: Iterable[RankProcess], longest_s: float) -> dict[int, float]:
    """Ranks that have not been heard of for longer, and for how long."""
    now_s = time.monotonic()
    return {
        rank.rank: now_s - rank.heard_at_s
        for rank in running
        if rank.heard_at_s is not None and not rank.is_finished and now_s - rank.heard_at_s > longest_s
    }


def _outcome(
    ranks: Sequence[RankProcess], running: Sequence[RankProcess], is_settled: bool, limits: _Limits
) -> Exception | None:
    if failed := _failed(ranks):
        root = _root(ranks, running)
        return _error(_speaker(failed, root), root)
    if silent := _silent(running, limits.silence_s):
        root = find_root(_standings(ranks), silent)
        return LaunchError(root.sentence) if root else None
    if running and not is_settled:
        numbers = ", ".join(str(rank.rank) for rank in running)
        return TransferTimeout(f"ranks {numbers} have not ended after {limits.timeout_s:g} s")
    return None


def _failed(ranks: Iterable[RankProcess]) -> list[RankProcess]:
    """The ranks that failed, in the order in which they are to blame."""
    return sorted((rank for rank in ranks if rank.failure), key=_blame)


def _standings(ranks: Iterable[RankProcess]) -> dict[int, Standing]:
    return {rank.rank: rank.standing for rank in ranks if rank.standing is not None}


def _root(ranks: Iterable[RankProcess], running: Iterable[RankProcess]) -> Root | None:
    """What made ranks fail; None where they failed by themselves."""
    failed = _failed(ranks)
    if not failed or failed[0].failure is None or not failed[0].failure.is_lost_peer:
        return None
    # One that was aborted has not said what it did then.
    has_words = failed[0].exit_code is None or failed[0].exit_code >= 0
    return find_root(_standings(ranks) if has_words else {}, _silent(running, SILENT_S), _dead(failed))


def _is_final(ranks: Iterable[RankProcess], running: Iterable[RankProcess]) -> bool:
    """Whether what made ranks fail is as well known as it will be."""
    root = _root(ranks, running)
    return root is None or root.is_final


def _dead(failed: Iterable[RankProcess]) -> list[tuple[int, tuple[str, ...]]]:
    """Ranks whose connections the kernel gave up, and the addresses of the other ends."""
    found = ((rank.rank, rank.failure.dead_addresses) for rank in failed if rank.failure)
    return [(rank, addresses) for rank, addresses in found if addresses]


def _speaker(failed: Sequence[RankProcess], root: Root | None) -> RankProcess:
    """Whose words to show: those of a rank that is to blame, if it said any."""
    blamed = [rank for rank in failed if root and rank.rank in root.ranks]
    return (blamed or failed)[0]


def _blame(rank: RankProcess) -> tuple[bool, bool, float]:
    """Sorts the rank whose failure caused those of the others first.

    The peers of a rank that was killed notice a lost connection, at almost the same time. Nothing that
    happens to a peer makes anybody kill a rank.
    """
    assert rank.failure is not None, "only ranks that failed are compared"
    return rank.exit_code not in KILLED, rank.failure.is_lost_peer, rank.failure.time_s


def _error(rank: RankProcess, root: Root | None) -> Exception:
    failure = rank.failure
    assert failure is not None, "only ranks that failed are reported"
    if not failure.is_invalid_input:
        because = f"{root.sentence}; " if root else ""
        return LaunchError(f"{because}{rank.name} failed: {failure.message}{rank.last_words()}")
    error = InvalidInput(failure.message)
    error.add_note(f"raised on {rank.name}:\n{failure.traceback}")
    return error


def _end(ranks: Sequence[RankProcess]) -> None:
    """Ends what still runs, first by asking, and everything that the ranks have started."""
    for signal_number, patience_s in ((signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, None)):
        for rank in ranks:
            _signal_group(rank, signal_number)
        deadline_s = None if patience_s is None else time.monotonic() + patience_s
        for rank in ranks:
            rank.join(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
    for rank in ranks:
        rank.close()


def _signal_group(rank: RankProcess, signal_number: int) -> None:
    """Signals a process and its group; the group outlives its leader where it had children."""
    with suppress(ProcessLookupError):
        os.killpg(rank.pid, signal_number)
    if rank.exit_code is None:
        # It may not have made its group yet.
        with suppress(ProcessLookupError):
            os.kill(rank.pid, signal_number)


@contextmanager
def _interrupts_as_bytes() -> Iterator[socket.socket]:
    """Inside, Ctrl-C makes a byte readable instead of raising an exception.

    The exception can come anywhere, also where Python only prints and forgets it, such as in a destructor; then the
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
