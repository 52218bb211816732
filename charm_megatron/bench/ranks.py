"""Runs a function on all ranks of a cluster.

Ranks of this machine are forked from this process, which has imported torch already; a rank enters its namespace
before it makes its first socket. CPU only: no CUDA context may exist. Of a launched job this process is one rank.
"""

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from charm_megatron.bench.cluster import Cluster
from charm_megatron.errors import CharmError, LaunchError, TopologyError
from charm_megatron.testbed.network import MASTER_PORT

END_S = 10.0
PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent ends

Tell = Callable[[str], None]
"""Takes a line of progress."""


def run_on_ranks(
    function: Callable[..., Any], cluster: Cluster, *args: Any, progress: Tell = lambda line: None
) -> list[Any] | None:
    """Gives `function(tell, rank, num_ranks, *args)` of all ranks, inside one process group.

    `progress` gets what rank 0 tells. Gives None on the ranks of a launched job but the first. Raises `LaunchError`
    with the first rank's last words when one fails; the others are ended.
    """
    if cluster.is_launched:
        return _run_as_rank(function, cluster, args, progress)
    import torch

    torch.set_num_threads(1)
    port = MASTER_PORT if cluster.namespaces else _free_port()
    context = multiprocessing.get_context("fork")
    ends: list[Connection] = []
    processes = []
    for rank in range(cluster.num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_main, args=(sender, function, rank, cluster, port, args), daemon=True
        )
        process.start()
        sender.close()
        ends.append(receiver)
        processes.append(process)
    try:
        results = _gather(ends, progress)
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            process.join(END_S)
            if process.is_alive():
                process.kill()
    return results


def _gather(ends: list[Connection], progress: Tell) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ends):
        for end in wait([end for rank, end in enumerate(ends) if rank not in results]):
            rank = next(i for i, other in enumerate(ends) if other is end)
            try:
                kind, value = ends[rank].recv()
            except EOFError:
                kind, value = "failed", "ended without a word"
            if kind == "failed":
                raise LaunchError(f"rank {rank} failed: {value}")
            if kind == "progress":
                progress(value)
            else:
                results[rank] = value
    return [results[rank] for rank in range(len(ends))]


def _main(
    sender: Connection, function: Callable[..., Any], rank: int, cluster: Cluster, port: int, args: Any
) -> None:
    import torch.distributed as dist

    from charm_megatron.testbed.namespaces import enter

    def tell(line: str) -> None:
        if rank == 0:
            sender.send(("progress", line))

    try:
        _end_with_parent()
        if cluster.namespaces:
            enter(cluster.namespaces[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = cluster.interface
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{cluster.master_addr}:{port}",
            rank=rank,
            world_size=cluster.num_ranks,
        )
        value = function(tell, rank, cluster.num_ranks, *args)
        dist.barrier()  # ranks that leave a gloo group at different times abort now and then
        sender.send(("done", value))
        dist.destroy_process_group()
    except BaseException:
        sender.send(("failed", traceback.format_exc()))
        sender.close()
        os._exit(1)


def _end_with_parent() -> None:
    """Has this process killed when its parent ends, in whatever way; nobody would read what it measures."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


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
    function: Callable[..., Any], cluster: Cluster, args: Any, progress: Tell
) -> list[Any] | None:
    """The group stays for the next run: its addresses in torchrun's store would mislead a second one."""
    import torch.distributed as dist

    if not dist.is_initialized():
        _join_job()
    rank = dist.get_rank()
    try:
        value = function(progress if rank == 0 else lambda line: None, rank, cluster.num_ranks, *args)
        values: list[Any] | None = [None] * cluster.num_ranks if rank == 0 else None
        dist.gather_object(value, values)
        dist.barrier()
    except Exception as error:
        raise LaunchError(_last_words(rank, error)) from error
    return values


def _join_job() -> None:
    import torch
    import torch.distributed as dist

    variables = os.environ
    local_rank, num_local = (
        int(variables.get(*pair)) for pair in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
    )
    backend, device = job_backend(), None
    if backend == "nccl":
        if num_local > torch.cuda.device_count():
            raise TopologyError(
                f"{num_local} ranks on a node that shows them {torch.cuda.device_count()} GPUs; start one a GPU, or "
                f"set CUDA_VISIBLE_DEVICES= for gloo"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(backend, device_id=device)
    except Exception as error:
        address = ":".join(variables.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise LaunchError(
            f"rank {variables['RANK']} did not join the others at {address} over {backend}: "
            f"{str(error).partition(chr(10))[0]}"
        ) from error


def _last_words(rank: int, error: Exception) -> str:
    """Why this rank ends. The first to fail says it at once; others, which lost it as a peer, late.

    By then the starter of the ranks has ended them, if it is torchrun, which does so when the first has ended.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    try:
        is_first = _get_default_store().add("failed ranks", 1) == 1
    except RuntimeError:  # the store was the first one's
        is_first = False
    if is_first:
        words = str(error) if isinstance(error, CharmError) else traceback.format_exc()
        return f"rank {rank} failed: {words}"
    time.sleep(END_S)
    return f"rank {rank} ended, as another had failed before it"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
