"""The ranks whose links are checked: processes of this machine, or those of a job that a launcher has started."""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from charm_megatron.doctor.findings import Finding
from charm_megatron.doctor.link import LinkPlan
from charm_megatron.doctor.packages import Versions
from charm_megatron.doctor.places import RankTold, tell
from charm_megatron.doctor.rounds import JOIN_S, LinkCheck, OnProgress, Seat, follow, lead
from charm_megatron.doctor.stores import FileStore, PrefixStore, Store
from charm_megatron.errors import LaunchError, TopologyError, shortened
from charm_megatron.processes.environment import RankPlacement
from charm_megatron.processes.follow import RankProcess, run_to_end
from charm_megatron.processes.start import Report, start_rank
from charm_megatron.topology import Domains, domains_from_hosts, even_domains

LEAVE_S = 5.0
"""How long ranks of our own have to end once all have said what they measured."""


@dataclass(frozen=True)
class OwnRanks:
    """Processes of this machine, each on a GPU of its own if `on_gpus`."""

    num_ranks: int
    on_gpus: bool = False
    interface: str = "lo"
    enter: Callable[[int], None] | None = None
    """What a rank calls, with its number, before it makes its first socket."""


def domains_by(num_domains: int | None, num_ranks: int, told: Mapping[int, RankTold]) -> Domains:
    """Domains of equal size, or one per host; of a rank that never came no link is measured."""
    if num_domains is not None:
        return even_domains(num_ranks, num_domains)
    return domains_from_hosts([told[rank].host if rank in told else "" for rank in range(num_ranks)])


def check_own(own: OwnRanks, num_domains: int | None, plan: LinkPlan, on_progress: OnProgress) -> LinkCheck:
    """Starts the ranks and checks their links. They meet in a folder, which needs none of these links.

    Raises `LaunchError` where a rank crashes. No CUDA context may exist in this process, which is forked.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="charm-doctor-") as folder:
        store = str(Path(folder) / "store")

        def start(rank: int) -> RankProcess:
            args = (rank, own, num_domains, plan, store)
            return start_rank(rank, _own_rank, args, enter=own.enter)

        def on_report(rank: int, report: Any) -> None:
            on_progress(*report)

        ranks = run_to_end(start, range(own.num_ranks), on_report, leave_s=LEAVE_S)
    check: LinkCheck = ranks[0].result
    return check


def _own_rank(
    report: Report, rank: int, own: OwnRanks, num_domains: int | None, plan: LinkPlan, path: str
) -> LinkCheck | None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = own.interface
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    device = torch.device("cuda", rank) if own.on_gpus else torch.device("cpu")
    seat = Seat(FileStore(path, -1), rank, plan, device)
    return _take_part(seat, tell(device, {}, ()), own.num_ranks, num_domains, lambda *words: report(words))


def check_as_rank(
    placement: RankPlacement,
    num_domains: int | None,
    plan: LinkPlan,
    versions: Versions,
    settings: Sequence[Finding],
    on_progress: OnProgress,
) -> LinkCheck | None:
    """Takes this process's part in the check of a launched job; None on ranks other than the first."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if placement.local_rank >= torch.cuda.device_count():
            raise TopologyError(
                f"local rank {placement.local_rank} has no GPU, of {torch.cuda.device_count()} that it sees; start "
                f"one rank per GPU, or set CUDA_VISIBLE_DEVICES= for gloo"
            )
        device = torch.device("cuda", placement.local_rank)
    seat = Seat(_job_store(placement), placement.rank, plan, device)
    told = tell(device, versions, settings)
    try:
        return _take_part(seat, told, placement.world_size, num_domains, on_progress)
    except dist.DistError as error:
        words = shortened(str(error).partition("\n")[0], 150)
        raise LaunchError(f"rank {placement.rank} lost the others: {words}") from error


def _take_part(
    seat: Seat, told: RankTold, num_ranks: int, num_domains: int | None, on_progress: OnProgress
) -> LinkCheck | None:
    if seat.rank:
        follow(seat, told)
        return None
    return lead(seat, told, num_ranks, partial(domains_by, num_domains, num_ranks), on_progress)


def _job_store(placement: RankPlacement) -> Store:
    """Where MASTER_ADDR and MASTER_PORT say; held by torchrun, or by rank 0."""
    address = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=JOIN_S)))
    except Exception as error:
        words = shortened(str(error).partition("\n")[0], 150)
        raise LaunchError(
            f"rank {placement.rank} cannot reach {address}, where ranks meet: {words}"
        ) from error
    return PrefixStore("charm doctor", store)
