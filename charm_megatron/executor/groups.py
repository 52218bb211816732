"""The process group that a call is made with: which rank of it this process is, or why it cannot be used; its twin."""

from typing import Any

import torch
import torch.distributed as dist

from charm_megatron.errors import TopologyError
from charm_megatron.limits import OLDEST_NCCL

CANNOT_SEND = frozenset({("cuda", "gloo")})
"""Kinds of devices and backends that know them, but neither send nor recv there: torch.distributed, "Backends"."""


def group_place(group: object) -> tuple[dist.ProcessGroup, int, int]:
    """The group itself, and (rank, size) of this process in it; None is the group of all processes.

    Raises `TopologyError` where torch.distributed is not initialised, the group was destroyed, this process is not in
    it, or it is no group at all.
    """
    if not dist.is_initialized():
        raise TopologyError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group first, or start under "
            "torchrun"
        )
    found = dist.group.WORLD if group is None else group
    if found == dist.GroupMember.NON_GROUP_MEMBER:
        raise TopologyError("this process is not in the group, whose ranks alone may call")
    if not isinstance(found, dist.ProcessGroup):
        raise TopologyError(
            f"group is a torch.distributed.ProcessGroup or None, but is {type(group).__name__}"
        )
    if is_destroyed(found):
        raise TopologyError("the group was destroyed; make another one with new_group")
    rank = dist.get_rank(found)
    if rank < 0:
        raise TopologyError("this process is not in the group, whose ranks alone may call")
    return found, rank, dist.get_world_size(found)


def is_destroyed(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed no longer knows the group."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return True
    return False


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that carries tensors of a device, such as "gloo" or "nccl"; a group may have one for each kind."""
    by_device = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return by_device.get(device.type, "none")


def nccl_version() -> tuple[int, ...] | None:
    """Of the NCCL that torch runs with; None where it has none."""
    if not dist.is_nccl_available():
        return None
    found: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return found


def obstacle(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why ranks of the group cannot send each other tensors of a device, and what would work; None where they can."""
    if dist.get_world_size(group) == 1:
        return None
    backend = backend_of(group, device)
    if backend == "none" or (device.type, backend) in CANNOT_SEND:
        return _no_backend(group, device)
    if backend == "nccl" and (version := nccl_version()) is not None and version < OLDEST_NCCL:
        seen, oldest = (".".join(map(str, numbers)) for numbers in (version, OLDEST_NCCL))
        return f"groups of sends and receives need NCCL {oldest} or newer, but torch runs with {seen}; upgrade it"
    return None


def _no_backend(group: dist.ProcessGroup, device: torch.device) -> str:
    if device.type == "cuda" and not dist.is_nccl_available():
        return (
            f"tensors are on {device}, and this torch has no NCCL to send them; install a torch built with NCCL, or "
            f"move them to the CPU"
        )
    remedy = "make it with backend 'cpu:gloo,cuda:nccl'"
    if device.type == "cpu":
        remedy = f"move them to the GPU, or {remedy}"
    config = dist.get_backend_config(group)
    return f"tensors are on {device}, which a group of backend {config} does not send from; {remedy}"


def require_sends(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises `TopologyError` where ranks of the group cannot send each other tensors of a device."""
    if (problem := obstacle(group, device)) is not None:
        raise TopologyError(problem)


def twin_of(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Another group of the same ranks, backend and priority, with a communicator of its own; collective over `group`.

    It has exchanged something when this returns: a communicator of NCCL is made by a first collective, in which all
    ranks must take part, and a rank may have no transfer of its own in it.
    """
    backend = backend_of(group, device)
    ranks = dist.get_process_group_ranks(group)
    options = _nccl_options(group, device) if backend == "nccl" else None
    twin = dist.new_group(
        ranks, backend=backend, pg_options=options, use_local_synchronization=True, group_desc="charm_across"
    )
    assert isinstance(twin, dist.ProcessGroup), "this process is one of its ranks"
    dist.all_reduce(torch.zeros(1, device=device), group=twin)
    return twin


def _nccl_options(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Megatron's `--high-priority-stream-groups` reaches the twin as well."""
    options: Any = dist.ProcessGroupNCCL.Options()
    of_group: Any = group._get_backend(device).options
    options.is_high_priority_stream = of_group.is_high_priority_stream
    return options


def destroy(group: dist.ProcessGroup) -> None:
    """Destroys a group that still is one."""
    if dist.is_initialized() and not is_destroyed(group):
        dist.destroy_process_group(group)
