"""KV comes straight from its home, and every rank computes its own queries.

* `all_gather`: all KV at once; what is at home is computed meanwhile, everything else in one go (context
  parallelism of Llama 3, arXiv:2407.21783).
* `merge`: one partner a step. Level l = 1, 2, 4, .. fetches the KV of the l partners r ^ i, i in [l, 2l), so that
  there are log2(n) levels and no transfer waits for another (CHARM+ paper, 3.1). Each step is a perfect matching.
  A number of ranks that is no power of two has no such levels and takes the matchings of a round robin.
"""

from charm_megatron.lowering.decisions import Decisions, Method, Routes, one_phase, shard_routes
from charm_megatron.planner.common import as_planner, owner_is_q_home
from charm_megatron.planner.matchings import round_robin_matchings, xor_matchings
from charm_megatron.schedule.problem import Problem


@as_planner("arXiv:2407.21783", "all KV at once, then one attention")
def all_gather(problem: Problem) -> Method:
    """Every shard goes to all other ranks in step 0."""
    n = problem.cp_size
    pairs = [(x, y) for x in range(n) for y in range(n) if x != y]
    return _fetch(problem, shard_routes(problem, "kv", pairs, [0]))


@as_planner("CHARM+ paper, 3.1", "KV straight from one partner per step, in log2(n) levels")
def merge(problem: Problem) -> Method:
    """Step t swaps KV along matching t."""
    n = problem.cp_size
    matchings = round_robin_matchings(n) if n & (n - 1) else xor_matchings(n)
    hops = [
        (x, y, t) for t, partners in enumerate(matchings) for x, y in enumerate(partners) if y is not None
    ]
    routes = shard_routes(problem, "kv", [(x, y) for x, y, _ in hops], [[t] for *_, t in hops])
    return _fetch(problem, routes)


def _fetch(problem: Problem, routes: Routes) -> Method:
    return one_phase(Decisions(problem, owner_is_q_home(problem), (routes,)))
