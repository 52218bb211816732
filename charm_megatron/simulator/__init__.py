"""Prices schedules: what each action takes, when it runs, and where the time goes."""

from charm_megatron.simulator.cost import CostModel, Link
from charm_megatron.simulator.timeline import Span, Timeline, evaluate

__all__ = ["CostModel", "Link", "Span", "Timeline", "evaluate"]
