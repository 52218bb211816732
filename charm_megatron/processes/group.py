"""Runs a function on ranks of this machine, inside one gloo group."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from charm_megatron.log import Log, silent
from charm_megatron.processes.follow import RankProcess, run_to_end
from charm_megatron.processes.ports import free_port
from charm_megatron.processes.sockets import give_up_dead_links
from charm_megatron.processes.start import Report, start_rank

LEAVE_S = 10.0
"""How long ranks have to leave the group once all results are there."""


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a group meet, and over which network interface they talk."""

    address: str = "127.0.0.1"
    port: int | None = None
    """None for any that is free."""
    interface: str = "lo"
    enter: Callable[[int], None] | None = None
    """What a rank calls, with its number, before it makes its first socket."""


def run_in_group(
    function: Callable[..., Any],
    num_ranks: int,
    args: tuple[Any, ...] = (),
    *,
    meeting: Meeting | None = None,
    log: Log = silent,
    timeout_s: float | None = None,
    deadline_s: float | None = None,
) -> list[Any]:
    """Returns `function(log, rank, num_ranks, *args)` of all ranks. CPU only.

    Ranks are forked from this process, which best has imported torch already, and made no CUDA context. `log` gets
    what rank 0 logs. `deadline_s`: how long a rank may be silent, or a link carry nothing. Raises what `run_to_end`
    raises.
    """
    meeting = meeting or Meeting()
    port = meeting.port or free_port()

    def start(rank: int) -> RankProcess:
        all_args = (function, rank, num_ranks, args, meeting, port, deadline_s)
        return start_rank(rank, _in_group, all_args, enter=meeting.enter, leave=_leave_group)

    def on_report(rank: int, line: Any) -> None:
        log(line)

    ranks = run_to_end(
        start, range(num_ranks), on_report, timeout_s=timeout_s, leave_s=LEAVE_S, deadline_s=deadline_s
    )
    return [rank.result for rank in ranks]


def _in_group(
    report: Report,
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    args: tuple[Any, ...],
    meeting: Meeting,
    port: int,
    deadline_s: float | None,
) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = meeting.interface
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    dist.init_process_group(
        "gloo", init_method=f"tcp://{meeting.address}:{port}", rank=rank, world_size=num_ranks
    )
    if deadline_s is not None:
        give_up_dead_links(deadline_s)
    return function(report if rank == 0 else silent, rank, num_ranks, *args)


def _leave_group() -> None:
    """After the result is sent: a group that was broken on purpose, as tests do, cannot be left in order."""
    import torch.distributed as dist

    with suppress(RuntimeError):
        dist.barrier()  # ranks that leave a gloo group at different times abort now and then
        dist.destroy_process_group()
