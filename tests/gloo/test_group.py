"""A function runs on all ranks of a gloo group, and the rank whose end broke the group is named."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from charm_megatron.errors import LaunchError
from charm_megatron.log import Log
from charm_megatron.processes.group import run_in_group

pytestmark = pytest.mark.gloo


def sum_of_ranks(log: Log, rank: int, num_ranks: int, factor: int) -> tuple[int, int]:
    log(f"rank {rank} began")
    number = torch.tensor(factor * rank)
    dist.all_reduce(number)
    return rank, int(number)


def test_all_results_come_in_order_and_rank_0_logs() -> None:
    lines: list[str] = []
    assert run_in_group(sum_of_ranks, 3, (10,), log=lines.append) == [(0, 30), (1, 30), (2, 30)]
    assert lines == ["rank 0 began"]


def be_killed(log: Log, rank: int, num_ranks: int) -> None:
    if rank == 2:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_rank_that_is_killed_is_named_although_its_peers_fail_with_it() -> None:
    with pytest.raises(LaunchError, match=r"^rank 2 failed: killed by SIGKILL$"):
        run_in_group(be_killed, 3)


def fail(log: Log, rank: int, num_ranks: int) -> Any:
    if rank == 1:
        raise ValueError("no luck")
    dist.barrier()


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    with pytest.raises(LaunchError, match=r"(?s)^rank 1 failed: ValueError: no luck\nTraceback"):
        run_in_group(fail, 3)
