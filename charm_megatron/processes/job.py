"""Heartbeats of ranks that something else has started, such as torchrun: over the store that they meet at.

There is no starter of ours to listen. Rank 0 listens to all, rank 1 to rank 0. A rank that loses a peer asks the store
what the others do, says what keeps them waiting, and ends, which ends the job.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charm_megatron.errors import CharmError, InvalidInput, LaunchError
from charm_megatron.liveness.beats import heartbeats
from charm_megatron.liveness.process import standing_of_process
from charm_megatron.liveness.root import Root, find_root
from charm_megatron.liveness.standing import Standing
from charm_megatron.processes.environment import launched_rank
from charm_megatron.processes.failure import Failure, failure_of
from charm_megatron.processes.sockets import LATER_S

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

SHORTEST_PERIOD_S, LONGEST_PERIOD_S = 0.5, 5.0
PERIODS_PER_DEADLINE = 10
PAUSE_PERIODS = 4
"""From the end of a beat to the next: more than a machine that is busy makes of one."""
FIRST_SPEAKS_S = 10.0
"""How long other ranks keep silent, so that the first that failed is heard."""


@dataclass(frozen=True)
class _Heard:
    """What one rank has put into the store. `at_s` is its host's clock."""

    count: int
    at_s: float
    standing: Standing
    has_ended: bool
    failed: str
    """Why it ended, where that is not that it had lost a peer."""
    dead: tuple[str, ...]
    """The other end of the connection that it lost because the kernel gave it up."""


@contextmanager
def job_heartbeats(environment: Mapping[str, str], deadline_s: float) -> Iterator[None]:
    """Inside the block this process, a rank of a job, beats, and ends where another one is silent for the deadline.

    `environment` has what a launcher sets (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Any error in the block but
    `InvalidInput` becomes a `LaunchError`, which says what keeps the job from going on: of all ranks, on the first.
    """
    placement = launched_rank(environment)
    assert placement is not None, "the caller has looked"
    address = (environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))
    has_agent = "TORCHELASTIC_RUN_ID" in environment
    rank = JobRank(placement.rank, placement.world_size, address, deadline_s, has_agent=has_agent)
    with heartbeats(rank.beat, rank.period_s):
        try:
            yield
        except InvalidInput:
            rank.leave()
            raise
        except Exception as error:
            raise rank.failed(error) from error
        rank.leave()


class JobRank:
    """One rank of a job, as it speaks to the others."""

    def __init__(
        self, rank: int, world_size: int, address: tuple[str, int], deadline_s: float, *, has_agent: bool
    ) -> None:
        self.rank, self.world_size, self.deadline_s = rank, world_size, deadline_s
        self.period_s = min(max(deadline_s / PERIODS_PER_DEADLINE, SHORTEST_PERIOD_S), LONGEST_PERIOD_S)
        self._address, self._parent = address, os.getppid() if has_agent else None
        self._store: Store | None = None
        self._lock = threading.Lock()
        self._count = time.monotonic_ns()
        """Differs at each beat, also from those of a block before this one."""
        self._has_ended = False
        """Whether its last words are said."""
        self._reached_at_s = self._beaten_at_s = time.monotonic()
        self._listens_to = self._peers_to_listen_to()
        self._changed: dict[int, tuple[int, float]] = {}
        """The last count heard of a rank, and when, by the clock of this process, it was new."""

    def _peers_to_listen_to(self) -> tuple[int, ...]:
        if self.rank == 0:
            return tuple(range(1, self.world_size))
        return (0,) if self.rank == 1 else ()

    # ------------------------------------------------------------------ beating

    def beat(self, standing: Standing) -> None:
        """Says what this rank does, and looks after those that it listens to. Ends the process where one is silent."""
        if self._parent is not None and os.getppid() != self._parent:
            self._end("the launcher that had started it has ended")
        self._note_pause()
        try:
            with self._lock:
                if self._has_ended:
                    return
                self._put(standing)
                verdict = self._verdict()
            self._reached_at_s = time.monotonic()
            if verdict:
                self._end(verdict)
        except RuntimeError as error:
            self._store = None
            if time.monotonic() - self._reached_at_s > self.deadline_s + LATER_S:
                self._end(f"{self._unreachable}: {str(error).partition(chr(10))[0]}")
        self._beaten_at_s = time.monotonic()

    def _note_pause(self) -> None:
        """Where this process itself was stopped between two beats, as all of a job by Ctrl-Z, nobody was silent."""
        now_s = time.monotonic()
        if now_s - self._beaten_at_s > PAUSE_PERIODS * self.period_s:
            self._reached_at_s = now_s
            self._changed = {rank: (count, now_s) for rank, (count, _) in self._changed.items()}

    def leave(self) -> None:
        """Says that this rank has done its work."""
        with self._lock, suppress(RuntimeError):
            self._put(Standing(), has_ended=True)

    def _put(
        self, standing: Standing, *, has_ended: bool = False, failed: str = "", dead: tuple[str, ...] = ()
    ) -> None:
        self._count += 1
        self._has_ended = has_ended
        said = {
            "count": self._count,
            "at_s": time.time(),
            "standing": standing.to_json(),
            "has_ended": has_ended,
            "failed": failed,
            "dead": dead,
        }
        self._reached().set(_key(self.rank), json.dumps(said))

    def _verdict(self) -> str:
        """Why the job ends; empty while it does not."""
        store = self._reached()
        if store.check(["verdict"]):
            return store.get("verdict").decode()
        now_s = time.monotonic()
        heard = self._heard(self._listens_to)
        for rank, one in heard.items():
            if one.has_ended or self._changed.get(rank, (0, 0.0))[0] != one.count:
                self._changed[rank] = one.count, now_s
        limit_s = self.deadline_s + LATER_S + self.period_s
        silent = {rank: now_s - at_s for rank, (_, at_s) in self._changed.items() if now_s - at_s > limit_s}
        silent = {rank: for_s for rank, for_s in silent.items() if not heard[rank].has_ended}
        root = find_root({rank: one.standing for rank, one in heard.items()}, silent) if silent else None
        if root is None:
            return ""
        store.set("verdict", root.sentence)
        return root.sentence

    def _heard(self, ranks: Iterable[int]) -> dict[int, _Heard]:
        """What these ranks have said, as far as they have said anything."""
        store = self._reached()
        keys = {rank: _key(rank) for rank in ranks}
        if not keys:
            return {}
        if not store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if store.check([key])}
        values = store.multi_get(list(keys.values())) if keys else []
        return {rank: _parsed(json.loads(value)) for rank, value in zip(keys, values, strict=True)}

    def _reached(self) -> "Store":
        """A connection of our own: the one of torch.distributed is blocked where a rank waits in it."""
        if self._store is None:
            from datetime import timedelta

            from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

            store = TCPStore(
                *self._address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
            )
            self._store = PrefixStore("charm_megatron", store)
        return self._store

    @property
    def _unreachable(self) -> str:
        host, port = self._address
        return f"the store of the job at {host}:{port} does not answer: its process, or this host's network, is gone"

    # ------------------------------------------------------------------ ending

    def _end(self, why: str) -> None:
        """Ends this process from the thread that beats; of all ranks that end so, one says why."""
        if self._is_first_to_speak():
            sys.stderr.write(f"error: rank {self.rank} ends: {why}\n")
            sys.stderr.flush()
        end_stopped_siblings()
        os._exit(1)

    def _is_first_to_speak(self) -> bool:
        first: list[bool] = []

        def ask() -> None:
            with suppress(RuntimeError):
                first.append(self._reached().add("spoken", 1) == 1)

        _within(ask, self.period_s)
        return not first or first[0]

    def failed(self, error: Exception) -> LaunchError:
        """How this rank ends: the first of a job to fail says why, others, which lost it as a peer, do not.

        Takes the time of some heartbeats, in which other ranks come to their own ends.
        """
        failure = failure_of(error)
        said: list[str] = []
        _within(lambda: said.append(self._explained(failure)), 3 * self.period_s + 3 * LATER_S)
        sentence = said[0] if said else (self._unreachable if failure.is_lost_peer else "")
        is_first = self._is_first_to_speak()
        end_stopped_siblings()
        if not is_first:
            # Who ends sooner has the first one ended by the launcher before it has spoken.
            time.sleep(FIRST_SPEAKS_S)
            return LaunchError(f"rank {self.rank} ended because another had failed before it")
        words = str(error) if isinstance(error, CharmError) else failure.traceback
        because = f"{sentence}; " if sentence else ""
        return LaunchError(f"{because}rank {self.rank} failed: {words}")

    def _explained(self, failure: Failure) -> str:
        with self._lock:
            why = "" if failure.is_lost_peer else failure.message
            dead = failure.dead_addresses
            self._put(standing_of_process(), has_ended=True, failed=why, dead=dead)
            if why:
                return ""
            ranks = self._peers()
            before = self._heard(ranks)
        time.sleep(2 * self.period_s + LATER_S / 2)
        root = self._root_after(before)
        if root and not root.is_final:
            time.sleep(LATER_S)  # the kernel may have more to say
            root = self._root_after(before) or root
        return root.sentence if root else ""

    def _root_after(self, before: Mapping[int, _Heard]) -> Root | None:
        with self._lock:
            return _root(before, self._heard(before))

    def _peers(self) -> tuple[int, ...]:
        """The ranks that this one exchanges with; all of a job, where that is not known."""
        ranks = {rank for exchange in standing_of_process().exchanges for rank in exchange.ranks}
        return tuple(sorted(ranks)) or tuple(range(self.world_size))


def _root(before: Mapping[int, _Heard], after: Mapping[int, _Heard]) -> Root | None:
    failed = [(one.at_s, rank, one.failed) for rank, one in after.items() if one.failed]
    if failed:
        _, rank, why = min(failed)
        return Root(f"rank {rank} failed: {why}", (rank,))
    now_s = max(one.at_s for one in after.values())
    silent = {
        rank: now_s - one.at_s
        for rank, one in after.items()
        if not one.has_ended and rank in before and before[rank].count == one.count
    }
    standings = {rank: one.standing for rank, one in after.items()}
    dead = [(rank, one.dead) for rank, one in after.items() if one.dead]
    return find_root(standings, silent, dead)


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _parsed(said: Mapping[str, Any]) -> _Heard:
    standing = Standing.from_json(said["standing"])
    return _Heard(
        said["count"], said["at_s"], standing, said["has_ended"], said["failed"], tuple(said["dead"])
    )


def _within(function: Callable[[], None], seconds: float) -> None:
    """Calls `function` in a thread, and goes on without it after some seconds: the store may be out of reach."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)


def end_stopped_siblings() -> list[int]:
    """Kills ranks of this job that are stopped (SIGSTOP) on this host; returns their process ids.

    A launcher that ends them by SIGTERM would wait for what they cannot do.
    """
    ended = []
    for children in Path(f"/proc/{os.getppid()}/task").glob("*/children"):
        with suppress(OSError):
            for pid in map(int, children.read_text().split()):
                if _is_stopped_rank(pid):
                    os.kill(pid, signal.SIGKILL)
                    ended.append(pid)
    return ended


def _is_stopped_rank(pid: int) -> bool:
    folder = Path(f"/proc/{pid}")
    try:
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        variables = dict(line.partition(b"=")[::2] for line in (folder / "environ").read_bytes().split(b"\0"))
    except OSError:
        return False
    port = os.environ.get("MASTER_PORT", "").encode()
    return state == "T" and b"RANK" in variables and variables.get(b"MASTER_PORT") == port
