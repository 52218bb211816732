"""What a shaped test network is: ranks in domains, rates, and which transfers share a link.

Rates are those of TCP payload in one direction; every link carries both directions at full rate, as NVLink, PCIe
and network cards do. Latency is the kernel's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from charm_megatron.config import Section, parse_section, read_mapping
from charm_megatron.errors import ConfigError, nearest, quoted
from charm_megatron.limits import MOST_RANKS
from charm_megatron.reading import path_text
from charm_megatron.topology.domains import Domains, even_domains

MAX_DOMAINS = MAX_RANKS_PER_DOMAIN = 250
"""A domain is a byte of an address, and a rank of it another."""

Rate = Annotated[int, Field(ge=100_000, le=10**12)]
"""Bytes per second; no machine carries more than the upper bound."""


@dataclass(frozen=True)
class SharedLink:
    """Something that transfers share: `bytes_per_s` of payload in all."""

    name: str
    bytes_per_s: float


class Profile(Section):
    """A test network; shipped ones are in `profiles/`."""

    name: str = Field(pattern="^[a-z0-9_]{1,32}$")
    domains: PositiveInt = Field(le=MAX_DOMAINS, description="Number of domains.")
    ranks_per_domain: PositiveInt = Field(le=MAX_RANKS_PER_DOMAIN)
    inside_bytes_per_s: Rate = Field(
        description="Payload that a rank sends, and receives, within its domain."
    )
    across_bytes_per_s: Rate | None = Field(
        None, description="The same to and from other domains; absent where there is one domain."
    )
    nic: Literal["rank", "domain"] = Field(
        "rank", description="Who has `across_bytes_per_s`: each rank, or the ranks of a domain together."
    )
    bus: Literal["none", "domain"] = Field(
        "none",
        description="domain: all that the ranks of a domain send, inside and across, shares "
        "`inside_bytes_per_s`. What comes in from other domains does not count.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.num_ranks > MOST_RANKS:
            raise ValueError(f"domains * ranks_per_domain is {self.num_ranks}, but at most {MOST_RANKS} work")
        if (self.domains > 1) != (self.across_bytes_per_s is not None):
            need = "is needed" if self.domains > 1 else "has no meaning"
            raise ValueError(f"across_bytes_per_s {need} with {self.domains} domain(s)")
        if self.bus == "domain" and (self.across_bytes_per_s or 0) > self.inside_bytes_per_s:
            raise ValueError("across_bytes_per_s is above inside_bytes_per_s, but the bus carries it as well")
        return self

    @property
    def num_ranks(self) -> int:
        return self.domains * self.ranks_per_domain

    @property
    def topology(self) -> Domains:
        """Consecutive ranks to a domain."""
        return even_domains(self.num_ranks, self.domains)

    def domain(self, rank: int) -> int:
        return rank // self.ranks_per_domain

    def address(self, rank: int) -> str:
        """IPv4 address of a rank; the third byte is the domain, so that one prefix matches it."""
        return f"10.77.{self.domain(rank)}.{rank % self.ranks_per_domain + 1}"

    def links(self, src: int, dst: int) -> tuple[SharedLink, ...]:
        """All that a transfer passes, in order. The slowest of them by load bounds a schedule's time from below."""
        here, there = self.domain(src), self.domain(dst)
        shared: list[SharedLink] = []
        bus = [SharedLink(f"bus of domain {here}", self.inside_bytes_per_s)] if self.bus == "domain" else []
        if here == there:
            rate, side = self.inside_bytes_per_s, "inside"
        else:
            assert self.across_bytes_per_s is not None, "several domains have a rate between them"
            rate, side = self.across_bytes_per_s, "across"
            if self.nic == "domain":
                shared = [
                    SharedLink(f"domain {here} sends across", rate),
                    SharedLink(f"domain {there} receives across", rate),
                ]
        first, last = (
            SharedLink(f"rank {src} sends {side}", rate),
            SharedLink(f"rank {dst} receives {side}", rate),
        )
        return (first, *bus, *shared, last)


def fair_rates(transfers: Sequence[Sequence[SharedLink]]) -> list[float]:
    """Bytes per second of each of some endless transfers at once: max-min fair, by filling links up step by step."""
    rates: dict[int, float] = {}
    users: dict[SharedLink, list[int]] = {}
    for index, links in enumerate(transfers):
        for link in links:
            users.setdefault(link, []).append(index)
    while len(rates) < len(transfers):
        shares = {}
        for link, of in users.items():
            waiting = sum(index not in rates for index in of)
            if waiting:
                taken = sum(rates[index] for index in of if index in rates)
                shares[link] = (link.bytes_per_s - taken) / waiting
        tightest = min(shares, key=shares.__getitem__)
        rates |= {index: shares[tightest] for index in users[tightest] if index not in rates}
    return [rates[index] for index in range(len(transfers))]


@cache
def shipped_profiles() -> tuple[str, ...]:
    """Names of the profiles that come with the package."""
    folder = files("charm_megatron.testbed") / "profiles"
    return tuple(sorted(file.name.removesuffix(".yaml") for file in folder.iterdir()))


def load_profile(name_or_path: str) -> Profile:
    """A shipped profile by name, or any by the path of its YAML file. Raises `ConfigError`."""
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        if name_or_path not in shipped_profiles():
            raise ConfigError(
                f"no test network {quoted(name_or_path)}{nearest(name_or_path, shipped_profiles())}; "
                "or the path of a YAML file"
            )
        path = Path(str(files("charm_megatron.testbed") / "profiles" / f"{name_or_path}.yaml"))
    return parse_section(Profile, read_mapping(path, "settings"), path_text(path))
