"""Posts on their way, and how their messages meet."""

from dataclasses import dataclass, field

from charm_megatron.errors import ScheduleFault
from charm_megatron.schedule.actions import Message, Post
from charm_megatron.schedule.payload import PAYLOADS
from charm_megatron.schedule.piece import Piece

Value = int | None
"""What a name holds: None for an operand; for a result a bit for each block that has been added to it."""


@dataclass
class Flight:
    """A post on its way: what remains to be matched, and what has come in."""

    post: Post
    values: dict[Piece, Value]
    sends: list[Message]
    recvs: list[Message]
    arrived: dict[Piece, Value] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return not self.sends and not self.recvs


def match(src: int, out: Flight, dst: int, into: Flight) -> list[Message]:
    """Moves the messages from `src` to `dst` that two posts at the heads of queues both have, in their order.

    Returns them. Raises `ScheduleFault` where the two ends do not agree on one.
    """
    sends = [message for message in out.sends if message.peer == dst]
    recvs = [message for message in into.recvs if message.peer == src]
    matched = list(zip(sends, recvs, strict=False))
    for send, recv in matched:
        landed = tuple(_landed(name, src) for name in send.pieces)
        if landed != recv.pieces:
            raise ScheduleFault(f"sends {send} where rank {dst} expects {recv}")
        into.arrived.update(zip(landed, (out.values[name] for name in send.pieces), strict=True))
        out.sends.remove(send)
        into.recvs.remove(recv)
    return [send for send, _ in matched]


def _landed(name: Piece, src: int) -> Piece:
    return name._replace(src=src) if PAYLOADS[name.payload].is_result else name
