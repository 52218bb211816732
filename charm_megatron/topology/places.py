"""Where each rank of a group runs, by the rank's own account, and the domains that follow.

Ranks exchange plain words, and each derives the domains of all from all words: the same on every rank.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from charm_megatron.errors import TopologyError, quoted
from charm_megatron.limits import MOST_NAME_CHARACTERS
from charm_megatron.topology.domains import Domains, domains_from_hosts

_WORD = re.compile(rf"(?P<host>[^\s:]{{1,{MOST_NAME_CHARACTERS}}})(?::(?P<part>[0-9]{{1,6}}))?")


@dataclass(frozen=True)
class Place:
    """A host, and the part of it that the rank is in, where that is known and asked for.

    Parts are NUMA nodes, of the rank's device or processors; for `charm.domains: nvlink`, islands of NVLink.
    """

    host: str
    part: int | None = None

    def __str__(self) -> str:
        return self.host if self.part is None else f"{self.host}:{self.part}"

    def is_in(self, other: "Place") -> bool:
        """Whether this is the same place, or `other` is the whole host of it."""
        return self == other or (other.part is None and self.host == other.host)


Groups = tuple[tuple[Place, ...], ...]
"""The places that fast links connect, as a file lists them."""


@dataclass(frozen=True)
class RankFacts:
    """What a rank shares of itself with the others before they plan."""

    declared: str
    """Its own charm.domains."""
    place: Place
    groups: Groups = ()
    """What the file of domains says on its host."""
    gpus: tuple[str, ...] = ()
    """For islands: the PCI addresses of all GPUs of its host that it may see."""
    slurm_node: str | None = None
    """The host as SLURM calls it."""
    problem: str | None = None
    """Why it does not know what it should."""


def parse_place(text: str) -> Place:
    """Reads `HOST` or `HOST:NUMA`."""
    match = _WORD.fullmatch(text)
    if match is None:
        raise TopologyError(f"place {quoted(text)} is not HOST or HOST:NUMA, such as node1 or node1:0")
    return Place(match["host"], None if match["part"] is None else int(match["part"]))


def domains_from_numa(places: Sequence[Place]) -> Domains:
    """One domain for each NUMA node of each host. Raises `TopologyError` where a rank knows none."""
    unknown = [str(rank) for rank, place in enumerate(places) if place.part is None]
    if unknown:
        raise TopologyError(
            f"context-parallel ranks {', '.join(unknown)} do not know their NUMA node; bind them to the cores of "
            f"one, or set charm.domains to hosts, a number or a file"
        )
    return domains_from_hosts([str(place) for place in places])


def domains_from_islands(facts: Sequence[RankFacts]) -> Domains:
    """One domain for each NVLink island of each host.

    Raises `TopologyError` where ranks of one host see different GPUs: their islands have no common numbers, and
    none of them knows what connects its GPU to the others'.
    """
    seen: defaultdict[str, dict[tuple[str, ...], int]] = defaultdict(dict)
    for rank, one in enumerate(facts):
        seen[one.place.host].setdefault(one.gpus, rank)
    for host, ranks in seen.items():
        if len(ranks) > 1:
            views = "; ".join(f"rank {rank}: {' '.join(gpus)}" for gpus, rank in ranks.items())
            raise TopologyError(
                f"context-parallel ranks on {host} see different GPUs in nvidia-smi ({views}), so that their NVLink "
                f"islands are not known; let every rank see all GPUs of its host, as with SLURM's --gpus-per-node in "
                f"place of --gpus-per-task, or set charm.domains to hosts, numa, a number or a file"
            )
    return domains_from_hosts([str(one.place) for one in facts])


def domains_from_groups(places: Sequence[Place], groups: Sequence[Sequence[Place]]) -> Domains:
    """One domain for each of `groups`, which say what is behind fast links together.

    Raises `TopologyError` where a rank is in none of the groups, or in two.
    """
    names = []
    for rank, place in enumerate(places):
        found = [number for number, group in enumerate(groups) if any(place.is_in(other) for other in group)]
        if len(found) != 1:
            where = "no group" if not found else f"groups {' and '.join(str(number + 1) for number in found)}"
            raise TopologyError(
                f"context-parallel rank {rank} runs on {place}, which is in {where} of the file of domains; "
                f"name each host, or each HOST:NUMA, once"
            )
        names.append(str(found[0]))
    return domains_from_hosts(names)
