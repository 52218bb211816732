"""What a rank is doing: sent with each of its heartbeats, and with its last words. Ranks are those of the job."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


def transfer_text(what: str, is_recv: bool, peer: int) -> str:
    """As in "kv1 from rank 2"; `what` is empty where it is not known."""
    return f"{what or 'a transfer'} {'from' if is_recv else 'to'} rank {peer}"


@dataclass(frozen=True)
class Waiting:
    """A rank stands still for one transfer: a receive from `peer`, or a send to it."""

    peer: int
    is_recv: bool
    number: int
    """How many transfers of this kind with this peer it has waited for before."""
    what: str
    """What the transfer carries, in words; empty where that is not known."""


@dataclass(frozen=True)
class Exchange:
    """What a rank has posted in one group: by place in `ranks`, how many sends to and receives from it."""

    ranks: tuple[int, ...]
    sends: tuple[int, ...]
    recvs: tuple[int, ...]
    waiting: Waiting | None


@dataclass(frozen=True)
class Standing:
    """`doing` is the last action in words, empty where there was none; `for_s`, seconds since it began.

    `addresses`: "host:port" of its ends of TCP connections, where they are watched.
    """

    doing: str = ""
    for_s: float = 0.0
    exchanges: tuple[Exchange, ...] = ()
    addresses: frozenset[str] = frozenset()

    @property
    def waiting(self) -> tuple[Exchange, Waiting] | None:
        """The transfer that it stands still for."""
        for exchange in self.exchanges:
            if exchange.waiting is not None:
                return exchange, exchange.waiting
        return None

    def __str__(self) -> str:
        return f"{self.doing or 'not in attention'}, for {self.for_s:.1f} s"

    def to_json(self) -> dict[str, Any]:
        """The form in which ranks of a job tell each other."""
        return {**asdict(self), "addresses": sorted(self.addresses)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Standing":
        """What `to_json` made."""
        exchanges = (
            Exchange(
                tuple(one["ranks"]),
                tuple(one["sends"]),
                tuple(one["recvs"]),
                Waiting(**one["waiting"]) if one["waiting"] else None,
            )
            for one in data["exchanges"]
        )
        return cls(data["doing"], data["for_s"], tuple(exchanges), frozenset(data["addresses"]))
