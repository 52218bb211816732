"""What a timeline is made of: when each rank computes, and when each message is on its link."""

from dataclasses import dataclass
from typing import Literal

from charm_megatron.schedule.actions import Attend, Message
from charm_megatron.schedule.payload import PAYLOADS, Payload
from charm_megatron.schedule.piece import Piece

LinkClass = Literal["inside", "across"]


@dataclass(frozen=True)
class AttendSpan:
    """One computation of blocks."""

    rank: int
    start_s: float
    end_s: float
    label: str

    @property
    def kind(self) -> Literal["attend"]:
        return "attend"


@dataclass(frozen=True)
class TransferSpan:
    """One message from `rank` to `peer`."""

    kind: LinkClass
    rank: int
    peer: int
    start_s: float
    end_s: float
    payload: Payload
    pieces: tuple[Piece, ...]

    @property
    def label(self) -> str:
        """The payload and the chunks of it."""
        return f"{self.payload.name}{_chunks(self.pieces)}"


Span = AttendSpan | TransferSpan


@dataclass(frozen=True)
class Timeline:
    """All spans of a schedule. `busy_s[rank]` is how long a rank computes."""

    spans: tuple[Span, ...]
    makespan_s: float
    busy_s: tuple[float, ...]

    @property
    def transfers(self) -> tuple[TransferSpan, ...]:
        """The messages among the spans."""
        return tuple(span for span in self.spans if isinstance(span, TransferSpan))

    @property
    def exposed_s(self) -> float:
        """Exposed communication: the makespan less what the busiest rank computes."""
        return self.makespan_s - max(self.busy_s)


def attend_span(rank: int, attend: Attend, start_s: float, took_s: float) -> AttendSpan:
    label = f"{_chunks(attend.q)}·{_chunks(attend.kv)}"
    return AttendSpan(rank, start_s, start_s + took_s, label)


def transfer_span(
    src: int, dst: int, message: Message, crosses: bool, start_s: float, end_s: float
) -> TransferSpan:
    kind: LinkClass = "across" if crosses else "inside"
    pieces = message.pieces
    return TransferSpan(kind, src, dst, start_s, end_s, PAYLOADS[pieces[0].payload], pieces)


def _chunks(pieces: tuple[Piece, ...]) -> str:
    """As in "0,3": their chunks."""
    return ",".join(str(piece.chunk) for piece in pieces)
