"""Ranks agree before they talk: a different schedule or size on one rank would be a hang, not an error."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from charm_megatron.config import CharmConfig
from charm_megatron.errors import ScheduleDisagreement

PLAN = "plan"
NUMBER_SETTINGS = ("kernel", "out_return_dtype", "grad_return_dtype", "communicators", "self_check")
"""Settings that change numbers, or who talks when, and need not show in the plan."""


def agreed_record(config: CharmConfig, kernel: str, digest: str) -> dict[str, str]:
    """What the ranks of a group must have in common, by name: what explains a difference stands before it."""
    return {
        "charm_megatron": str(sys.modules["charm_megatron"].__version__),
        "torch": torch.__version__,
        "megatron-core": _megatron_version(),
        **{f"charm.{name}": str(getattr(config, name)) for name in NUMBER_SETTINGS},
        "kernel": kernel,
        PLAN: digest,
    }


def _megatron_version() -> str:
    """Of the megatron-core that this process has imported; "none" where it has not."""
    core = sys.modules.get("megatron.core")
    if core is None:
        return "none"
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        return str(getattr(core, "__version__", "unknown"))


def require_agreement(group: dist.ProcessGroup, record: Mapping[str, str], description: str) -> None:
    """Compares `record` over the ranks of `group`, name by name; collective.

    Raises `ScheduleDisagreement` on all ranks with the first name that differs, with each rank's `description` where
    that is the plan.
    """
    held = gather(group, (dict(record), description))
    for name in record:
        values = [of_rank.get(name, "none") for of_rank, _ in held]
        if len(set(values)) == 1:
            continue
        if name == PLAN:
            listed = "; ".join(
                f"rank {rank}: {text} ({of[PLAN][:12]})" for rank, (of, text) in enumerate(held)
            )
            raise ScheduleDisagreement(
                f"the ranks of a context-parallel group hold different schedules: {listed}"
            )
        raise ScheduleDisagreement(
            f"the ranks of a context-parallel group must have the same {name}, but {who_has_what(name, values)}"
        )


def who_has_what(name: str, values: Sequence[str]) -> str:
    """As in "rank 3 has torch 2.11.0, the others 2.14.0": the commonest value is that of the others."""
    (common, _), *_ = Counter(values).most_common(1)
    odd = [f"rank {rank} has {name} {value}" for rank, value in enumerate(values) if value != common]
    return f"{', '.join(odd)}, the others {common}"


def gather[T](group: dist.ProcessGroup, value: T) -> list[T]:
    """The value of every rank of `group`, in their order; collective."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered
