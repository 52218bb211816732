"""Planners: each decides who computes which block and how the operands get there."""

from charm_megatron.planner.registry import PLANNERS, plan

__all__ = ["PLANNERS", "plan"]
