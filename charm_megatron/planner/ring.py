"""Rings: one side circulates past all ranks, one hop per step, each hop after the one before.

* `ring`: KV circulates and every rank computes its own queries (arXiv:2310.01889).
* `pass_q`: Q circulates instead, and every rank computes against its own KV; partial outputs follow behind Q,
  are merged at each station and end at home (arXiv:2411.01783).
* `burst_backward`: the forward pass of `ring`, the backward pass of `pass_q`: (q, dout, lse, delta) and dq travel,
  k, v, dk and dv stay (arXiv:2403.09347).
* `ring_self_attention`: K circulates for the logits of whole rows, then V for the outputs; there is no online
  softmax, so each rank holds its rows' logits against the whole sequence (arXiv:2105.13120).
* `double_ring`: a ring inside each domain, and a ring of such windows across domains (arXiv:2406.18485).
"""

import numpy as np

from charm_megatron.lowering.decisions import (
    Decisions,
    Method,
    Phase,
    Routes,
    method,
    one_phase,
    shard_routes,
)
from charm_megatron.planner.common import (
    Grid,
    as_planner,
    by_homes,
    equal_domains,
    owner_is_kv_home,
    owner_is_q_home,
    turned,
)
from charm_megatron.schedule.passes import (
    BACKWARD,
    FORWARD,
    LOGITS,
    LOGITS_BACKWARD,
    VALUES,
    VALUES_BACKWARD,
)
from charm_megatron.schedule.payload import Side
from charm_megatron.schedule.piece import IntArray
from charm_megatron.schedule.problem import Problem


@as_planner("arXiv:2310.01889", "KV circulates, one hop per step")
def ring(problem: Problem) -> Method:
    """KV of rank r visits rank r + 1, r + 2, .. in n - 1 hops."""
    return one_phase(_kv_round(problem))


@as_planner("arXiv:2411.01783", "Q circulates, partial outputs follow it home")
def pass_q(problem: Problem) -> Method:
    """Q of rank r visits rank r + 1, r + 2, .. in n - 1 hops, and its partial output follows."""
    return one_phase(_q_round(problem))


@as_planner("arXiv:2403.09347", "KV circulates forward, Q backward")
def burst_backward(problem: Problem) -> Method:
    """`ring` forward, `pass_q` backward."""
    return method([Phase(FORWARD, _kv_round(problem))], [Phase(BACKWARD, _q_round(problem))])


@as_planner("arXiv:2105.13120", "K circulates for the logits of whole rows, then V for the outputs")
def ring_self_attention(problem: Problem) -> Method:
    """Two rounds of `ring` either way: K then V forward, V then K backward."""
    decisions = _kv_round(problem)
    forward = (Phase(LOGITS, decisions), Phase(VALUES, decisions))
    backward = (Phase(VALUES_BACKWARD, decisions), Phase(LOGITS_BACKWARD, decisions))
    return method(forward, backward)


def _kv_round(problem: Problem) -> Decisions:
    return Decisions(problem, owner_is_q_home(problem), (_round(problem, "kv"),))


def _q_round(problem: Problem) -> Decisions:
    return Decisions(problem, owner_is_kv_home(problem), (_round(problem, "q"),))


def _round(problem: Problem, side: Side) -> Routes:
    """Every shard once past all ranks."""
    ranks = tuple(range(problem.cp_size))
    return shard_routes(problem, side, [turned(ranks, rank) for rank in ranks], range(problem.cp_size - 1))


@as_planner("arXiv:2406.18485", "a KV ring inside each domain, a ring of them across")
def double_ring(problem: Problem) -> Method:
    """KV crosses to the next domain once for each m - 1 hops inside one; every rank computes its own queries.

    The shards of one domain are a window. While a window circulates inside a domain, each of its shards also
    crosses to the same-index rank of the next domain, where it waits until the next window's turn.
    Raises `PlanError` for domains of different sizes.
    """
    grid = equal_domains(problem.domains, "ring")
    num_domains, size = len(grid), len(grid[0])
    stations = [
        [grid[(d + s) % num_domains][i] for s in range(num_domains)]
        for d in range(num_domains)
        for i in range(size)
    ]
    across = shard_routes(problem, "kv", stations, range(0, size * (num_domains - 1), size))
    windows = [
        shard_routes(
            problem,
            "kv",
            [
                turned(grid[(number // size + s) % num_domains], path[s])
                for number, path in enumerate(stations)
            ],
            range(size * s, size * s + size - 1),
            home=[path[0] for path in stations],
        )
        for s in range(num_domains)
    ]
    routes = (across, *windows)
    turn = by_homes(problem, _turns(grid))
    return one_phase(Decisions(problem, owner_is_q_home(problem), routes, not_before=turn))


def _turns(grid: Grid) -> IntArray:
    """The compute step in which a rank uses the KV of another, [q rank, KV rank]: a window waits for its turn."""
    num_domains, size = len(grid), len(grid[0])
    turns = np.zeros((num_domains * size,) * 2, dtype=np.int64)
    d, i = np.indices((num_domains, size))
    ranks = np.asarray(grid)
    for kv_d, kv_i in np.ndindex(num_domains, size):
        turns[ranks, ranks[kv_d, kv_i]] = size * ((d - kv_d) % num_domains) + (i - kv_i) % size
    return turns
