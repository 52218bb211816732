"""CHARM+ in bounded memory: what a rank holds does not grow with ranks or domains (CHARM+ paper, 3.3 and Figure 5).

As `charm_per_domain`: the own exchanges inside a domain are those of RM+, and each Q of another domain visits, one
after the other, under exchanges of its own; received KV is dropped when it has been read. It differs in three things:

* A step has one exchange, of KV or of Q, so a rank holds what one exchange brings and what the next one is bringing.
* Half of the own exchanges come first and the rest last. The first Q crosses under the first half, the last outputs go
  home under the second, and between them each Q crosses under the visit before its own.
* Where the mask leaves more of one side of a pair of domains than of the other, only the side of which it leaves less
  is exchanged during the visit. Under a causal mask with zigzag halves that is half of Q where KV comes later in the
  sequence, and half of KV where it comes earlier.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from charm_megatron.lowering.decisions import (
    Decisions,
    Method,
    Routes,
    one_phase,
    owner_by_homes,
    shard_routes,
)
from charm_megatron.planner.charm import Columns, grid_of, hosts, meetings, one_hop, places, rm_plus, swap
from charm_megatron.planner.common import as_planner, by_homes
from charm_megatron.planner.matchings import exchanges
from charm_megatron.schedule.payload import Side
from charm_megatron.schedule.piece import IntArray
from charm_megatron.schedule.problem import Problem

BoolArray = npt.NDArray[np.bool_]


@as_planner(
    "CHARM+ paper, 3.3", "rm_plus inside each domain, between its steps visits of the other domains' Q"
)
def charm(problem: Problem) -> Method:
    """CHARM+ over the problem's domains in bounded memory.

    Of one domain, and of domains with one rank each, it is RM+ over all ranks: nothing inside could hide what crosses.
    Raises `PlanError` for domains of different sizes.
    """
    grid = grid_of(problem)
    if len(grid) == 1:
        return rm_plus.make(problem)
    return _Visits(problem, np.asarray(grid, dtype=np.int64)).method()


@dataclass(frozen=True, eq=False)
class _Timetable:
    """`exchange[s, x]`: the step of exchange x of Qs from s domains away; 0: of the own.

    `start[s]`: the compute step of the first blocks of their visit; `crossing[s]`: the step in which they cross.
    """

    exchange: IntArray
    start: IntArray
    crossing: IntArray


def _timetable(num_domains: int, num_exchanges: int) -> _Timetable:
    """An empty step before each visit keeps its first blocks apart from the last of the one before.

    They would share an accumulator otherwise.
    """
    num_first = num_exchanges // 2 or 1
    length = num_exchanges + 1
    visits = np.arange(num_domains - 1)
    start = np.concatenate([[0], num_first + 1 + visits * length])
    exchange = start[:, None] + np.arange(num_exchanges)
    exchange[0, num_first:] = exchange[-1, -1] + 1 + np.arange(num_exchanges - num_first)
    crossing = np.concatenate([[0, 0], start[1:-1]])
    return _Timetable(exchange, start, crossing)


class _Visits:
    """The decisions, over the ranks of `grid` [domain, index]."""

    def __init__(self, problem: Problem, grid: IntArray):
        self.problem, self.grid = problem, grid
        self.num_domains, self.size = grid.shape
        self.domain, self.index = places(grid)
        steps = exchanges(self.size)
        self.partners = [matching for pair in steps for matching in pair if matching is not None]
        takes_q = [side == "q" for pair in steps for side, m in zip(("kv", "q"), pair, strict=True) if m]
        self.moves_q = _moves_q(self._seen(), np.asarray(takes_q))
        self.timetable = _timetable(self.num_domains, len(self.partners))

    def method(self) -> Method:
        routes = (
            *self._routes("q", self._crossings()),
            *(
                part
                for side in ("kv", "q")
                for distance in range(self.num_domains)
                for part in self._routes(side, self._exchanges(side, distance), copy=distance)
            ),
        )
        distance = (self.domain[None, :] - self.domain[:, None]) % self.num_domains
        place = self._places()
        steps = np.concatenate([self.timetable.start[:, None], self.timetable.exchange + 1], axis=1)
        return one_phase(
            Decisions(
                self.problem,
                owner_by_homes(self.problem, self._owners(place)),
                routes,
                num_kv_copies=self.num_domains,
                kv_copy=by_homes(self.problem, distance),
                not_before=by_homes(self.problem, steps[distance, place]),
            )
        )

    def _seen(self) -> tuple[IntArray, IntArray]:
        """Tokens of Q, and of KV, that the mask leaves of each pair of domains, [q domain, KV domain]."""
        of_chunk = self.domain[self.problem.home]
        tokens = np.array([chunk.length for chunk in self.problem.sharding.chunks])
        is_in = of_chunk[:, None] == np.arange(self.num_domains)[None, :]  # [chunk, domain]
        weighted, unmasked = is_in * tokens[:, None], self.problem.unmasked.astype(np.float64)
        sees = unmasked @ is_in > 0  # [q chunk, KV domain]
        is_seen = is_in.T @ unmasked > 0  # [q domain, KV chunk]
        return weighted.T @ sees, is_seen @ weighted

    def _places(self) -> IntArray:
        """After which exchange indices i of Q and j of KV have met, [i, j] of ranks: 1 after the first; 0: at home."""
        place = meetings(self.size, ((matching,) for matching in self.partners))
        return place[self.index[:, None], self.index[None, :]]

    def _owners(self, place: IntArray) -> IntArray:
        """Who computes Q of one rank against KV of another, [q rank, KV rank]: where Q visits, or else KV's rank."""
        twin = self.grid[self.domain[None, :], self.index[:, None]]
        moves_q = self.moves_q[self.domain[:, None], self.domain[None, :], place - 1]
        return np.where((place > 0) & ~moves_q, twin, np.arange(self.problem.cp_size)[None, :])

    def _crossings(self) -> Iterator[Columns]:
        for distance in range(1, self.num_domains):
            step = int(self.timetable.crossing[distance])
            yield one_hop(self.grid, self.grid, hosts(self.grid, distance), step)

    def _exchanges(self, side: Side, distance: int) -> Iterator[Columns]:
        """One side to the partners of each exchange, in the domains in which it is that side that is exchanged."""
        at_domain = np.arange(self.num_domains)
        q_domain = (at_domain - distance) % self.num_domains
        homes = self.grid if side == "kv" else self.grid[q_domain]
        for x, matching in enumerate(self.partners):
            here = self.moves_q[q_domain, at_domain, x] == (side == "q")
            if here.any():
                step = int(self.timetable.exchange[distance, x])
                yield swap(homes[here], self.grid[here], matching, step)

    def _routes(self, side: Side, columns: Iterator[Columns], *, copy: int = 0) -> Iterator[Routes]:
        """All columns as one `Routes`, if there are any."""
        if listed := list(columns):
            home, path, steps = (np.concatenate(column) for column in zip(*listed, strict=True))
            yield shard_routes(self.problem, side, path, steps, home=home, copy=copy if side == "kv" else 0)


def _moves_q(seen: tuple[IntArray, IntArray], takes_q: BoolArray) -> BoolArray:
    """Whether Q is exchanged, else KV: [q domain, KV domain, exchange]; as in RM+ where neither side is the smaller."""
    of_q, of_kv = (tokens[:, :, None] for tokens in seen)
    return np.where(of_q == of_kv, takes_q, of_q < of_kv)
