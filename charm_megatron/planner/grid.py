"""Two dimensions: ranks in a grid of a rows and b columns. Q spreads along its row, KV along its column.

The rank in row i and column j computes the blocks of all Q of row i against all KV of column j, and outputs are
reduced along rows. A rank so receives b - 1 Q and a - 1 KV where it receives n - 1 KV in a ring.

* `attention_2d`: both spread in one step, as collectives do (arXiv:2503.15758).
* `mesh`: both circulate, one hop of one of them per step, whichever opens more blocks (arXiv:2512.20968).

Equal domains are the rows, so that only KV crosses. With one domain, one rank a domain or unequal domains the grid is
the most square one, with no more columns than rows.
"""

from math import isqrt

import numpy as np

from charm_megatron.lowering.decisions import (
    Decisions,
    Method,
    Routes,
    one_phase,
    owner_by_homes,
    shard_routes,
)
from charm_megatron.planner.common import Grid, as_planner, divisors, turned
from charm_megatron.schedule.problem import Problem
from charm_megatron.topology import Domains


@as_planner("arXiv:2503.15758", "Q gathered along rows, KV along columns")
def attention_2d(problem: Problem) -> Method:
    """Every Q to the other ranks of its row, every KV to those of its column, in step 0."""
    rows = rows_of(problem.domains)
    routes = (
        shard_routes(problem, "q", _stars(rows), [0]),
        shard_routes(problem, "kv", _stars(_transposed(rows)), [0]),
    )
    return _method(problem, rows, routes)


@as_planner("arXiv:2512.20968", "Q circulates along rows and KV along columns, one hop per step")
def mesh(problem: Problem) -> Method:
    """Every Q round its row, every KV round its column, in the order of `hop_order`."""
    rows = rows_of(problem.domains)
    columns = _transposed(rows)
    q_steps, kv_steps = hop_order(len(columns), len(rows))
    routes = (
        shard_routes(problem, "q", [turned(row, x) for row in rows for x in row], q_steps),
        shard_routes(problem, "kv", [turned(column, x) for column in columns for x in column], kv_steps),
    )
    return _method(problem, rows, routes)


def rows_of(domains: Domains) -> Grid:
    """The rows of the grid."""
    if domains.are_even and 1 < domains.num_domains < domains.cp_size:
        return domains.members
    ranks = [rank for members in domains.members for rank in members]
    width = max(divisor for divisor in divisors(len(ranks)) if divisor <= isqrt(len(ranks)))
    return tuple(tuple(ranks[first : first + width]) for first in range(0, len(ranks), width))


def hop_order(num_columns: int, num_rows: int) -> tuple[list[int], list[int]]:
    """(steps of Q hops, steps of KV hops): each step brings what meets more of the other side, KV if equal.

    KV first, since an output can only leave when its Q has met all KV of the column.
    """
    q_steps: list[int] = []
    kv_steps: list[int] = []
    for step in range(num_columns + num_rows - 2):
        q_left, kv_left = len(q_steps) < num_columns - 1, len(kv_steps) < num_rows - 1
        kv_opens_more = len(q_steps) >= len(kv_steps)  # a KV meets each Q that is here, a Q each KV
        (kv_steps if kv_left and (kv_opens_more or not q_left) else q_steps).append(step)
    return q_steps, kv_steps


def _transposed(rows: Grid) -> Grid:
    return tuple(zip(*rows, strict=True))


def _stars(lines: Grid) -> list[tuple[int, int]]:
    """From every rank to each other one of its line."""
    return [(x, y) for line in lines for x in line for y in line if x != y]


def _method(problem: Problem, rows: Grid, routes: tuple[Routes, ...]) -> Method:
    """Q of row i against KV of column j belongs to the rank in row i and column j."""
    ranks = np.asarray(rows)
    row_of, column_of = np.empty((2, problem.cp_size), dtype=np.int64)
    row_of[ranks], column_of[ranks] = np.indices(ranks.shape)
    owner = owner_by_homes(problem, ranks[row_of[:, None], column_of[None, :]])
    notes: tuple[str, ...] = ()
    if not problem.domains.are_even:
        notes = (
            f"domains of different sizes cannot be rows: the grid is {len(rows)} x {len(rows[0])} ranks in order",
        )
    return one_phase(Decisions(problem, owner, routes), *notes)
