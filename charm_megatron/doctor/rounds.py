"""All pairs of ranks, measured in rounds that rank 0 calls through a store.

A round is a matching, so that no rank has two links to measure at once, and the next begins when all of its pairs are
done. Rank 0 waits for nobody longer than the deadline of a round: a rank that has gone is left out of later ones.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch

from charm_megatron.doctor.link import THREAD_S, LinkPlan, Told, measure
from charm_megatron.doctor.places import RankTold
from charm_megatron.doctor.stores import PrefixStore, Store
from charm_megatron.doctor.verdicts import PairMeasured, better_of, suspects
from charm_megatron.errors import LaunchError
from charm_megatron.planner.matchings import round_robin_matchings
from charm_megatron.topology import Domains

JOIN_S = 120.0
"""How much later than rank 0 others may come: they import torch, each from its own disk."""
SLACK_S = 5.0
"""How much longer than its deadline a round may take, on a machine that is busy."""
LEAVE_S = 5.0
"""How long rank 0, which may hold the store, waits for others to have read the end."""
GONE = "a rank of the pair is gone"

Pair = tuple[int, int]
OnProgress = Callable[[int, int, str], None]
"""Called with the rounds that are done, all rounds as far as known, and what is measured next."""


@dataclass(frozen=True)
class LinkCheck:
    """What came of it: what each rank said, the ranks that never came, and the links between those that did."""

    told: dict[int, RankTold]
    missing: tuple[int, ...]
    measured: tuple[PairMeasured, ...]


class Seat:
    """A rank's place at the store."""

    def __init__(self, store: Store, rank: int, plan: LinkPlan, device: torch.device) -> None:
        self.store, self.rank, self.plan, self.device = store, rank, plan, device

    @property
    def round_s(self) -> float:
        """The most that a round takes."""
        return self.plan.deadline_s + THREAD_S + SLACK_S

    def told_of(self, number: int, pairs: Sequence[Pair]) -> Told | None:
        """Measures this rank's pair in a round; None where it rests."""
        pair = next((pair for pair in pairs if self.rank in pair), None)
        if pair is None:
            return None
        alone = PrefixStore(f"link {number} {pair[0]} {pair[1]}", self.store)
        return measure(alone, pair.index(self.rank), self.plan, self.device)

    def wait(self, key: str, timeout_s: float) -> str | None:
        """The value of a key; None where it is not there in time."""
        try:
            self.store.wait([key], timedelta(seconds=max(0.01, timeout_s)))
            value: bytes = self.store.get(key)
        except RuntimeError:
            return None
        return value.decode()


def follow(seat: Seat, told: RankTold) -> None:
    """The part of every rank but the first. Raises `LaunchError` where rank 0 says nothing any more."""
    seat.store.set(f"told {seat.rank}", told.as_json())
    number, patience_s = 0, JOIN_S + seat.round_s
    while True:
        order = seat.wait(f"round {number}", patience_s)
        if order is None:
            raise LaunchError(f"rank {seat.rank} has heard nothing of rank 0 for {patience_s:g} s")
        pairs = [tuple(pair) for pair in json.loads(order)]
        if not pairs:
            seat.store.set(f"left {seat.rank}", "")
            return
        if (value := seat.told_of(number, pairs)) is not None:
            seat.store.set(f"done {number} {seat.rank}", json.dumps(asdict(value)))
        number, patience_s = number + 1, seat.round_s + SLACK_S


def lead(
    seat: Seat,
    told: RankTold,
    num_ranks: int,
    domains_of: Callable[[Mapping[int, RankTold]], Domains],
    on_progress: OnProgress,
) -> LinkCheck:
    """The part of rank 0. Slow pairs are measured again, one by one while all others are quiet."""
    everyone = {0: told, **_gather(seat, num_ranks)}
    rounds = [_present(matching, everyone) for matching in round_robin_matchings(num_ranks)]
    leader = _Leader(seat)
    measured: dict[Pair, PairMeasured] = {}
    for done, pairs in enumerate(rounds):
        on_progress(done, len(rounds), f"{len(pairs)} pairs at once")
        measured |= leader.run(pairs)
    slow = list(suspects(list(measured.values()), domains_of(everyone)))
    for done, pair in enumerate(slow):
        words = f"ranks {pair.first} and {pair.second} again, alone"
        on_progress(len(rounds) + done, len(rounds) + len(slow), words)
        measured[pair.ranks] = better_of(pair, leader.run([pair.ranks])[pair.ranks])
    leader.end(rank for rank in everyone if rank)
    missing = tuple(rank for rank in range(num_ranks) if rank not in everyone)
    return LinkCheck(everyone, missing, tuple(measured[pair] for pair in sorted(measured)))


def _gather(seat: Seat, num_ranks: int) -> dict[int, RankTold]:
    deadline_s = time.monotonic() + JOIN_S
    said = {rank: seat.wait(f"told {rank}", deadline_s - time.monotonic()) for rank in range(1, num_ranks)}
    return {rank: RankTold.from_json(text) for rank, text in said.items() if text is not None}


def _present(matching: Sequence[int | None], present: Mapping[int, RankTold]) -> list[Pair]:
    partners = ((rank, partner) for rank, partner in enumerate(matching) if partner is not None)
    return [(one, other) for one, other in partners if one < other and one in present and other in present]


class _Leader:
    """Calls one round after the other."""

    def __init__(self, seat: Seat) -> None:
        self._seat, self._number = seat, 0
        self._gone: set[int] = set()

    def run(self, pairs: Sequence[Pair]) -> dict[Pair, PairMeasured]:
        """What the two ends of each pair say, once all have spoken or their time is over."""
        able = [pair for pair in pairs if not self._gone & set(pair)]
        found = {pair: PairMeasured(*pair, problem=GONE) for pair in pairs if pair not in able}
        if not able:
            return found
        seat, number = self._seat, self._number
        self._number += 1
        deadline_s = time.monotonic() + seat.round_s
        seat.store.set(f"round {number}", json.dumps(able))
        own = seat.told_of(number, able)
        said: dict[int, Told] = {} if own is None else {seat.rank: own}
        for rank in (rank for pair in able for rank in pair if rank != seat.rank):
            text = seat.wait(f"done {number} {rank}", deadline_s - time.monotonic())
            if text is None:
                self._gone.add(rank)
            said[rank] = Told(problem=GONE) if text is None else Told(**json.loads(text))
        return found | {pair: _joined(pair, said[pair[0]], said[pair[1]]) for pair in able}

    def end(self, others: Iterator[int]) -> None:
        """Sends all home, and lets them go first."""
        seat = self._seat
        with suppress(RuntimeError):
            seat.store.set(f"round {self._number}", "[]")
        deadline_s = time.monotonic() + LEAVE_S
        for rank in others:
            if rank not in self._gone:
                seat.wait(f"left {rank}", deadline_s - time.monotonic())


def _joined(pair: Pair, first: Told, second: Told) -> PairMeasured:
    """Latency is that of the end which began, and counts where both had pings returned."""
    latency_s = None if second.latency_s is None else first.latency_s
    problem = first.problem or second.problem
    if latency_s is None:
        return PairMeasured(*pair, problem=problem)
    return PairMeasured(*pair, latency_s, first.bytes_per_s, second.bytes_per_s, problem)
