"""What planners share: how a problem must be cut for them, which domains they can use, tables by home rank."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from charm_megatron.errors import PlanError
from charm_megatron.lowering.decisions import Method, NamedMethod
from charm_megatron.schedule.piece import IntArray
from charm_megatron.schedule.problem import Problem
from charm_megatron.topology import Domains

Grid = tuple[tuple[int, ...], ...]
"""Ranks by two indices."""


@dataclass(frozen=True)
class Shape:
    """How a problem must be cut for a planner: into how many head groups, and each chunk into how many parts.

    `least_chunks`: chunks that each shard must have; where the layout gives it fewer, all are cut into more parts.
    """

    q_head_groups: int = 1
    kv_head_groups: int = 1
    chunk_parts: int = 1
    least_chunks: int = 1


def uncut(domains: Domains, num_heads: int, num_kv_heads: int) -> Shape:
    """The shape for planners that move whole shards."""
    return Shape()


@dataclass(frozen=True)
class Planner:
    """One schedule of the field: what `as_planner` makes of a function.

    `make` turns a problem into a method; `shape` says how a problem must be cut for it, given the domains and the
    numbers of query and KV heads. Their `PlanError`s read on from the schedule's name: "needs ..", "deals ..".
    """

    name: str
    reference: str
    summary: str
    make: Callable[[Problem], Method]
    shape: Callable[[Domains, int, int], Shape]

    def __call__(self, problem: Problem) -> NamedMethod:
        """The method for `problem`. Raises `PlanError`, saying what would work, for what the schedule cannot do."""
        with _named(self.name):
            return NamedMethod(self.name, self.make(problem))

    def shape_for(self, domains: Domains, num_heads: int, num_kv_heads: int) -> Shape:
        """How a problem must be cut for the schedule. Raises `PlanError` for domains and heads that it cannot cut."""
        with _named(self.name):
            return self.shape(domains, num_heads, num_kv_heads)


def as_planner(
    reference: str, summary: str, *, shape: Callable[[Domains, int, int], Shape] = uncut
) -> Callable[[Callable[[Problem], Method]], Planner]:
    """Makes a planner of a function from a problem to a method; the function's name is the schedule's.

    `reference` says where the idea is from: a paper, a page, a name. `summary` says in a line what it does.
    """

    def decorate(make: Callable[[Problem], Method]) -> Planner:
        return Planner(make.__name__, reference, summary, make, shape)

    return decorate


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Puts the schedule's name before what is wrong."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{name} {error}") from error


def equal_domains(domains: Domains, instead: str) -> Grid:
    """The ranks of each domain. Raises `PlanError` for domains of different sizes, which `instead` can do."""
    if not domains.are_even:
        sizes = ", ".join(str(len(ranks)) for ranks in domains.members)
        raise PlanError(
            f"needs domains of equal size, but they have {sizes} ranks; {instead} takes any ranks, and "
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
