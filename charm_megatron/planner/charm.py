"""CHARM+ and RM+: log-depth merge levels, KV and Q transfers side by side, Q across domains (CHARM+ paper, 3.1-3.3).

Inside a domain of m ranks every step is a pair of perfect matchings: with its KV partner a rank swaps KV, with
its Q partner it swaps Q and later returns the partial output. Across domains only Q travels: rank (d, i)
sends its Q to its twin (d', i) of every other domain, where it meets that domain's KV. There are two readings
(a third, whose memory is bounded, is `charm` in `visits`):

* per domain (`charm_keep_kv`; Figure 5): the own Q first, then one more pass of the exchanges for each other domain's
  Q. The next Q crosses under a pass, and outputs go home under the pass after theirs. KV is exchanged once and kept,
  which is the fewest bytes and takes memory that grows with the domain; or again in each pass (`charm_per_domain`).
* together (`charm_together`; Figure 3 and Algorithm 2): visiting Qs join the twin's own Q in the exchanges of its
  domain, which begin when they have come. All domains' Qs are alive at once.

Levels run from the largest to the smallest, as in Figure 3, so that Q partners come early and their outputs
return under later steps.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from charm_megatron.lowering.decisions import (
    Decisions,
    Method,
    Routes,
    one_phase,
    owner_by_homes,
    shard_routes,
)
from charm_megatron.planner.common import Grid, as_planner, by_homes, equal_domains
from charm_megatron.planner.matchings import Matching, exchanges
from charm_megatron.schedule.payload import Side
from charm_megatron.schedule.piece import IntArray
from charm_megatron.schedule.problem import Problem

Steps = list[tuple[Matching, Matching | None]]
"""The exchanges of one pass: KV partners and Q partners by index inside the domain."""


@as_planner("CHARM+ paper, 3.2", "half of each level's partners swap Q, half KV")
def rm_plus(problem: Problem) -> Method:
    """RM+ over all ranks, wherever they are: CHARM+ of a single domain."""
    return _together(problem, (tuple(range(problem.cp_size)),))


@as_planner(
    "CHARM+ paper, 3.3 and Figure 5", "rm_plus inside each domain, its Q half again for each other domain's Q"
)
def charm_keep_kv(problem: Problem) -> Method:
    """CHARM+ over the problem's domains, one visiting Q at a time, KV of the own domain kept.

    Of domains with one rank each nothing is inside that could hide what crosses; RM+ over the ranks, which
    crosses with log-depth waits only, takes its place. Raises `PlanError` for domains of different sizes.
    """
    return _per_domain(problem, keep_kv=True)


@as_planner(
    "CHARM+ paper, Figure 5", "charm_keep_kv with KV exchanged again for each other domain's Q, not kept"
)
def charm_per_domain(problem: Problem) -> Method:
    """CHARM+ one visiting Q at a time, KV exchanged again for each. Grids and refusals are those of `charm_keep_kv`."""
    return _per_domain(problem, keep_kv=False)


@as_planner("CHARM+ paper, Figure 3", "rm_plus inside each domain, with the other domains' Q along")
def charm_together(problem: Problem) -> Method:
    """CHARM+ with all visiting Qs at once. Grids and refusals are those of `charm_keep_kv`."""
    return _together(problem, grid_of(problem))


def grid_of(problem: Problem) -> Grid:
    """`grid[d][i]` is the rank with index i in domain d; all ranks are one domain where each has its own."""
    grid = equal_domains(problem.domains, "rm_plus")
    return grid if len(grid[0]) > 1 else (tuple(range(problem.cp_size)),)


def _together(problem: Problem, grid: Grid) -> Method:
    steps = exchanges(len(grid[0]))[::-1]
    last_arrival = len(grid) - 1  # the visiting Qs arrive under the own blocks and each other's
    starts = [last_arrival] * len(grid)
    routes = (
        _routes(problem, "q", _crossings(grid, range(last_arrival))),
        _routes(problem, "kv", _kv_exchanges(grid, steps, last_arrival)),
        _routes(problem, "q", _q_exchanges(grid, steps, starts)),
    )
    return one_phase(Decisions(problem, owner_by_homes(problem, owners(grid, steps)), routes))


def _per_domain(problem: Problem, *, keep_kv: bool) -> Method:
    """Pass s, of the Qs from s domains away, begins at both steps starts[s]; the next Qs cross from there on."""
    grid = grid_of(problem)
    steps = exchanges(len(grid[0]))[::-1]
    starts = range(0, (len(steps) + 1) * len(grid), len(steps) + 1)
    routes = (
        _routes(problem, "q", _crossings(grid, starts)),
        *(
            _routes(problem, "kv", _kv_exchanges(grid, steps, start), copy=copy)
            for copy, start in enumerate(starts[:1] if keep_kv else starts)
        ),
        _routes(problem, "q", _q_exchanges(grid, steps, starts)),
    )
    passes, numbers = _passes(grid, steps)
    return one_phase(
        Decisions(
            problem,
            owner_by_homes(problem, owners(grid, steps)),
            routes,
            num_kv_copies=1 if keep_kv else len(grid),
            kv_copy=None if keep_kv else by_homes(problem, passes),
            not_before=by_homes(problem, np.asarray(starts)[passes] + numbers),
        )
    )


def owners(grid: Grid, steps: Steps) -> IntArray:
    """Who computes Q of one rank against KV of another, [q rank, KV rank].

    Q visits its twin in KV's domain; there it goes on to KV's rank if the two indices swap Q, else KV comes to it.
    """
    ranks = hosts(grid, 0)
    size = ranks.shape[1]
    swaps_q = np.zeros((size, size), dtype=np.bool_)
    for _, q_partners in steps:
        for i, j in enumerate(q_partners or ()):
            if j is not None:
                swaps_q[i, j] = True
    domain, index = places(ranks)
    twin = ranks[domain[None, :], index[:, None]]
    return np.where(swaps_q[index[:, None], index], np.arange(ranks.size), twin)


def _passes(grid: Grid, steps: Steps) -> tuple[IntArray, IntArray]:
    """Which pass a block belongs to, and its place there: 0 without a partner, k + 1 after exchange k.

    Both are [q rank, KV rank].
    """
    place = meetings(len(grid[0]), steps)
    passes, numbers = np.zeros((2, len(grid) * len(grid[0]), len(grid) * len(grid[0])), dtype=np.int64)
    for d, q_domain in enumerate(grid):
        for e, kv_domain in enumerate(grid):
            block = np.ix_(q_domain, kv_domain)
            passes[block], numbers[block] = (e - d) % len(grid), place
    return passes, numbers


def places(ranks: IntArray) -> tuple[IntArray, IntArray]:
    """The domain of each rank, and its index there, from the ranks [domain, index]."""
    domain, index = np.empty((2, ranks.size), dtype=np.int64)
    domain[ranks] = np.arange(ranks.shape[0])[:, None]
    index[ranks] = np.arange(ranks.shape[1])
    return domain, index


def meetings(size: int, steps: Iterable[Iterable[Matching | None]]) -> IntArray:
    """In which of these steps, counted from 1, indices i and j meet, [i, j]; 0 where they do not."""
    place = np.zeros((size, size), dtype=np.int64)
    for k, matchings in enumerate(steps, start=1):
        for partners in matchings:
            for i, j in enumerate(partners or ()):
                if j is not None:
                    place[i, j] = k
    return place


def hosts(grid: Grid | IntArray, s: int) -> IntArray:
    """Where the Q of each rank is when it visits the domain s further on, [domain, index]; s = 0: at home."""
    return np.roll(np.asarray(grid, dtype=np.int64), -s, axis=0)


Columns = tuple[IntArray, IntArray, IntArray]
"""Home ranks [R], one-hop paths [R, 2] and steps [R, 1] of routes."""


def _crossings(grid: Grid, crossing_steps: Sequence[int]) -> Iterator[Columns]:
    """Each Q to its twins; to the one s domains on in the step crossing_steps[s - 1]."""
    for s, step in zip(range(1, len(grid)), crossing_steps, strict=False):
        yield one_hop(hosts(grid, 0), hosts(grid, 0), hosts(grid, s), step)


def _kv_exchanges(grid: Grid, steps: Steps, start: int) -> Iterator[Columns]:
    """KV to the KV partner of each step."""
    for step, (partners, _) in enumerate(steps, start):
        yield swap(hosts(grid, 0), hosts(grid, 0), partners, step)


def _q_exchanges(grid: Grid, steps: Steps, starts: Sequence[int]) -> Iterator[Columns]:
    """Q to the Q partner of each step, wherever it is; s domains on the steps begin at starts[s]."""
    for s, start in enumerate(starts):
        for step, (_, partners) in enumerate(steps, start):
            if partners is not None:
                yield swap(hosts(grid, 0), hosts(grid, s), partners, step)


def swap(home: IntArray, at: IntArray, partners: Matching, step: int) -> Columns:
    """What is `at` ranks [domain, index] goes to the ranks with the partners' indices in the same domains."""
    swapping = [i for i, j in enumerate(partners) if j is not None]
    to = [j for j in partners if j is not None]
    return one_hop(home[:, swapping], at[:, swapping], at[:, to], step)


def one_hop(home: IntArray, src: IntArray, dst: IntArray, step: int) -> Columns:
    path = np.stack([src.ravel(), dst.ravel()], axis=1)
    return home.ravel(), path, np.full((path.shape[0], 1), step, dtype=np.int64)


def _routes(problem: Problem, side: Side, columns: Iterable[Columns], *, copy: int = 0) -> Routes:
    """All columns as one `Routes`."""
    listed = list(columns)
    if not listed:
        return shard_routes(problem, side, [], [])
    home, path, steps = (np.concatenate(column) for column in zip(*listed, strict=True))
    return shard_routes(problem, side, path, steps, home=home, copy=copy)
