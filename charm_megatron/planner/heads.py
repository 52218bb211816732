"""Heads are dealt out: an all-to-all gives each rank of a group some heads of all the group's tokens.

* `ulysses`: the group is all ranks; nothing else is sent (arXiv:2309.14509).
* `hierarchical`: the group is a domain, and KV of the dealt heads circulates past the domains (arXiv:2405.07719).
* `hierarchical_ring_inside`: the group is the same-index ranks of all domains, and the ring is inside each domain.

With fewer KV heads than ranks in a group a KV head goes to every rank whose query heads read it.
"""

from collections.abc import Sequence
from math import lcm

import numpy as np

from charm_megatron.errors import PlanError
from charm_megatron.lowering.decisions import (
    Decisions,
    Method,
    Routes,
    one_phase,
    shard_routes,
)
from charm_megatron.planner.common import Shape, as_planner, divisors, equal_domains, listing
from charm_megatron.schedule.piece import IntArray
from charm_megatron.schedule.problem import Problem
from charm_megatron.topology import Domains

Groups = Sequence[Sequence[int]]
"""`groups[g][i]`: heads are dealt out among the ranks of groups[g]; KV goes from groups[g][i] to groups[g + 1][i]."""


def all_ranks_shape(domains: Domains, num_heads: int, num_kv_heads: int) -> Shape:
    """Heads for all ranks."""
    return _shape(domains.cp_size, num_heads, num_kv_heads)


def domain_shape(domains: Domains, num_heads: int, num_kv_heads: int) -> Shape:
    """Heads for the ranks of a domain."""
    members = equal_domains(domains, "ring")
    return _shape(len(members[0]), num_heads, num_kv_heads)


def same_index_shape(domains: Domains, num_heads: int, num_kv_heads: int) -> Shape:
    """Heads for one rank of each domain."""
    members = equal_domains(domains, "ring")
    return _shape(len(members), num_heads, num_kv_heads)


def _shape(ways: int, num_heads: int, num_kv_heads: int) -> Shape:
    """The fewest head groups by which `ways` ranks get equally many query heads and no KV head that they do not read.

    Each rank's KV heads are whole groups where `ways` divides their number; otherwise some heads are read by two
    ranks, and every KV head is a group.
    """
    if num_heads % ways:
        raise PlanError(
            f"deals query heads out to {ways} ranks, but {num_heads} heads do not divide by {ways}; they "
            f"would by {listing(divisors(num_heads))}, and ring takes any number of heads"
        )
    kv_head_groups = num_kv_heads if num_kv_heads % ways else ways
    return Shape(lcm(ways, kv_head_groups), kv_head_groups)


@as_planner("arXiv:2309.14509", "an all-to-all over heads", shape=all_ranks_shape)
def ulysses(problem: Problem) -> Method:
    """Every rank computes its heads of the whole sequence. Raises `PlanError` where heads are not cut for it."""
    return _deal(problem, [range(problem.cp_size)])


@as_planner(
    "arXiv:2405.07719",
    "an all-to-all over heads inside each domain, a KV ring across",
    shape=domain_shape,
)
def hierarchical(problem: Problem) -> Method:
    """Heads dealt out inside domains, a ring across. Raises `PlanError` for unequal domains or uncut heads."""
    return _deal(problem, equal_domains(problem.domains, "ring"))


@as_planner(
    "arXiv:2405.07719",
    "an all-to-all over heads across domains, a KV ring inside each",
    shape=same_index_shape,
)
def hierarchical_ring_inside(problem: Problem) -> Method:
    """Heads dealt out across domains, a ring inside. Raises `PlanError` for unequal domains or uncut heads."""
    members = equal_domains(problem.domains, "ring")
    return _deal(problem, list(zip(*members, strict=True)))


def _deal(problem: Problem, groups: Groups) -> Method:
    ways = len(groups[0])
    if problem.q_head_groups % ways:
        raise PlanError(
            f"deals query heads out to {ways} ranks, but the problem has {problem.q_head_groups} query head "
            f"groups; a multiple of {ways} would work"
        )
    q_heads = np.arange(problem.q_head_groups)
    dealt_to = q_heads * ways // problem.q_head_groups
    routes: list[Routes] = []
    for i in range(ways):
        mine = q_heads[dealt_to == i]
        read = np.unique(problem.kv_head_of(mine))
        dealt, (homes, rings) = _all_to_all(groups, i), _rings(groups, i)
        routes.append(shard_routes(problem, "q", dealt, [0], heads=mine.tolist()))
        routes.append(shard_routes(problem, "kv", dealt, [0], heads=read.tolist()))
        steps = range(1, len(groups))
        routes.append(shard_routes(problem, "kv", rings, steps, home=homes, heads=read.tolist()))
    owner = _owner(problem, groups, dealt_to)
    return one_phase(Decisions(problem, owner, tuple(routes)))


def _all_to_all(groups: Groups, i: int) -> list[tuple[int, int]]:
    """From every rank to the one of its group with index i."""
    return [(rank, ranks[i]) for ranks in groups for rank in ranks if rank != ranks[i]]


def _rings(groups: Groups, i: int) -> tuple[list[int], list[list[int]]]:
    """From there round the ranks with index i of all groups: home ranks, and the path of each."""
    homes = [rank for ranks in groups for rank in ranks]
    paths = [
        [groups[(g + s) % len(groups)][i] for s in range(len(groups))]
        for g, ranks in enumerate(groups)
        for _ in ranks
    ]
    return homes, paths


def _owner(problem: Problem, groups: Groups, dealt_to: IntArray) -> IntArray:
    """A block is computed in its query's group, by the rank to which its head is dealt."""
    by_rank = np.zeros((problem.cp_size, len(dealt_to)), dtype=np.int64)
    for ranks in groups:
        by_rank[list(ranks)] = np.asarray(ranks)[dealt_to]
    shape = (problem.num_chunks, problem.num_chunks, problem.q_head_groups)
    return np.broadcast_to(by_rank[problem.home][:, None, :], shape)
