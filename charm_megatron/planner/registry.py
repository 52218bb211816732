"""The planners by name, and how a problem is cut for each.

A planner is a function with the decorator `as_planner`, whose name is the schedule's name: those of the modules beside
this one, those that installed packages offer as entry points of the group `charm_megatron.planners`, and those that a
program registers.
"""

import pkgutil
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType

from charm_megatron.errors import PlanError, nearest
from charm_megatron.lowering.decisions import NamedMethod
from charm_megatron.planner.common import Planner
from charm_megatron.schedule.problem import Problem
from charm_megatron.sharding import Sharding, refine
from charm_megatron.topology import Domains
from charm_megatron.workload import CAUSAL, Mask

ENTRY_POINTS = "charm_megatron.planners"

_registered: dict[str, Planner] = {}
"""What the running program has added: the one thing that this module remembers."""


@cache
def shipped_planners() -> Mapping[str, Planner]:
    """The planners of this package."""
    package = __name__.rpartition(".")[0]
    found: dict[str, Planner] = {}
    for module in pkgutil.iter_modules(import_module(package).__path__):
        made_there = vars(import_module(f"{package}.{module.name}")).values()
        found |= {made.name: made for made in made_there if isinstance(made, Planner)}
    return MappingProxyType(found)


@cache
def _installed_planners() -> Mapping[str, Planner]:
    """The planners that installed packages offer. Raises `PlanError` for an entry point that is none."""
    found: dict[str, Planner] = {}
    for entry in entry_points(group=ENTRY_POINTS):
        offered = f"entry point {entry.name!r} of group {ENTRY_POINTS} ({entry.value})"
        try:
            made = entry.load()
        except (ImportError, AttributeError) as error:
            raise PlanError(f"{offered} cannot be imported: {error}") from error
        if not isinstance(made, Planner):
            raise PlanError(f"{offered} is no planner; decorate the function with charm_megatron.as_planner")
        found[made.name] = made
    return MappingProxyType(found)


def planners() -> Mapping[str, Planner]:
    """All planners by name. Raises `PlanError` for two of one name."""
    shipped, installed = shipped_planners(), _installed_planners()
    for name in installed.keys() & shipped.keys():
        raise PlanError(f"an installed package offers a planner {name!r}, but that name is taken")
    return {**shipped, **installed, **_registered}


def register_planner(planner: Planner) -> Planner:
    """Adds a planner for the rest of the process; every rank of a job must do so. Returns it.

    Raises `PlanError` for a name that another planner has.
    """
    if not isinstance(planner, Planner):
        raise PlanError(
            f"{planner!r} is no planner; decorate the function with charm_megatron.as_planner, which says where the "
            f"idea is from and what it is"
        )
    known = planners().get(planner.name)
    if known is not None and known is not planner:
        raise PlanError(f"there is a planner {planner.name!r} already; give the function another name")
    _registered[planner.name] = planner
    return planner


def plan(name: str, problem: Problem) -> NamedMethod:
    """The method of the planner `name`. Raises `PlanError` for an unknown name or an unsupported problem."""
    return _planner(name)(problem)


def cut_problem(
    name: str, sharding: Sharding, domains: Domains, mask: Mask = CAUSAL, *, num_heads: int, num_kv_heads: int
) -> Problem:
    """The problem cut as the planner `name` needs it.

    Raises `PlanError`, saying what would work, for an unknown name, or domains and heads that it cannot cut.
    """
    shape = _planner(name).shape_for(domains, num_heads, num_kv_heads)
    fewest = min(Counter(sharding.home).values())
    parts = max(shape.chunk_parts, -(-shape.least_chunks // fewest))
    return Problem(refine(sharding, parts), domains, mask, shape.q_head_groups, shape.kv_head_groups)


def _planner(name: str) -> Planner:
    known = planners()
    if name not in known:
        raise PlanError(f"unknown schedule {name!r}{nearest(name, known)}")
    return known[name]
