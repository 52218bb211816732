"""Ranks agree before they talk: a different schedule or size on one rank would be a hang, not an error."""

import torch.distributed as dist

from charm_megatron.errors import ScheduleDisagreement


def require_agreement(group: dist.ProcessGroup, digest: str, description: str) -> None:
    """Compares `digest` over the ranks of `group`; collective.

    Raises `ScheduleDisagreement` on all ranks, with each rank's `description`, where they differ.
    """
    gathered: list[tuple[str, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (digest, description), group=group)
    held = [item for item in gathered if item is not None]
    if len({digest for digest, _ in held}) > 1:
        listed = "; ".join(f"rank {rank}: {text} ({key[:12]})" for rank, (key, text) in enumerate(held))
        raise ScheduleDisagreement(
            f"the ranks of a context-parallel group hold different schedules: {listed}"
        )


def gather_words(group: dist.ProcessGroup, word: str) -> list[str]:
    """The word of every rank of `group`; collective."""
    gathered: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, word, group=group)
    return [name or "" for name in gathered]
