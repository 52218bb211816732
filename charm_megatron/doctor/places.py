"""Where a rank is and what it has there: told to rank 0, and shown by host."""

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from charm_megatron.doctor.findings import Finding
from charm_megatron.doctor.packages import counted, ranks_text

if TYPE_CHECKING:
    import torch

CPU = "CPU"


@dataclass(frozen=True)
class RankTold:
    """What a rank says of itself."""

    host: str
    numa_node: int | None = None
    """None where it may use the processors of several, or the machine does not say."""
    island: int | None = None
    """Of NVLink; None without one."""
    device: str = CPU
    problem: str | None = None
    """Why its place is not known."""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    settings: tuple[Finding, ...] = ()

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RankTold":
        data: dict[str, Any] = json.loads(text)
        settings = tuple(Finding(**{**one, "ranks": tuple(one["ranks"])}) for one in data.pop("settings"))
        return cls(**data, settings=settings)


def interfaces() -> tuple[str, ...]:
    """The network interfaces that this process sees."""
    return tuple(name for _, name in socket.if_nameindex())


def tell(device: "torch.device", versions: Mapping[str, str | None], settings: Sequence[Finding]) -> RankTold:
    """What this process says of itself; its place by the rules of charm.domains `numa` and `nvlink`."""
    import torch

    from charm_megatron.executor.discovery import rank_facts
    from charm_megatron.executor.machine import Machine

    by_numa = rank_facts("numa", device, Machine())
    island, name, problem = None, CPU, by_numa.problem
    if device.type == "cuda":
        by_nvlink = rank_facts("nvlink", device, Machine())
        island, problem = by_nvlink.place.part, problem or by_nvlink.problem
        name = torch.cuda.get_device_name(device)
    host = by_numa.place.host
    return RankTold(host, by_numa.place.part, island, name, problem, versions, tuple(settings))


def place_findings(told: Mapping[int, RankTold]) -> tuple[Finding, ...]:
    """One line per host: its ranks, their devices, NUMA nodes and NVLink islands."""
    hosts: dict[str, list[int]] = {}
    for rank, one in sorted(told.items()):
        hosts.setdefault(one.host, []).append(rank)
    return tuple(_host(host, {rank: told[rank] for rank in ranks}) for host, ranks in hosts.items())


def _host(host: str, told: Mapping[int, RankTold]) -> Finding:
    devices = [one.device for one in told.values()]
    parts = [f"{ranks_text(list(told))}: {counted(devices)}"]
    parts += _split("NUMA node", {rank: one.numa_node for rank, one in told.items()})
    parts += _split("NVLink island", {rank: one.island for rank, one in told.items()})
    problems = {one.problem: rank for rank, one in reversed(list(told.items())) if one.problem is not None}
    remedy = "; ".join(f"rank {rank}: {problem}" for problem, rank in problems.items())
    return Finding(host, "; ".join(parts), "hint" if remedy else "ok", remedy)


def _split(what: str, part_of: Mapping[int, int | None]) -> list[str]:
    """Which ranks are in which part; nothing where no rank knows its part."""
    parts: dict[int, list[int]] = {}
    for rank, part in part_of.items():
        if part is not None:
            parts.setdefault(part, []).append(rank)
    if len(parts) == 1 and len(next(iter(parts.values()))) == len(part_of):
        return [f"{what} {next(iter(parts))}"]
    return [f"{what} {part}: {ranks_text(ranks)}" for part, ranks in sorted(parts.items())]


def merged_settings(told: Mapping[int, RankTold]) -> tuple[Finding, ...]:
    """What ranks find in their environments, each thing once, with the ranks where it is not so for all."""
    ranks: dict[Finding, list[int]] = {}
    for rank, one in sorted(told.items()):
        for finding in one.settings:
            ranks.setdefault(finding, []).append(rank)
    return tuple(
        Finding(one.name, one.found, one.verdict, one.remedy, () if len(of) == len(told) else tuple(of))
        for one, of in ranks.items()
    )
