"""CHARM+ in halves of shards: as `charm_keep_kv`, but what a rank holds does not grow with ranks or domains.

Three things grow, or are large, where a domain's KV is kept and whole shards travel: the kept KV, in the backward pass
with its gradients; outputs that wait for a slower link; and what is twice as large because it is a whole shard. Here

* the own exchanges are those of RM+, a step for each: Q in halves, then KV, which is dropped when it has been read;
* between them come visits, of half a shard of Q from another domain each. KV stays where it is: the visiting Q goes
  to one rank of the domain after the other, and their outputs return. The next half crosses under a visit, and outputs
  go home under the visit after theirs. The first half crosses, and the last goes home, under own exchanges.

So KV is exchanged once, as if it were kept, and each Q is exchanged with all ranks of a visited domain instead of
half of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from charm_megatron.lowering.decisions import (
    Decisions,
    Method,
    Routes,
    chunk_routes,
    one_phase,
    owner_by_homes,
)
from charm_megatron.planner.charm import Columns, grid_of, hosts, one_hop, owners, rm_plus, swap
from charm_megatron.planner.common import Grid, Shape, as_planner, by_homes
from charm_megatron.planner.matchings import Matching, exchanges
from charm_megatron.schedule.payload import Side
from charm_megatron.schedule.piece import IntArray
from charm_megatron.schedule.problem import Problem
from charm_megatron.topology import Domains


def halves_shape(domains: Domains, num_heads: int, num_kv_heads: int) -> Shape:
    """Shards of two halves, where there are visits."""
    return Shape(least_chunks=2) if 1 < domains.num_domains < domains.cp_size else Shape()


@as_planner(
    "CHARM+ paper, 3.3",
    "rm_plus inside each domain; between its steps Q of others visits, by halves",
    shape=halves_shape,
)
def charm(problem: Problem) -> Method:
    """CHARM+ over the problem's domains in bounded memory. Shards of one chunk, not cut by `halves_shape`, visit whole.

    Of one domain, and of domains with one rank each, it is RM+ over all ranks: nothing inside could hide what crosses.
    Raises `PlanError` for domains of different sizes.
    """
    grid = grid_of(problem)
    if len(grid) == 1:
        return rm_plus.make(problem)
    ranks, halves = np.asarray(grid, dtype=np.int64), _halves(problem)
    timetable = _timetable(len(grid), len(grid[0]), range(int(halves.max()) + 1))
    routes = (
        _routes(problem, "q", _crossings(ranks, timetable), halves),
        _routes(problem, "kv", _exchanges(ranks, timetable, "kv"), halves),
        _routes(problem, "q", _exchanges(ranks, timetable, "q"), halves),
    )
    return one_phase(
        Decisions(
            problem,
            owner_by_homes(problem, _owners(grid)),
            routes,
            not_before=_compute_steps(problem, grid, timetable, halves),
        )
    )


class _Exchange(NamedTuple):
    """What partners swap in one step: KV, or the Q from `distance` domains away; all of it, or one half."""

    distance: int
    side: Side
    partners: Matching
    half: int | None = None


class _Visit(NamedTuple):
    """Half a shard of Q from `distance` domains away crosses in one step, and meets its twin's KV in a later one."""

    distance: int
    half: int
    crossing: int
    start: int


class _Timetable(NamedTuple):
    """`exchanges[t]` is that of step t; in some steps nothing is exchanged."""

    exchanges: tuple[_Exchange | None, ...]
    visits: tuple[_Visit, ...]


def _timetable(num_domains: int, size: int, halves: Sequence[int]) -> _Timetable:
    """Half of the own exchanges, the visits one after the other, and the rest of the own exchanges.

    An empty step before each visit keeps its first blocks apart from the last of the one before, so that they do not
    share an accumulator.
    """
    steps = exchanges(size)[::-1]
    own = [
        exchange
        for kv_partners, q_partners in steps
        for exchange in (
            *(_Exchange(0, "q", q_partners, half) for half in halves if q_partners is not None),
            _Exchange(0, "kv", kv_partners),
        )
    ]
    partners = [matching for pair in steps for matching in reversed(pair) if matching is not None]
    middle = (len(own) + 1) // 2
    order: list[_Exchange | None] = [*own[:middle]]
    visits: list[_Visit] = []
    for distance, half in product(range(1, num_domains), halves):
        visits.append(_Visit(distance, half, visits[-1].start if visits else 0, len(order)))
        order += [*(_Exchange(distance, "q", matching, half) for matching in partners), None]
    return _Timetable((*order, *own[middle:]), tuple(visits))


def _halves(problem: Problem) -> IntArray:
    """Which half of its shard each chunk is in, [num_chunks]; 0 where a shard is one chunk."""
    halves = np.zeros(problem.num_chunks, dtype=np.int64)
    for rank in range(problem.cp_size):
        chunks = problem.sharding.chunks_of(rank)
        halves[list(chunks[(len(chunks) + 1) // 2 :])] = 1
    return halves


def _owners(grid: Grid) -> IntArray:
    """Who computes Q of one rank against KV of another, [q rank, KV rank]: inside a domain as RM+, else KV's rank."""
    inside = owners(grid, exchanges(len(grid[0])))
    domain = np.empty(inside.shape[0], dtype=np.int64)
    domain[np.asarray(grid)] = np.arange(len(grid))[:, None]
    return np.where(domain[:, None] == domain[None, :], inside, np.arange(len(domain))[None, :])


def _compute_steps(problem: Problem, grid: Grid, timetable: _Timetable, halves: IntArray) -> IntArray:
    """The compute step of each block, [num_chunks, num_chunks]: after its exchange, at home first."""
    num_domains, size = len(grid), len(grid[0])
    by_index = np.zeros(
        (num_domains, 2, size, size), dtype=np.int64
    )  # distance, half of Q, index of Q and of KV
    for visit in timetable.visits:
        by_index[visit.distance, visit.half] = visit.start * np.eye(size, dtype=np.int64)
    for step, exchange in enumerate(timetable.exchanges):
        for i, j in enumerate(exchange.partners if exchange else ()):
            if exchange and j is not None:
                half = slice(None) if exchange.half is None else exchange.half
                by_index[exchange.distance, half, i, j] = step + 1
    domain, index = np.empty((2, num_domains * size), dtype=np.int64)
    domain[np.asarray(grid)] = np.arange(num_domains)[:, None]
    index[np.asarray(grid)] = np.arange(size)
    distance = by_homes(problem, (domain[None, :] - domain[:, None]) % num_domains)
    place = index[problem.home]
    return np.asarray(by_index[distance, halves[:, None], place[:, None], place[None, :]])


Halved = tuple[int | None, Columns]
"""Columns of routes of shards, and which half of each travels; None: all of it."""


def _crossings(ranks: IntArray, timetable: _Timetable) -> Iterator[Halved]:
    """Each Q to its twins."""
    for visit in timetable.visits:
        yield visit.half, one_hop(ranks, ranks, hosts(ranks, visit.distance), visit.crossing)


def _exchanges(ranks: IntArray, timetable: _Timetable, side: Side) -> Iterator[Halved]:
    """One side to the partners of each step, wherever it is."""
    for step, exchange in enumerate(timetable.exchanges):
        if exchange is not None and exchange.side == side:
            yield exchange.half, swap(ranks, hosts(ranks, exchange.distance), exchange.partners, step)


def _routes(problem: Problem, side: Side, halved: Iterable[Halved], halves: IntArray) -> Routes:
    """All columns as one `Routes` of chunks."""
    chunks, paths, steps = [], [], []
    for half, (home, path, step) in halved:
        row_of = np.full(problem.cp_size, -1, dtype=np.int64)
        row_of[home] = np.arange(len(home))
        rows = row_of[problem.home]
        travelling = np.nonzero((rows >= 0) & ((halves == half) | (half is None)))[0]
        chunks.append(travelling)
        paths.append(path[rows[travelling]])
        steps.append(step[rows[travelling]])
    if not chunks:
        return chunk_routes(problem, side, [], [], [])
    return chunk_routes(problem, side, *(np.concatenate(column) for column in (chunks, paths, steps)))
