"""Ring attention: KV goes round, one hop a step (arXiv:2310.01889)."""

import numpy as np

from charm_megatron.schedule.decisions import Decisions, Problem, owner_by_homes, shard_routes


def ring(problem: Problem) -> Decisions:
    """Every rank computes its own queries; KV visits rank r + 1, r + 2, .. in n - 1 hops, each after the last."""
    n = problem.cp_size
    owner = owner_by_homes(problem, np.repeat(np.arange(n)[:, None], n, axis=1))
    rows = ((r, [(r + hop) % n for hop in range(n)], range(n - 1)) for r in range(n))
    return Decisions("ring", problem, owner, shard_routes(problem, "kv", rows))
