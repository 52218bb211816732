"""Where each piece lies while a rank runs its program: every name resolved to a place in a buffer, ahead of time.

One walk over the program decides which buffers are taken and given back when, which messages leave in place and which
are packed first, and which additions are the first to their accumulator. The executor follows it with tensors;
`cost.buffers` adds up its bytes. The pieces of a buffer lie one after the other, so consecutive ones are one range.

"""

from dataclasses import dataclass
from typing import NamedTuple

from charm_megatron.schedule.actions import (
    Attend,
    Key,
)
from charm_megatron.schedule.payload import Payload
from charm_megatron.schedule.piece import Piece


@dataclass(frozen=True)
class Buffer:
    """Pieces of one payload in one stretch of memory; in use from action `first` up to, not including, `last`.

    An accumulator holds results while they are added up, in the accumulate dtype; other buffers hold pieces as they
    travel. `is_home`: the rank's own tensors, which lie where the caller or the executor has put them, a tensor for
    each field; every other buffer is a stretch of the memory that a run takes. `crosses`: its results travel across
    domains, in which they may have another dtype than inside.
    """

    payload: Payload
    pieces: tuple[Piece, ...]
    is_accumulator: bool
    is_home: bool
    crosses: bool
    first: int
    last: int


class Range(NamedTuple):
    """Pieces start..stop of a buffer: rows first_row..last_row of the operand or result that they are part of.

    Rows are tokens. `is_fresh`: nothing has been added to them yet.
    """

    buffer: int
    start: int
    stop: int
    first_row: int
    last_row: int
    is_fresh: bool = False


@dataclass(frozen=True)
class SendInPlace:
    """A message whose pieces lie side by side as they travel."""

    peer: int
    source: Range

    @property
    def sources(self) -> tuple[Range, ...]:
        return (self.source,)


@dataclass(frozen=True)
class SendPacked:
    """A message whose pieces are copied to `buffer` first."""

    peer: int
    buffer: int
    sources: tuple[Range, ...]


@dataclass(frozen=True)
class Receive:
    """A message and the buffer in which it arrives."""

    peer: int
    buffer: int


@dataclass(frozen=True)
class PostStep:
    """`gives`: buffers of results that have been copied to those of messages."""

    key: Key
    sends: tuple[SendInPlace | SendPacked, ...]
    recvs: tuple[Receive, ...]
    gives: tuple[int, ...]

    @property
    def sources(self) -> list[Range]:
        """The ranges that leave."""
        return [at for send in self.sends for at in send.sources]


@dataclass(frozen=True)
class WaitStep:
    """`gives`: buffers of packed messages that have left."""

    key: Key
    gives: tuple[int, ...]


@dataclass(frozen=True)
class StandIn:
    """Made of all pieces of buffer `source`, which has visiting queries, in `buffer`."""

    source: int
    buffer: int


@dataclass(frozen=True)
class AttendStep:
    """A rectangle of blocks: its operands, and for each result of the pass the ranges that it is added to.

    `q_rows` and `kv_rows` are the bounds of the pieces in tokens, beginning with 0. `makes` comes first: what stands in
    for tensors of queries that are read for the first time; `stand_ins` are those of each range of `q`, None at home.
    """

    action: Attend
    q: tuple[Range, ...]
    kv: tuple[Range, ...]
    results: tuple[tuple[Range, ...], ...]
    q_rows: tuple[int, ...]
    kv_rows: tuple[int, ...]
    makes: tuple[StandIn, ...]
    stand_ins: tuple[Range | None, ...]


@dataclass(frozen=True)
class AccumulateStep:
    source: Range
    target: Range


@dataclass(frozen=True)
class FreeStep:
    """`gives`: the buffer, where its last piece is freed, and what stands in for it."""

    gives: tuple[int, ...]


Step = PostStep | WaitStep | AttendStep | AccumulateStep | FreeStep


@dataclass(frozen=True, eq=False)
class Storage:
    """A program with all names resolved; `steps[i]` is its action i.

    `home`: the buffer of this rank's own shard, by payload. `packed`: where its operands lie as they travel, before the
    first action, if they are to be sent and are not one tensor. `untouched`: ranges of its own results to which no
    block adds anything.
    """

    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    home: dict[str, int]
    packed: dict[str, int]
    untouched: tuple[Range, ...]
