"""CHARM+ and RM+: log-depth merge levels, KV and Q transfers side by side, Q across domains (CHARM+ paper, 3.1-3.3).

Inside a domain of m ranks every step is a pair of perfect matchings: with its KV partner a rank swaps KV, with
its Q partner it swaps Q and later returns the partial output. Across domains only Q travels: rank (d, i)
sends its Q to its twin (d', i) of every other domain, where it joins the twin's own Q in the exchanges of
that domain, against that domain's KV ("together", Figure 3 and Algorithm 2).

Levels run from the largest to the smallest, as in Figure 3, so that Q partners come early and their outputs
return under later steps.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from charm_megatron.errors import PlanError
from charm_megatron.planner.matchings import Matching, exchanges
from charm_megatron.schedule.decisions import Decisions, IntArray, Problem, owner_by_homes, shard_routes

Row = tuple[int, Sequence[int], Sequence[int]]


def rm_plus(problem: Problem) -> Decisions:
    """RM+ over all ranks, wherever they are: CHARM+ of a single domain."""
    return _charm("rm_plus", problem, (tuple(range(problem.cp_size)),))


def charm(problem: Problem) -> Decisions:
    """CHARM+ over the problem's domains.

    Of domains with one rank each nothing is inside that could hide what crosses; RM+ over the ranks, which
    crosses with log-depth waits only, takes its place. Raises `PlanError` for domains of different sizes.
    """
    domains = problem.domains
    if not domains.are_even:
        sizes = ", ".join(str(len(ranks)) for ranks in domains.members)
        raise PlanError(
            f"charm needs domains of equal size, but they have {sizes} ranks; rm_plus takes any ranks, and "
            f"the setting charm.domains can declare equal domains"
        )
    if len(domains.members[0]) == 1:
        return _charm("charm", problem, (tuple(range(problem.cp_size)),))
    return _charm("charm", problem, domains.members)


def _charm(name: str, problem: Problem, grid: tuple[tuple[int, ...], ...]) -> Decisions:
    """`grid[d][i]` is the rank with index i in domain d."""
    steps = exchanges(len(grid[0]))[::-1]
    owner = owner_by_homes(problem, _owners(grid, steps))
    routes = (
        *shard_routes(problem, "q", _crossings(grid)),
        *shard_routes(problem, "kv", _kv_exchanges(grid, steps)),
        *shard_routes(problem, "q", _q_exchanges(grid, steps)),
    )
    return Decisions(name, problem, owner, routes)


def _owners(grid: tuple[tuple[int, ...], ...], steps: list[tuple[Matching, Matching | None]]) -> IntArray:
    """Who computes Q of one rank against KV of another, [q rank, KV rank].

    Q visits its twin in KV's domain; there it goes on to KV's rank if the two indices swap Q, else KV comes to it.
    """
    size, cp_size = len(grid[0]), len(grid) * len(grid[0])
    swaps_q = np.zeros((size, size), dtype=np.bool_)
    for _, q_partners in steps:
        for i, j in enumerate(q_partners or ()):
            if j is not None:
                swaps_q[i, j] = True
    owner = np.zeros((cp_size, cp_size), dtype=np.int64)
    for kv_domain in grid:
        for q_domain in grid:
            for i, q_rank in enumerate(q_domain):
                twin = kv_domain[i]
                owner[q_rank, kv_domain] = np.where(swaps_q[i], kv_domain, twin)
    return owner


def _hosts(grid: tuple[tuple[int, ...], ...], d: int, i: int) -> list[int]:
    """Where Q of rank (d, i) is: at home, then at its twins in domains d + 1, d + 2, .."""
    return [grid[(d + s) % len(grid)][i] for s in range(len(grid))]


def _crossings(grid: tuple[tuple[int, ...], ...]) -> Iterator[Row]:
    """Each Q to its twins; step s - 1 goes s domains on."""
    for d, ranks in enumerate(grid):
        for i, rank in enumerate(ranks):
            for s, host in enumerate(_hosts(grid, d, i)[1:], start=1):
                yield rank, (rank, host), (s - 1,)


def _kv_exchanges(
    grid: tuple[tuple[int, ...], ...], steps: list[tuple[Matching, Matching | None]]
) -> Iterator[Row]:
    first = len(grid) - 1  # the visiting Qs arrive under the own blocks and each other's
    for ranks in grid:
        for t, (partners, _) in enumerate(steps, start=first):
            for i, j in enumerate(partners):
                if j is not None:
                    yield ranks[i], (ranks[i], ranks[j]), (t,)


def _q_exchanges(
    grid: tuple[tuple[int, ...], ...], steps: list[tuple[Matching, Matching | None]]
) -> Iterator[Row]:
    """The own Q and all visiting ones to the Q partner of the step."""
    first = len(grid) - 1
    for d, ranks in enumerate(grid):
        for i, rank in enumerate(ranks):
            for s, host in enumerate(_hosts(grid, d, i)):
                for t, (_, partners) in enumerate(steps, start=first):
                    j = partners[i] if partners else None
                    if j is not None:
                        yield rank, (host, grid[(d + s) % len(grid)][j]), (t,)
