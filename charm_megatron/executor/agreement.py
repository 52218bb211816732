"""Ranks agree before they talk: a different schedule or size on one rank would be a hang, not an error."""

from typing import Any

import torch.distributed as dist

from charm_megatron.errors import ScheduleDisagreement


def require_agreement(group: dist.ProcessGroup, digest: str, description: str) -> None:
    """Compares `digest` over the ranks of `group`; collective.

    Raises `ScheduleDisagreement` on all ranks, with each rank's `description`, where they differ.
    """
    held = gather(group, (digest, description))
    if len({digest for digest, _ in held}) > 1:
        listed = "; ".join(f"rank {rank}: {text} ({key[:12]})" for rank, (key, text) in enumerate(held))
        raise ScheduleDisagreement(
            f"the ranks of a context-parallel group hold different schedules: {listed}"
        )


def gather[T](group: dist.ProcessGroup, value: T) -> list[T]:
    """The value of every rank of `group`, in their order; collective."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered
