"""The process group that a call is made with: which rank of it this process is, or why it cannot be used."""

import torch.distributed as dist

from charm_megatron.errors import TopologyError


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
    try:
        rank, size = dist.get_rank(found), dist.get_world_size(found)
    except (KeyError, ValueError, RuntimeError) as error:
        raise TopologyError("the group was destroyed; make another one with new_group") from error
    if rank < 0:
        raise TopologyError("this process is not in the group, whose ranks alone may call")
    return found, rank, size
