"""What one rank does, one small type per kind of action. `str` of each is the text that `text.parse` reads.

Post starts transfers, Wait ends them, Attend computes blocks, Accumulate takes a received partial result
in, Free gives a buffer back.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from charm_megatron.schedule.passes import Pass
from charm_megatron.schedule.piece import Piece
from charm_megatron.workload import Band


class Key(NamedTuple):
    """Identifies a Post: its step, and its place among the posts of that step. Both ends use the same key."""

    step: int
    order: int

    def __str__(self) -> str:
        return f"{self.step}.{self.order}"


class Message(NamedTuple):
    """Pieces of one payload that travel together between this rank and `peer`."""

    peer: int
    pieces: tuple[Piece, ...]

    def __str__(self) -> str:
        return f"{self.peer} {_words(self.pieces)}"


@dataclass(frozen=True)
class Post:
    """Starts transfers, all together: they progress as one group, as between ncclGroupStart and ncclGroupEnd."""

    key: Key
    sends: tuple[Message, ...] = ()
    recvs: tuple[Message, ...] = ()

    @property
    def sent(self) -> list[Piece]:
        """All pieces that leave."""
        return [piece for message in self.sends for piece in message.pieces]

    @property
    def received(self) -> list[Piece]:
        """All pieces that arrive."""
        return [piece for message in self.recvs for piece in message.pieces]

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

    piece: Piece

    def __str__(self) -> str:
        return f"accumulate {self.piece}"


@dataclass(frozen=True)
class Free:
    """Gives back the buffer of a piece that nothing reads any more."""

    piece: Piece

    def __str__(self) -> str:
        return f"free {self.piece}"


Action = Post | Wait | Attend | Accumulate | Free
Program = tuple[Action, ...]


def _words(pieces: Iterable[Piece]) -> str:
    return " ".join(map(str, pieces))


def reads(action: Action) -> list[Piece]:
    """The pieces that an action reads."""
    match action:
        case Post():
            return action.sent
        case Attend(q, kv):
            return [*q, *kv]
        case Accumulate(piece):
            return [piece]
        case Wait() | Free():
            return []


def writes(action: Action, pass_: Pass) -> list[Piece]:
    """The results that an action adds to."""
    match action:
        case Attend(q, kv):
            sides = ((q, pass_.q_up), (kv, pass_.kv_up))
            return [piece.of(up.name) for pieces, up in sides if up for piece in pieces]
        case Accumulate(piece):
            return [piece.own]
        case Post() | Wait() | Free():
            return []
