"""The planners by name, and how a problem is cut for each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from charm_megatron.errors import PlanError, nearest
from charm_megatron.lowering.decisions import Method
from charm_megatron.planner import charm, dist_flash, fetch, grid, heads, ring, tasp
from charm_megatron.planner.common import Shape, uncut
from charm_megatron.schedule.problem import Problem
from charm_megatron.sharding import Sharding, refine
from charm_megatron.topology import Domains
from charm_megatron.workload import CAUSAL, Mask


@dataclass(frozen=True)
class Planner:
    """One schedule of the field.

    `make` turns a problem into a method; `shape` says how a problem must be cut for it, given the domains and the
    numbers of query and KV heads. Both raise `PlanError` for what the schedule cannot do.
    """

    name: str
    reference: str
    summary: str
    make: Callable[[Problem], Method]
    shape: Callable[[Domains, int, int], Shape] = uncut


_ALL = (
    Planner("ring", "arXiv:2310.01889", "KV goes round, one hop a step", ring.ring),
    Planner("pass_q", "arXiv:2411.01783", "Q goes round, partial outputs follow it home", ring.pass_q),
    Planner("burst_backward", "arXiv:2403.09347", "KV goes round forward, Q backward", ring.burst_backward),
    Planner(
        "ring_self_attention",
        "arXiv:2105.13120",
        "K goes round for the logits of whole rows, then V for the outputs",
        ring.ring_self_attention,
    ),
    Planner(
        "double_ring",
        "arXiv:2406.18485",
        "a KV ring inside each domain, a ring of them across",
        ring.double_ring,
    ),
    Planner("all_gather", "arXiv:2407.21783", "all KV at once, then one attention", fetch.all_gather),
    Planner(
        "merge", "CHARM+ paper, 3.1", "KV straight from one partner a step, in log2(n) levels", fetch.merge
    ),
    Planner("rm_plus", "CHARM+ paper, 3.2", "half of each level's partners swap Q, half KV", charm.rm_plus),
    Planner(
        "charm",
        "CHARM+ paper, 3.3 and Figure 5",
        "rm_plus inside each domain, its Q half once more for each other domain's Q",
        charm.charm,
    ),
    Planner(
        "charm_per_domain",
        "CHARM+ paper, Figure 5",
        "charm with KV exchanged again for each other domain's Q, not kept",
        charm.charm_per_domain,
    ),
    Planner(
        "charm_together",
        "CHARM+ paper, Figure 3",
        "rm_plus inside each domain, with the other domains' Q along",
        charm.charm_together,
    ),
    Planner(
        "dist_flash",
        "arXiv:2310.03294",
        "ranks that a causal mask leaves idle compute for later ones",
        dist_flash.dist_flash,
    ),
    Planner("ulysses", "arXiv:2309.14509", "an all-to-all over heads", heads.ulysses, heads.ulysses_shape),
    Planner(
        "hierarchical",
        "arXiv:2405.07719",
        "an all-to-all over heads inside each domain, a KV ring across",
        heads.hierarchical,
        heads.hierarchical_shape,
    ),
    Planner(
        "hierarchical_ring_inside",
        "arXiv:2405.07719",
        "an all-to-all over heads across domains, a KV ring inside each",
        heads.hierarchical_ring_inside,
        heads.hierarchical_ring_inside_shape,
    ),
    Planner(
        "tasp",
        "arXiv:2509.26541",
        "KV in n - 1 parts along n - 1 edge-disjoint rings",
        tasp.tasp,
        tasp.tasp_shape,
    ),
    Planner("attention_2d", "arXiv:2503.15758", "Q gathered along rows, KV along columns", grid.attention_2d),
    Planner("mesh", "arXiv:2512.20968", "Q round rows and KV round columns, one hop a step", grid.mesh),
)

PLANNERS: Mapping[str, Planner] = {planner.name: planner for planner in _ALL}


def plan(name: str, problem: Problem) -> Method:
    """The method of the planner `name`. Raises `PlanError` for an unknown name or an unsupported problem."""
    return _planner(name).make(problem)


def shape(name: str, domains: Domains, num_heads: int, num_kv_heads: int) -> Shape:
    """How a problem must be cut for the planner `name`.

    Raises `PlanError`, saying what would work, for an unknown name, or domains and heads that it cannot cut.
    """
    return _planner(name).shape(domains, num_heads, num_kv_heads)


def cut_problem(
    name: str, sharding: Sharding, domains: Domains, mask: Mask = CAUSAL, *, num_heads: int, num_kv_heads: int
) -> Problem:
    """The problem cut as the planner `name` needs it. Raises `PlanError` as `shape` does."""
    cut = shape(name, domains, num_heads, num_kv_heads)
    return Problem(refine(sharding, cut.chunk_parts), domains, mask, cut.q_head_groups, cut.kv_head_groups)


def _planner(name: str) -> Planner:
    if name not in PLANNERS:
        raise PlanError(f"unknown schedule {name!r}{nearest(name, PLANNERS)}")
    return PLANNERS[name]
