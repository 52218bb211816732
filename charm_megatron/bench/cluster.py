"""The ranks that a benchmark runs on: processes of this machine on its loopback or on a shaped network, or a job."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from charm_megatron.cost.model import CostModel, Link
from charm_megatron.errors import TopologyError, WorkloadError
from charm_megatron.limits import MOST_ELEMENTS, MOST_OWN_RANKS
from charm_megatron.processes.environment import launched_rank
from charm_megatron.schedule.piece import IntArray
from charm_megatron.testbed.network import Network
from charm_megatron.testbed.profile import Profile, SharedLink
from charm_megatron.topology import Domains, even_domains
from charm_megatron.workload import Workload


@dataclass(frozen=True)
class Cluster:
    """Ranks in domains of equal size.

    `profile` is the shaped network, `namespaces` those of its ranks; without one the rates are not known.
    `is_launched`: this process is one rank of a job that torchrun has started.
    """

    num_domains: int
    ranks_per_domain: int
    profile: Profile | None = None
    namespaces: tuple[str, ...] | None = None
    is_launched: bool = False

    def __post_init__(self) -> None:
        if not self.is_launched and self.num_ranks > MOST_OWN_RANKS:
            raise TopologyError(
                f"{self.num_ranks} ranks are too many for one machine: {MOST_OWN_RANKS} at most; start more by torchrun"
            )

    @property
    def num_ranks(self) -> int:
        return self.num_domains * self.ranks_per_domain

    @property
    def domains(self) -> Domains:
        return even_domains(self.num_ranks, self.num_domains)

    def require_fits(self, workload: Workload) -> None:
        """Raises `WorkloadError` for tensors that no rank can hold."""
        of_q = workload.batch * workload.seq_len // self.num_ranks * workload.num_heads * workload.head_dim
        if of_q > MOST_ELEMENTS:
            raise WorkloadError(
                f"q of one rank would have {of_q:,} elements, but {MOST_ELEMENTS:,} at most fit a device; "
                f"take fewer tokens, heads or sequences"
            )

    @property
    def interface(self) -> str:
        """The network interface of a rank."""
        return "lo" if self.namespaces is None else "eth0"

    @property
    def master_addr(self) -> str:
        """The address of rank 0."""
        return "127.0.0.1" if self.profile is None or self.namespaces is None else self.profile.address(0)

    def cost_model(self, flops_per_s: float) -> CostModel | None:
        """The network as the simulator's links, each rank's own; None where the rates are not known."""
        if self.profile is None:
            return None
        inside = self.profile.inside_bytes_per_s
        return CostModel(flops_per_s, Link(inside), Link(self.profile.across_bytes_per_s or inside))

    def busiest_link_s(self, pair_bytes: IntArray) -> float | None:
        """How long the busiest link, also of those that ranks share, takes for `pair_bytes` [from, to]."""
        if self.profile is None:
            return None
        loads: dict[SharedLink, int] = {}
        for src, dst in zip(*np.nonzero(pair_bytes), strict=True):
            for link in self.profile.links(int(src), int(dst)):
                loads[link] = loads.get(link, 0) + int(pair_bytes[src, dst])
        return max((num_bytes / link.bytes_per_s for link, num_bytes in loads.items()), default=0.0)

    def __str__(self) -> str:
        size = f"{self.num_domains} x {self.ranks_per_domain} ranks"
        if self.is_launched:
            return f"{size} of this job"
        return f"{size} on {'loopback' if self.profile is None else self.profile.name}"


def cluster_on(net: Network) -> Cluster:
    """The ranks of a shaped network that is up."""
    profile = net.profile
    names = tuple(net.names.rank(rank) for rank in range(profile.num_ranks))
    return Cluster(profile.domains, profile.ranks_per_domain, profile, names)


def launched_cluster(environment: Mapping[str, str] | None = None) -> Cluster | None:
    """The job that this process is a rank of, one domain per node; None where it is not.

    Raises `TopologyError` where its nodes have different numbers of ranks, or the variables are not numbers.
    """
    placement = launched_rank(os.environ if environment is None else environment)
    if placement is None:
        return None
    world_size, per_node = placement.world_size, placement.local_world_size
    if world_size % per_node:
        raise TopologyError(f"{world_size} ranks do not fill nodes of {per_node} ranks (LOCAL_WORLD_SIZE)")
    return Cluster(world_size // per_node, per_node, is_launched=True)
