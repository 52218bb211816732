"""Starts the ranks of a run on this machine, and lets none of them outlive it.

A server process imports torch and Megatron once and forks every rank. The launcher itself imports neither; nothing
on it or on the server touches CUDA.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from charm_megatron.errors import LaunchError
from charm_megatron.processes.environment import RankPlacement, threads_per_rank
from charm_megatron.processes.follow import RankProcess, run_to_end
from charm_megatron.processes.ports import free_port
from charm_megatron.processes.server import ForkServer
from charm_megatron.processes.start import Report, start_rank
from charm_megatron.train.gpu_environment import compute_capability, keep_nccl_traces, set_cuda_connections
from charm_megatron.train.rank_job import RankJob, RunEvent

SERVER = ForkServer("charm_megatron.train.preload", "Megatron")


def run_ranks(job: RankJob, num_ranks: int, on_event: Callable[[RunEvent], None]) -> None:
    """Runs the job on `num_ranks` new processes until all have finished.

    Raises `InvalidInput` where a rank says so, `LaunchError` where one fails otherwise. Every process is
    gone when this returns or raises.
    """
    port, num_threads = free_port(), threads_per_rank(num_ranks)

    def start(rank: int) -> RankProcess:
        variables = RankPlacement(rank, num_ranks, rank, num_ranks).variables("127.0.0.1", port)
        return start_rank(
            rank, rank_main, (job, variables, num_threads), server=SERVER, log=job.folder.log(rank)
        )

    deadline_s = job.config.charm.deadline_s
    run_to_end(start, range(num_ranks), lambda rank, event: on_event(event), deadline_s=deadline_s)


def rank_main(report: Report, job: RankJob, variables: dict[str, str], num_threads: int) -> None:
    """What a rank's process does: runs the job, and reports events."""
    os.environ.update(variables)
    set_cuda_connections(job.config, os.environ, compute_capability)
    keep_nccl_traces(job.folder, os.environ)
    # Here, since the launcher, which imports this module, does without torch.
    import torch

    from charm_megatron.train.job import run_rank

    # The server has imported torch already, so that OMP_NUM_THREADS would come too late.
    torch.set_num_threads(num_threads)
    run_rank(job, lambda kind, row: report(RunEvent(kind, row)))


def call_in_server(function: Callable[..., Any], *args: Any) -> Any:
    """Runs `function` in a process forked from the server, and returns what it returns.

    Raises `InvalidInput` where the function does, `LaunchError` where it fails otherwise; its log then stays.
    """
    folder = Path(tempfile.mkdtemp(prefix="charm-megatron-"))
    keeps_log = False

    def start(rank: int) -> RankProcess:
        return start_rank(
            rank,
            _call,
            (function, args),
            server=SERVER,
            log=folder / "log",
            name="the check of the configuration",
        )

    try:
        (check,) = run_to_end(start, [0], lambda rank, report: None)
    except LaunchError:
        keeps_log = True
        raise
    finally:
        if not keeps_log:
            shutil.rmtree(folder)
    return check.result


def _call(report: Report, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)
