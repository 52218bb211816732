"""How the ranks of a group find their domains: each tells what it knows of its place, and all conclude the same."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from charm_megatron.errors import TopologyError
from charm_megatron.executor.agreement import gather, who_has_what
from charm_megatron.executor.groups import obstacle
from charm_megatron.executor.machine import Machine
from charm_megatron.topology import Domains, Place
from charm_megatron.topology.discovery import domains_from_facts
from charm_megatron.topology.domain_file import load_groups
from charm_megatron.topology.places import RankFacts


def find_domains(
    group: dist.ProcessGroup, declared: str | int, device: torch.device, machine: Machine
) -> tuple[Domains, str]:
    """The domains of `group` by charm.domains, and the reason for the receipt. Collective.

    Raises on all ranks alike, as `domains_from_facts` does, and `TopologyError` where the ranks' tensors are on
    different kinds of devices, or on one that the group cannot send from.
    """
    facts = rank_facts(str(declared), device, machine)
    told = gather(group, (facts, device.type, obstacle(group, device)))
    _require_sends([kind for _, kind, _ in told], [problem for *_, problem in told])
    return domains_from_facts([facts for facts, *_ in told])


def _require_sends(kinds: Sequence[str], problems: Sequence[str | None]) -> None:
    """Raises `TopologyError` by what all ranks have told: kinds of devices, and why they cannot send."""
    if len(set(kinds)) > 1:
        raise TopologyError(
            f"the ranks of a context-parallel group must have tensors on one kind of device, but "
            f"{who_has_what('tensors on', kinds)}; move all to one kind"
        )
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise TopologyError(f"on context-parallel rank {rank} {problem}")


def rank_facts(declared: str, device: torch.device, machine: Machine) -> RankFacts:
    """What this rank knows. A problem is told, not raised: the other ranks would wait for this one forever."""
    host, slurm_node = machine.hostname(), machine.slurm_node()
    try:
        if declared == "nvlink":
            island, gpus = machine.nvlink_island(device)
            return RankFacts(declared, Place(host, island), gpus=gpus, slurm_node=slurm_node)
        if declared == "hosts" or declared.isdecimal():
            return RankFacts(declared, Place(host), slurm_node=slurm_node)
        groups = () if declared == "numa" else load_groups(Path(declared))
        return RankFacts(declared, Place(host, machine.numa_node(device)), groups, slurm_node=slurm_node)
    except (TopologyError, OSError) as error:
        return RankFacts(declared, Place(host), slurm_node=slurm_node, problem=str(error))
