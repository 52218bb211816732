"""The planners by name."""

from collections.abc import Callable, Mapping

from charm_megatron.errors import PlanError, nearest
from charm_megatron.planner.charm import charm, rm_plus
from charm_megatron.planner.ring import ring
from charm_megatron.schedule.decisions import Decisions, Problem

Planner = Callable[[Problem], Decisions]

PLANNERS: Mapping[str, Planner] = {"ring": ring, "rm_plus": rm_plus, "charm": charm}


def plan(name: str, problem: Problem) -> Decisions:
    """The decisions of the planner `name`. Raises `PlanError` for an unknown name or an unsupported problem."""
    if name not in PLANNERS:
        raise PlanError(f"unknown schedule {name!r}{nearest(name, PLANNERS)}")
    return PLANNERS[name](problem)
