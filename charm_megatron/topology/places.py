"""Where each rank of a group runs, as the rank itself tells it, and the domains that follow.

Ranks tell plain words, and each makes the domains of all from all words: the same on every rank.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from charm_megatron.errors import TopologyError
from charm_megatron.topology.domains import Domains, domains_from_hosts

_WORD = re.compile(r"(?P<host>[^\s:]+)(?::(?P<numa>\d+))?")


@dataclass(frozen=True)
class Place:
    """A host, and the NUMA node of it that the rank's device or processors belong to, where that is known."""

    host: str
    numa: int | None = None

    def __str__(self) -> str:
        return self.host if self.numa is None else f"{self.host}:{self.numa}"

    def is_in(self, other: "Place") -> bool:
        """Whether this is the same place, or `other` is the whole host of it."""
        return self == other or (other.numa is None and self.host == other.host)


def parse_place(text: str) -> Place:
    """Reads `HOST` or `HOST:NUMA`."""
    match = _WORD.fullmatch(text)
    if match is None:
        raise TopologyError(f"place {text!r} is not HOST or HOST:NUMA, such as node1 or node1:0")
    return Place(match["host"], None if match["numa"] is None else int(match["numa"]))


def domains_from_numa(places: Sequence[Place]) -> Domains:
    """One domain for each NUMA node of each host. Raises `TopologyError` where a rank knows none."""
    unknown = [str(rank) for rank, place in enumerate(places) if place.numa is None]
    if unknown:
        raise TopologyError(
            f"context-parallel ranks {', '.join(unknown)} do not know their NUMA node; bind them to the cores of "
            f"one, or set charm.domains to hosts, a number or a file"
        )
    return domains_from_hosts([str(place) for place in places])


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
