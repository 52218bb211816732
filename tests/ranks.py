"""Runs a function on several ranks of this machine, over gloo."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

JOIN_S = 20


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 240) -> list[Any]:
    """Gives `function(rank, num_ranks, *args)` of every rank, run inside one gloo process group.

    A rank that raises fails the test with its traceback; ranks that outlast `timeout_s` are killed and fail it.
    """
    port = _free_port()
    context = multiprocessing.get_context("fork")
    receivers, processes = [], []
    for rank in range(num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main, args=(sender, function, rank, num_ranks, port, args), daemon=True
        )
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    try:
        return _collect(receivers, timeout_s)
    finally:
        for process in processes:
            process.join(JOIN_S)
            if process.is_alive():
                process.kill()


def _collect(receivers: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        open_ends = [r for i, r in enumerate(receivers) if i not in results]
        ready = wait(open_ends, timeout_s)
        assert ready, f"ranks {[i for i in range(len(receivers)) if i not in results]} hang"
        for receiver in ready:
            rank = receivers.index(receiver)
            try:
                worked, value = receiver.recv()
            except EOFError:
                worked, value = False, "died without a word"
            assert worked, f"rank {rank}: {value}"
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _rank_main(
    sender: Connection, function: Callable[..., Any], rank: int, num_ranks: int, port: int, args: Any
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks
        )
        sender.send((True, function(rank, num_ranks, *args)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
        sender.close()
        os._exit(1)
    try:
        dist.barrier()  # ranks that leave a gloo group at different times abort now and then
        dist.destroy_process_group()
    except RuntimeError:
        os._exit(0)  # the test broke the group on purpose: its result has been sent


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
