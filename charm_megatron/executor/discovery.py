"""How the ranks of a group find their domains: each tells what it knows of its place, and all conclude the same."""

from pathlib import Path

import torch
import torch.distributed as dist

from charm_megatron.errors import TopologyError
from charm_megatron.executor.agreement import gather
from charm_megatron.executor.machine import Machine
from charm_megatron.topology import Domains, Place
from charm_megatron.topology.discovery import domains_from_facts
from charm_megatron.topology.domain_file import load_groups
from charm_megatron.topology.places import RankFacts


def find_domains(
    group: dist.ProcessGroup, declared: str | int, device: torch.device, machine: Machine
) -> tuple[Domains, str]:
    """The domains of `group` by charm.domains, and the reason for the receipt. Collective.

    Raises on all ranks alike, as `domains_from_facts` does.
    """
    return domains_from_facts(gather(group, rank_facts(str(declared), device, machine)))


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
