"""TASP: KV in n - 1 pieces along n - 1 edge-disjoint Hamiltonian rings (arXiv:2509.26541).

A ring uses n of the n (n - 1) directed links between n ranks. Here every step uses all of them, each for 1 / (n - 1)
of a shard: the chunks of each shard are dealt out to the rings, and circulate in n - 1 hops. `Shape.chunk_parts` cuts
each chunk into n - 1 parts, so that all rings get equally much.
"""

from charm_megatron.errors import PlanError
from charm_megatron.lowering.decisions import Decisions, Method, chunk_routes, one_phase
from charm_megatron.planner.common import Shape, as_planner, owner_is_q_home, turned
from charm_megatron.planner.hamiltonian import hamiltonian_rings
from charm_megatron.schedule.problem import Problem
from charm_megatron.topology import Domains


def tasp_shape(domains: Domains, num_heads: int, num_kv_heads: int) -> Shape:
    """A part of each chunk for each ring."""
    return Shape(chunk_parts=max(1, len(_rings(domains.cp_size))))


def _rings(cp_size: int) -> tuple[tuple[int, ...], ...]:
    try:
        return hamiltonian_rings(cp_size)
    except PlanError as error:
        raise PlanError(f"has no plan: {error}, and ring takes any number") from None


@as_planner("arXiv:2509.26541", "KV in n - 1 parts along n - 1 edge-disjoint rings", shape=tasp_shape)
def tasp(problem: Problem) -> Method:
    """Every rank computes its own queries. Raises `PlanError` for 4 and 6 ranks, which have no such rings."""
    n = problem.cp_size
    chunks, path = [], []
    rings = _rings(n)
    for rank in range(n):
        for number, chunk in enumerate(problem.sharding.chunks_of(rank) if rings else ()):
            chunks.append(chunk)
            path.append(turned(rings[number % len(rings)], rank))
    routes = chunk_routes(problem, "kv", chunks, path, range(n - 1))
    fewest = min(len(problem.sharding.chunks_of(rank)) for rank in range(n))
    notes: tuple[str, ...] = ()
    if fewest < n - 1:
        notes = (f"a shard of {fewest} chunks leaves {n - 1 - fewest} of {n - 1} rings empty",)
    return one_phase(Decisions(problem, owner_is_q_home(problem), (routes,)), *notes)
