"""Planners: each decides who computes which block and how the operands get there."""

from charm_megatron.planner.common import Shape
from charm_megatron.planner.registry import PLANNERS, Planner, cut_problem, plan, shape

__all__ = ["PLANNERS", "Planner", "Shape", "cut_problem", "plan", "shape"]
