"""DistFlashAttn: ranks that a causal mask leaves idle compute for others (arXiv:2310.03294, 3.1).

With contiguous shards rank x has x + 1 blocks. In round t every rank x >= t fetches the KV of rank x - t. The ranks
x < t have nothing to fetch; each takes in the Q of rank n - t + x instead and returns (out, lse). Pairs at most
n / 2 apart are thus computed where Q is, the others where KV is, in n / 2 + 1 rounds instead of n.
"""

import numpy as np

from charm_megatron.errors import PlanError
from charm_megatron.lowering.decisions import (
    Decisions,
    Method,
    one_phase,
    owner_by_homes,
    shard_routes,
)
from charm_megatron.planner.common import as_planner
from charm_megatron.schedule.problem import Problem


@as_planner("arXiv:2310.03294", "ranks that a causal mask leaves idle compute for later ones")
def dist_flash(problem: Problem) -> Method:
    """Raises `PlanError` for a layout or mask by which early ranks are not idle."""
    layout, mask = problem.sharding.layout, problem.mask
    if layout != "contiguous" or mask.right != 0:
        raise PlanError(
            f"balances a mask that looks only back over contiguous shards, but the layout is {layout} "
            f"and the mask {mask}; layout contiguous with mask causal or window:LEFT,0 would work"
        )
    n = problem.cp_size
    q_home, kv_home = np.indices((n, n))
    helps = q_home - kv_home > n // 2
    pairs = [(x, y) for x in range(n) for y in range(x)]
    fetched = [(y, x) for x, y in pairs if not helps[x, y]]
    helped = [(x, y) for x, y in pairs if helps[x, y]]
    owner = owner_by_homes(problem, np.where(helps, kv_home, q_home))
    routes = (
        shard_routes(problem, "kv", fetched, [[x - y - 1] for y, x in fetched]),
        shard_routes(problem, "q", helped, [[n - (x - y) - 1] for x, y in helped]),
    )
    return one_phase(Decisions(problem, owner, routes))
