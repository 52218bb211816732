"""Runs a function on all ranks of a cluster.

Ranks of this machine are forked from this process, which has imported torch already; a rank enters its namespace
before it makes its first socket. CPU only: no CUDA context may exist. Of a launched job this process is one rank.
"""

import os
from collections.abc import Callable
from typing import Any

from charm_megatron.bench.cluster import Cluster
from charm_megatron.errors import LaunchError, TopologyError
from charm_megatron.log import Log, silent
from charm_megatron.processes.environment import launched_rank
from charm_megatron.processes.group import Meeting, run_in_group
from charm_megatron.processes.job import job_heartbeats
from charm_megatron.processes.sockets import give_up_dead_links
from charm_megatron.testbed.namespaces import enter
from charm_megatron.testbed.network import MASTER_PORT


def run_on_ranks(
    function: Callable[..., Any], cluster: Cluster, *args: Any, deadline_s: float, progress: Log = silent
) -> list[Any] | None:
    """Returns `function(log, rank, num_ranks, *args)` of all ranks, inside one process group.

    `deadline_s`: how long a rank may be silent, and a link carry nothing. `progress` gets what rank 0 logs. Returns
    None on the ranks of a launched job other than the first. Raises `LaunchError` with the first rank's last words
    when one fails, and with what kept the ranks waiting; the others are ended.
    """
    if cluster.is_launched:
        return _run_as_rank(function, cluster, args, progress, deadline_s)
    import torch

    torch.set_num_threads(1)  # ranks are forked, so that this process should have no pool of threads
    return run_in_group(
        function, cluster.num_ranks, args, meeting=_meeting(cluster), log=progress, deadline_s=deadline_s
    )


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
    function: Callable[..., Any], cluster: Cluster, args: Any, progress: Log, deadline_s: float
) -> list[Any] | None:
    """The group stays for the next run: its addresses in torchrun's store would mislead a second one."""
    import torch.distributed as dist

    if not dist.is_initialized():
        _join_job()
        if job_backend() == "gloo":
            give_up_dead_links(deadline_s)
    rank = dist.get_rank()
    with job_heartbeats(os.environ, deadline_s):
        value = function(progress if rank == 0 else silent, rank, cluster.num_ranks, *args)
        values: list[Any] | None = [None] * cluster.num_ranks if rank == 0 else None
        dist.gather_object(value, values)
        dist.barrier()
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
