"""Rings: one side goes round all ranks, one hop a step, each hop after the one before.

* `ring`: KV goes round and every rank computes its own queries (arXiv:2310.01889).
* `pass_q`: Q goes round instead, and every rank computes against its own KV; partial outputs go round behind Q,
  are merged at each station and end at home (arXiv:2411.01783).
* `burst_backward`: the forward pass of `ring`, the backward pass of `pass_q`: (q, dout, lse, delta) and dq travel,
  k, v, dk and dv stay (arXiv:2403.09347).
* `ring_self_attention`: K goes round for the logits of whole rows, then V for the outputs; there is no online
  softmax, so each rank holds its rows' logits against the whole sequence (arXiv:2105.13120).
* `double_ring`: a ring inside each domain, and a ring of such windows across domains (arXiv:2406.18485).
"""

import numpy as np

from charm_megatron.lowering.decisions import (
    Decisions,
    IntArray,
    Method,
    Phase,
    Problem,
    one_phase,
    shard_routes,
)
from charm_megatron.planner.common import (
    Grid,
    Row,
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


def ring(problem: Problem) -> Method:
    """KV of rank r visits rank r + 1, r + 2, .. in n - 1 hops."""
    return one_phase(_kv_round("ring", problem))


def pass_q(problem: Problem) -> Method:
    """Q of rank r visits rank r + 1, r + 2, .. in n - 1 hops, and its partial output follows."""
    return one_phase(_q_round("pass_q", problem))


def burst_backward(problem: Problem) -> Method:
    """`ring` forward, `pass_q` backward."""
    name = "burst_backward"
    forward, backward = Phase(FORWARD, _kv_round(name, problem)), Phase(BACKWARD, _q_round(name, problem))
    return Method(name, (forward,), (backward,))


def ring_self_attention(problem: Problem) -> Method:
    """Two rounds of `ring` either way: K then V forward, V then K backward."""
    decisions = _kv_round("ring_self_attention", problem)
    forward = (Phase(LOGITS, decisions), Phase(VALUES, decisions))
    backward = (Phase(VALUES_BACKWARD, decisions), Phase(LOGITS_BACKWARD, decisions))
    return Method(decisions.name, forward, backward)


def _kv_round(name: str, problem: Problem) -> Decisions:
    routes = shard_routes(problem, "kv", _rows(problem.cp_size))
    return Decisions(name, problem, owner_is_q_home(problem), routes)


def _q_round(name: str, problem: Problem) -> Decisions:
    routes = shard_routes(problem, "q", _rows(problem.cp_size))
    return Decisions(name, problem, owner_is_kv_home(problem), routes)


def _rows(cp_size: int) -> list[Row]:
    """Every shard once round all ranks."""
    ranks = tuple(range(cp_size))
    return [(rank, turned(ranks, rank), range(cp_size - 1)) for rank in ranks]


def double_ring(problem: Problem) -> Method:
    """KV crosses to the next domain once for each m - 1 hops inside one; every rank computes its own queries.

    The shards of one domain are a window. While a window goes round inside a domain, each of its shards also
    crosses to the same-index rank of the next domain, where it waits until the next window's turn.
    Raises `PlanError` for domains of different sizes.
    """
    grid = equal_domains("double_ring", problem.domains, "ring")
    num_domains, size = len(grid), len(grid[0])
    across: list[Row] = []
    inside: list[Row] = []
    for d, ranks in enumerate(grid):
        for i, rank in enumerate(ranks):
            path = [grid[(d + s) % num_domains][i] for s in range(num_domains)]
            across.append((rank, path, range(0, size * (num_domains - 1), size)))
            for s, twin in enumerate(path):
                window = turned(grid[(d + s) % num_domains], twin)
                inside.append((rank, window, range(size * s, size * s + size - 1)))
    routes = (*shard_routes(problem, "kv", across), *shard_routes(problem, "kv", inside))
    turn = by_homes(problem, _turns(grid))
    return one_phase(Decisions("double_ring", problem, owner_is_q_home(problem), routes, not_before=turn))


def _turns(grid: Grid) -> IntArray:
    """The compute step in which a rank uses the KV of another, [q rank, KV rank]: a window waits for its turn."""
    num_domains, size = len(grid), len(grid[0])
    turns = np.zeros((num_domains * size,) * 2, dtype=np.int64)
    d, i = np.indices((num_domains, size))
    ranks = np.asarray(grid)
    for kv_d, kv_i in np.ndindex(num_domains, size):
        turns[ranks, ranks[kv_d, kv_i]] = size * ((d - kv_d) % num_domains) + (i - kv_i) % size
    return turns
