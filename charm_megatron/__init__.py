"""Context-parallel attention for Megatron-LM whose schedule is data: checked, printed, then executed.

    import charm_megatron as cm

    out = cm.context_parallel_attention(q, k, v, group=group, mask="causal", schedule="charm")

Rooms, in the order in which they may import each other: `errors`, `files`, `units`; `config`, `workload`, `sharding`,
`topology`; `schedule`; `lowering`; `cost`; `show`; `verify`; `planner`; `compile` (up to here nothing imports torch);
`kernels`; `executor`; `functional`; `mcore`; `processes`; `train`, `testbed`, `paper`; `peers`; `bench`; `cli`.
Names below are imported when they are first used, so that planning needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from charm_megatron.compile import Plan, compile_attention
    from charm_megatron.config import CharmConfig
    from charm_megatron.errors import CharmError, InvalidInput
    from charm_megatron.executor import AttentionRuntime
    from charm_megatron.functional import context_parallel_attention, positions, shard, unshard
    from charm_megatron.planner import as_planner, register_planner
    from charm_megatron.topology import Domains, even_domains
    from charm_megatron.workload import Mask, Workload

__version__ = "0.1.0"

__all__ = [
    "AttentionRuntime",
    "CharmConfig",
    "CharmError",
    "Domains",
    "InvalidInput",
    "Mask",
    "Plan",
    "Workload",
    "as_planner",
    "compile_attention",
    "context_parallel_attention",
    "even_domains",
    "positions",
    "register_planner",
    "shard",
    "unshard",
]

_ROOMS = {
    "charm_megatron.compile": ("Plan", "compile_attention"),
    "charm_megatron.config": ("CharmConfig",),
    "charm_megatron.errors": ("CharmError", "InvalidInput"),
    "charm_megatron.executor": ("AttentionRuntime",),
    "charm_megatron.functional": ("context_parallel_attention", "positions", "shard", "unshard"),
    "charm_megatron.planner": ("as_planner", "register_planner"),
    "charm_megatron.topology": ("Domains", "even_domains"),
    "charm_megatron.workload": ("Mask", "Workload"),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ROOM_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
