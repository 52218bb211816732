"""What planners share: how a problem must be cut for them, which domains they can use, tables by home rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from charm_megatron.errors import PlanError
from charm_megatron.schedule.piece import IntArray
from charm_megatron.schedule.problem import Problem
from charm_megatron.topology import Domains

Grid = tuple[tuple[int, ...], ...]
"""Ranks by two indices."""


@dataclass(frozen=True)
class Shape:
    """How a problem must be cut for a planner: into how many head groups, and each chunk into how many parts."""

    q_head_groups: int = 1
    kv_head_groups: int = 1
    chunk_parts: int = 1


def uncut(domains: Domains, num_heads: int, num_kv_heads: int) -> Shape:
    """The shape for planners that move whole shards."""
    return Shape()


def equal_domains(name: str, domains: Domains, instead: str) -> Grid:
    """The ranks of each domain. Raises `PlanError` for domains of different sizes, which `instead` can do."""
    if not domains.are_even:
        sizes = ", ".join(str(len(ranks)) for ranks in domains.members)
        raise PlanError(
            f"{name} needs domains of equal size, but they have {sizes} ranks; {instead} takes any ranks, and "
            f"the setting charm.domains can declare equal domains"
        )
    return domains.members


def by_homes(problem: Problem, table: IntArray) -> IntArray:
    """`table[q_home, kv_home]` for each block, [num_chunks, num_chunks]."""
    return table[problem.home[:, None], problem.home[None, :]]


def owner_is_q_home(problem: Problem) -> IntArray:
    """The owner table by which every rank computes its own queries."""
    shape = (problem.num_chunks, problem.num_chunks, problem.q_head_groups)
    return np.broadcast_to(problem.home[:, None, None], shape)


def owner_is_kv_home(problem: Problem) -> IntArray:
    """The owner table by which every rank computes against its own KV."""
    shape = (problem.num_chunks, problem.num_chunks, problem.q_head_groups)
    return np.broadcast_to(problem.home[None, :, None], shape)


def turned(ring: tuple[int, ...], start: int) -> tuple[int, ...]:
    """The same ring, beginning at `start`."""
    at = ring.index(start)
    return ring[at:] + ring[:at]


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def listing(numbers: Sequence[int]) -> str:
    """As in "1, 2 or 4"."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last
