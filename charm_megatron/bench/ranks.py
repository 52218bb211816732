"""Runs a function on all ranks of a cluster.

Ranks of this machine are forked from this process, which has imported torch already; a rank enters its namespace
before it makes its first socket. CPU only: no CUDA context may exist. Of a launched job this process is one rank.
"""

import os
import time
import traceback
from collections.abc import Callable
from typing import Any

from charm_megatron.bench.cluster import Cluster
from charm_megatron.errors import CharmError, LaunchError, TopologyError
from charm_megatron.log import Log, silent
from charm_megatron.processes.environment import launched_rank
from charm_megatron.processes.group import Meeting, run_in_group
from charm_megatron.testbed.namespaces import enter
from charm_megatron.testbed.network import MASTER_PORT

FIRST_SPEAKS_S = 10.0
"""How long other ranks keep silent, so that the first that failed is heard."""


def run_on_ranks(
    function: Callable[..., Any], cluster: Cluster, *args: Any, progress: Log = silent
) -> list[Any] | None:
    """Returns `function(log, rank, num_ranks, *args)` of all ranks, inside one process group.

    `progress` gets what rank 0 logs. Returns None on the ranks of a launched job other than the first. Raises
    `LaunchError` with the first rank's last words when one fails; the others are ended.
    """
    if cluster.is_launched:
        return _run_as_rank(function, cluster, args, progress)
    import torch

    torch.set_num_threads(1)  # ranks are forked, so that this process should have no pool of threads
    return run_in_group(function, cluster.num_ranks, args, meeting=_meeting(cluster), log=progress)


def _meeting(cluster: Cluster) -> Meeting:
    namespaces = cluster.namespaces
    if namespaces is None:
        return Meeting(cluster.master_addr, interface=cluster.interface)
    return Meeting(cluster.master_addr, MASTER_PORT, cluster.interface, lambda rank: enter(namespaces[rank]))


# ---------------------------------------------------------------------- ranks of a job


def job_backend() -> str:
    """What the ranks of a launched job talk over."""
    import torch

    return "nccl" if torch.cuda.is_available() else "gloo"


def leave_job() -> None:
    """Ends this rank's part in a launched job, after the barrier that ends `run_on_ranks`."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _run_as_rank(
    function: Callable[..., Any], cluster: Cluster, args: Any, progress: Log
) -> list[Any] | None:
    """The group stays for the next run: its addresses in torchrun's store would mislead a second one."""
    import torch.distributed as dist

    if not dist.is_initialized():
        _join_job()
    rank = dist.get_rank()
    try:
        value = function(progress if rank == 0 else silent, rank, cluster.num_ranks, *args)
        values: list[Any] | None = [None] * cluster.num_ranks if rank == 0 else None
        dist.gather_object(value, values)
        dist.barrier()
    except Exception as error:
        raise LaunchError(_last_words(rank, error)) from error
    return values


def _join_job() -> None:
    import torch
    import torch.distributed as dist

    placement = launched_rank(os.environ)
    assert placement is not None, "a launched cluster is made of such variables"
    num_local = placement.local_world_size
    backend, device = job_backend(), None
    if backend == "nccl":
        if num_local > torch.cuda.device_count():
            raise TopologyError(
                f"{num_local} ranks on a node that shows them {torch.cuda.device_count()} GPUs; start one per GPU, or "
                f"set CUDA_VISIBLE_DEVICES= for gloo"
            )
        device = torch.device("cuda", placement.local_rank)
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(backend, device_id=device)
    except Exception as error:
        address = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise LaunchError(
            f"rank {placement.rank} did not join the others at {address} over {backend}: "
            f"{str(error).partition(chr(10))[0]}"
        ) from error


def _last_words(rank: int, error: Exception) -> str:
    """Why this rank ends. The first to fail says it at once; others, which lost it as a peer, late.

    By then the launcher has ended them, if it is torchrun, which does so when the first has ended.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    try:
        is_first = _get_default_store().add("failed ranks", 1) == 1
    except RuntimeError:  # the store was the first one's
        is_first = False
    if is_first:
        words = str(error) if isinstance(error, CharmError) else traceback.format_exc()
        return f"rank {rank} failed: {words}"
    time.sleep(FIRST_SPEAKS_S)
    return f"rank {rank} ended because another had failed before it"
