"""Walks one rank's program over torch.distributed."""

from charm_megatron.executor.runtime import AttentionRuntime, Receipt

__all__ = ["AttentionRuntime", "Receipt"]
