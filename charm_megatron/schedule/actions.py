"""What one rank does, one small type per kind of action. `str` of each is the text that `text.parse` reads.

Post starts transfers, Wait ends them, Attend computes blocks, Accumulate takes a received partial result
in, Free gives a buffer back.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from charm_megatron.workload import Band


class Piece(NamedTuple):
    """A tensor of the schedule: one piece of one payload.

    `src` >= 0: a partial result received from that rank. `copy` > 0: a piece that comes once more, see `Decisions`.
    """

    payload: str
    chunk: int
    head: int = 0
    src: int = -1
    copy: int = 0

    def __str__(self) -> str:
        head = f".{self.head}" if self.head else ""
        copy = f"~{self.copy}" if self.copy else ""
        return f"{self.payload}{self.chunk}{head}{copy}" + (f"<{self.src}" if self.src >= 0 else "")

    @property
    def own(self) -> "Piece":
        """The rank's own result, to which this received partial result belongs."""
        return Piece(self.payload, self.chunk, self.head, -1, self.copy)


class Key(NamedTuple):
    """Identifies a Post: its step, and its place among the posts of that step. Both ends use the same key."""

    step: int
    order: int

    def __str__(self) -> str:
        return f"{self.step}.{self.order}"


class Message(NamedTuple):
    """Pieces of one payload that travel together between this rank and `peer`."""

    peer: int
    names: tuple[Piece, ...]

    def __str__(self) -> str:
        return f"{self.peer} {_words(self.names)}"


@dataclass(frozen=True)
class Post:
    """Starts transfers, all together: they progress as one group, as between ncclGroupStart and ncclGroupEnd."""

    key: Key
    sends: tuple[Message, ...] = ()
    recvs: tuple[Message, ...] = ()

    def __str__(self) -> str:
        sends = (f"send {message}" for message in self.sends)
        recvs = (f"recv {message}" for message in self.recvs)
        return " | ".join([f"post {self.key}", *sends, *recvs])


@dataclass(frozen=True)
class Wait:
    """Returns when all transfers of a Post are done: what it received may be read, what it sent may be freed."""

    key: Key

    def __str__(self) -> str:
        return f"wait {self.key}"


@dataclass(frozen=True)
class Attend:
    """Computes the blocks of a rectangle and adds to the result of each operand that brings one home.

    `causal` means that q and kv are the same chunks, of which only the lower triangle counts. A `band` means one
    block, of which only that band of rows and columns counts.
    """

    q: tuple[Piece, ...]
    kv: tuple[Piece, ...]
    causal: bool = False
    band: Band | None = None

    def __str__(self) -> str:
        mask = " causal" if self.causal else f" band {self.band}" if self.band else ""
        return f"attend {_words(self.q)} {_words(self.kv)}{mask}"


@dataclass(frozen=True)
class Accumulate:
    """Adds a received partial result to this rank's own."""

    name: Piece

    def __str__(self) -> str:
        return f"accumulate {self.name}"


@dataclass(frozen=True)
class Free:
    """Gives back the buffer of a piece that nothing reads any more."""

    name: Piece

    def __str__(self) -> str:
        return f"free {self.name}"


Action = Post | Wait | Attend | Accumulate | Free
Program = tuple[Action, ...]


def _words(names: Iterable[Piece]) -> str:
    return " ".join(map(str, names))
