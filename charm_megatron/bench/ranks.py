"""Runs a function on ranks of this machine, each in its network namespace where there are some.

Ranks are forked from this process, which has imported torch already; a rank enters its namespace before it makes its
first socket. CPU only: no CUDA context may exist.
"""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charm_megatron.errors import LaunchError

if TYPE_CHECKING:
    from charm_megatron.bench.operator import Network

NAMESPACES = Path("/run/netns")
PORT = 29_500
END_S = 10.0


def run_on_ranks(function: Callable[..., Any], network: "Network", *args: Any) -> list[Any]:
    """Gives `function(rank, num_ranks, *args)` of all ranks, inside one gloo group.

    Raises `LaunchError` with the first rank's last words when one fails; the others are ended.
    """
    import torch

    torch.set_num_threads(1)
    port = PORT if network.namespaces else _free_port()
    context = multiprocessing.get_context("fork")
    ends: list[Connection] = []
    processes = []
    for rank in range(network.num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_main, args=(sender, function, rank, network, port, args), daemon=True
        )
        process.start()
        sender.close()
        ends.append(receiver)
        processes.append(process)
    try:
        return _gather(ends)
    finally:
        for process in processes:
            process.join(END_S)
            if process.is_alive():
                process.kill()


def _gather(ends: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ends):
        for end in wait([end for rank, end in enumerate(ends) if rank not in results]):
            rank = next(i for i, other in enumerate(ends) if other is end)
            try:
                has_worked, value = ends[rank].recv()
            except EOFError:
                has_worked, value = False, "ended without a word"
            if not has_worked:
                raise LaunchError(f"rank {rank} failed: {value}")
            results[rank] = value
    return [results[rank] for rank in range(len(ends))]


def _main(
    sender: Connection, function: Callable[..., Any], rank: int, network: "Network", port: int, args: Any
) -> None:
    import torch.distributed as dist

    try:
        if network.namespaces:
            with (NAMESPACES / network.namespaces[rank]).open() as namespace:
                os.setns(namespace.fileno(), os.CLONE_NEWNET)
        os.environ["GLOO_SOCKET_IFNAME"] = network.interface
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{network.master_addr}:{port}",
            rank=rank,
            world_size=network.num_ranks,
        )
        value = function(rank, network.num_ranks, *args)
        dist.barrier()  # ranks that leave a gloo group at different times abort now and then
        sender.send((True, value))
        dist.destroy_process_group()
    except BaseException:
        sender.send((False, traceback.format_exc()))
        sender.close()
        os._exit(1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
