"""Ranks of a context-parallel group -> domains of fast links (a node, or a NUMA domain of one)."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from charm_megatron.errors import TopologyError, shortened
from charm_megatron.limits import MOST_RANKS


@dataclass(frozen=True)
class Domains:
    """`domain_of[cp_rank]` is the number of the rank's domain; domains are numbered by first rank."""

    domain_of: tuple[int, ...]

    @property
    def cp_size(self) -> int:
        return len(self.domain_of)

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each domain, ascending."""
        ranks = defaultdict(list)
        for rank, domain in enumerate(self.domain_of):
            ranks[domain].append(rank)
        return tuple(tuple(ranks[domain]) for domain in sorted(ranks))

    @property
    def num_domains(self) -> int:
        return len(self.members)

    @property
    def are_even(self) -> bool:
        """Whether all domains have the same number of ranks."""
        return len({len(ranks) for ranks in self.members}) == 1

    def crosses(self, src: int, dst: int) -> bool:
        """Whether a transfer leaves its domain."""
        return self.domain_of[src] != self.domain_of[dst]

    def __str__(self) -> str:
        return " | ".join(" ".join(map(str, ranks)) for ranks in self.members)


def one_domain(cp_size: int) -> Domains:
    """All ranks behind equally fast links."""
    return Domains((0,) * cp_size)


def even_domains(cp_size: int, num_domains: int) -> Domains:
    """`num_domains` domains of consecutive ranks, as launchers place them."""
    if cp_size > MOST_RANKS:
        raise TopologyError(
            f"a context-parallel group has at most {MOST_RANKS} ranks, but {shortened(cp_size, 30)} are asked for"
        )
    if num_domains < 1 or cp_size % num_domains:
        fitting = [str(m) for m in range(1, cp_size + 1) if cp_size % m == 0]
        raise TopologyError(
            f"{cp_size} context-parallel ranks do not split into {num_domains} equal domains; "
            f"domains may be {' or '.join(fitting)}"
        )
    size = cp_size // num_domains
    return Domains(tuple(rank // size for rank in range(cp_size)))


def domains_from_hosts(hosts: Sequence[str]) -> Domains:
    """One domain per host; `hosts[cp_rank]` names the machine of each rank."""
    numbers: dict[str, int] = {}
    return Domains(tuple(numbers.setdefault(host, len(numbers)) for host in hosts))
