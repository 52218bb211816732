"""Planners: each decides who computes which block and how the operands get there."""

from charm_megatron.planner.common import Planner, Shape, as_planner
from charm_megatron.planner.registry import cut_problem, plan, planners, register_planner, shipped_planners

__all__ = [
    "Planner",
    "Shape",
    "as_planner",
    "cut_problem",
    "plan",
    "planners",
    "register_planner",
    "shipped_planners",
]
