"""Where each piece lies while a rank runs its program: every name resolved to a place in a buffer, ahead of time.

One walk over the program decides which buffers are taken and given back when, which messages leave in place and which
are packed first, and which additions are the first to their accumulator. The executor follows it with tensors;
`cost.buffers` adds up its bytes. The pieces of a buffer lie one after the other, so consecutive ones are one range.

A program that the checker refuses may fail here with an `AssertionError` or `KeyError`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from charm_megatron.schedule.actions import (
    Accumulate,
    Attend,
    Free,
    Key,
    Message,
    Post,
    Program,
    Wait,
)
from charm_megatron.schedule.passes import Pass
from charm_megatron.schedule.payload import PAYLOADS, Payload
from charm_megatron.schedule.piece import Piece
from charm_megatron.schedule.problem import Problem


@dataclass(frozen=True)
class Buffer:
    """Pieces of one payload in one stretch of memory; in use from action `first` up to, not including, `last`.

    An accumulator holds results while they are added up, in the accumulate dtype; other buffers hold pieces as they
    travel. `is_pooled`: taken from the executor's pool, and given back to it.
    """

    payload: Payload
    pieces: tuple[Piece, ...]
    is_accumulator: bool
    is_pooled: bool
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
    key: Key
    sends: tuple[SendInPlace | SendPacked, ...]
    recvs: tuple[Receive, ...]


@dataclass(frozen=True)
class WaitStep:
    """`gives`: buffers of packed messages that have left."""

    key: Key
    gives: tuple[int, ...]


@dataclass(frozen=True)
class AttendStep:
    """A rectangle of blocks: its operands, and for each result of the pass the ranges that it is added to.

    `q_rows` and `kv_rows` are the bounds of the pieces in tokens, beginning with 0.
    """

    action: Attend
    q: tuple[Range, ...]
    kv: tuple[Range, ...]
    results: tuple[tuple[Range, ...], ...]
    q_rows: tuple[int, ...]
    kv_rows: tuple[int, ...]
    takes: tuple[int, ...]


@dataclass(frozen=True)
class AccumulateStep:
    source: Range
    target: Range
    takes: tuple[int, ...]


@dataclass(frozen=True)
class FreeStep:
    """`gives`: the buffer, where its last piece is freed."""

    gives: tuple[int, ...]


Step = PostStep | WaitStep | AttendStep | AccumulateStep | FreeStep


@dataclass(frozen=True, eq=False)
class Storage:
    """A program with all names resolved; `steps[i]` is its action i.

    `local`: the buffer of this rank's own shard, by payload. `untouched`: ranges of its own results to which no block
    adds anything.
    """

    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    local: dict[str, int]
    untouched: tuple[Range, ...]


def plan_storage(program: Program, pass_: Pass, problem: Problem, rank: int) -> Storage:
    """Resolves the program of one rank."""
    return _Walk(pass_, problem, rank).run(program)


@dataclass
class _Place:
    """Where a piece is: at `index` of a buffer."""

    buffer: int
    index: int
    is_fresh: bool = False


@dataclass
class _Open:
    """A post under way."""

    post: Post
    landing: list[int]
    packed: list[int]


@dataclass
class _Walk:
    pass_: Pass
    problem: Problem
    rank: int
    at: int = 0
    buffers: list[Buffer] = field(default_factory=list)
    num_held: list[int] = field(default_factory=list)  # pieces of each buffer that are not freed yet
    local: dict[str, int] = field(default_factory=dict)
    places: dict[Piece, _Place] = field(default_factory=dict)
    open: dict[Key, _Open] = field(default_factory=dict)

    def run(self, program: Program) -> Storage:
        for payload in (self.pass_.q_down, self.pass_.kv_down, *self.pass_.results):
            self.local[payload.name] = self._take_local(payload)
        steps: list[Step] = []
        for self.at, action in enumerate(program):
            match action:
                case Post():
                    steps.append(self._post(action))
                case Wait(key):
                    steps.append(self._wait(key))
                case Attend():
                    steps.append(self._attend(action))
                case Accumulate(piece):
                    steps.append(self._accumulate(piece))
                case Free(piece):
                    steps.append(self._free(piece))
        self.at = len(program)
        assert not self.open, "the program ends with transfers under way"
        held = [i for i, n in enumerate(self.num_held) if n and i not in self.local.values()]
        assert not held, "the program ends with buffers in use"
        for buffer in self.local.values():
            self._give(buffer)
        results = [self.buffers[self.local[payload.name]].pieces for payload in self.pass_.results]
        untouched = tuple(x for pieces in results for x in self._ranges(pieces) if x.is_fresh)
        return Storage(tuple(self.buffers), tuple(steps), self.local, untouched)

    # ------------------------------------------------------------------ buffers

    def _take(self, pieces: Sequence[Piece], *, is_accumulator: bool = False, is_pooled: bool = True) -> int:
        payload = PAYLOADS[pieces[0].payload]
        buffer = Buffer(payload, tuple(pieces), is_accumulator, is_pooled, self.at, self.at)
        self.buffers.append(buffer)
        self.num_held.append(0)
        return len(self.buffers) - 1

    def _give(self, buffer: int) -> None:
        self.buffers[buffer] = replace(self.buffers[buffer], last=self.at)

    def _put(self, buffer: int) -> None:
        """From now on the pieces of a buffer may be read."""
        made = self.buffers[buffer]
        self.num_held[buffer] = len(made.pieces)
        for index, piece in enumerate(made.pieces):
            self.places[piece] = _Place(buffer, index, made.is_accumulator)

    def _take_local(self, payload: Payload) -> int:
        """The rank's own shard: operands, packed unless they are one tensor; or the results that add up here."""
        is_packed = not payload.is_result and len(payload.values) + payload.num_stats > 1
        pieces = self.problem.local_pieces(payload, self.rank)
        buffer = self._take(pieces, is_accumulator=payload.is_result, is_pooled=is_packed)
        self._put(buffer)
        return buffer

    def _ranges(self, pieces: Sequence[Piece]) -> Iterator[Range]:
        """Groups pieces into ranges that are consecutive in one buffer and equally fresh."""
        rows = self._rows(pieces)
        places = [self._place(piece) for piece in pieces]
        begin = 0
        for i in range(1, len(places) + 1):
            last, now = places[i - 1], places[i] if i < len(places) else None
            if now and (now.buffer, now.index, now.is_fresh) == (last.buffer, last.index + 1, last.is_fresh):
                continue
            first = places[begin]
            yield Range(first.buffer, first.index, last.index + 1, rows[begin], rows[i], first.is_fresh)
            begin = i

    def _place(self, piece: Piece) -> _Place:
        return self.places[self.problem.resident(piece, self.rank)]

    def _rows(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        chunks = self.problem.sharding.chunks
        return 0, *accumulate(chunks[piece.chunk].length for piece in pieces)

    # ------------------------------------------------------------------ actions

    def _post(self, post: Post) -> PostStep:
        assert post.key not in self.open, f"post {post.key} is still under way"
        sends = tuple(self._send(message) for message in post.sends)
        recvs = tuple(Receive(peer, self._take(pieces)) for peer, pieces in post.recvs)
        packed = [send.buffer for send in sends if isinstance(send, SendPacked)]
        self.open[post.key] = _Open(post, [recv.buffer for recv in recvs], packed)
        return PostStep(post.key, sends, recvs)

    def _send(self, message: Message) -> SendInPlace | SendPacked:
        payload = PAYLOADS[message.pieces[0].payload]
        sources = tuple(self._ranges(message.pieces))
        first, *others = sources
        is_whole = first.stop - first.start == len(self.buffers[first.buffer].pieces)
        if not others and not payload.is_result and (is_whole or not payload.num_stats):
            return SendInPlace(message.peer, first)
        return SendPacked(message.peer, self._take(message.pieces), sources)

    def _wait(self, key: Key) -> WaitStep:
        done = self.open.pop(key)
        for buffer in done.landing:
            self._put(buffer)
        for buffer in done.packed:
            self._give(buffer)
        return WaitStep(key, tuple(done.packed))

    def _attend(self, action: Attend) -> AttendStep:
        q, kv = tuple(self._ranges(action.q)), tuple(self._ranges(action.kv))
        sides = ((action.q, self.pass_.q_up), (action.kv, self.pass_.kv_up))
        takes: list[int] = []
        results = tuple(
            self._accumulators([piece.of(up.name) for piece in pieces], takes) for pieces, up in sides if up
        )
        return AttendStep(action, q, kv, results, self._rows(action.q), self._rows(action.kv), tuple(takes))

    def _accumulate(self, piece: Piece) -> AccumulateStep:
        (source,) = self._ranges([piece])
        takes: list[int] = []
        (target,) = self._accumulators([piece.own], takes)
        return AccumulateStep(source, target, tuple(takes))

    def _accumulators(self, pieces: Sequence[Piece], takes: list[int]) -> tuple[Range, ...]:
        """The accumulators of `pieces`, taken where there are none; none is fresh any more afterwards."""
        missing = [p for p in pieces if self.problem.resident(p, self.rank) not in self.places]
        if missing:
            takes.append(self._take(missing, is_accumulator=True))
            self._put(takes[-1])
        found = tuple(self._ranges(pieces))
        for piece in pieces:
            self._place(piece).is_fresh = False
        return found

    def _free(self, piece: Piece) -> FreeStep:
        for under_way in self.open.values():
            assert piece not in under_way.post.sent, f"{piece} is being sent"
        buffer = self.places.pop(piece).buffer
        assert buffer not in self.local.values(), f"{piece} is at home here"
        self.num_held[buffer] -= 1
        if self.num_held[buffer]:
            return FreeStep(())
        self._give(buffer)
        return FreeStep((buffer,))
