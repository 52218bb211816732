"""Resolves a rank's program: which buffers are taken and given back when, and where each piece lies meanwhile.

A program that the checker refuses may fail here with an `AssertionError` or `KeyError`.
"""

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from charm_megatron.lowering.storage import (
    AccumulateStep,
    AttendStep,
    Buffer,
    FreeStep,
    PostStep,
    Range,
    Receive,
    SendInPlace,
    SendPacked,
    StandIn,
    Step,
    Storage,
    WaitStep,
)
from charm_megatron.schedule.actions import (
    Accumulate,
    Action,
    Attend,
    Free,
    Key,
    Message,
    Post,
    Program,
    Wait,
    writes,
)
from charm_megatron.schedule.passes import Pass
from charm_megatron.schedule.payload import PAYLOADS
from charm_megatron.schedule.piece import Piece
from charm_megatron.schedule.problem import Problem


def plan_storage(
    program: Program, pass_: Pass, problem: Problem, rank: int, wide: Container[tuple[str, bool]] = ()
) -> Storage:
    """Resolves the program of one rank.

    `wide`: results, (payload, whether across domains), that travel in the accumulate dtype.
    """
    return _Walk(pass_, problem, rank, wide, _added_once(program, pass_)).run(program)


def _added_once(program: Program, pass_: Pass) -> dict[tuple[int, Piece], int]:
    """Results to which only one action adds before they leave, whole: (the number of that action, result) -> peer."""
    found = {}
    adders: dict[Piece, list[int]] = defaultdict(list)
    peers: dict[Piece, int] = {}
    for at, action in enumerate(program):
        for piece in writes(action, pass_):
            adders[piece].append(at)
        match action:
            case Post(_, sends):
                peers.update((piece, message.peer) for message in sends for piece in message.pieces)
            case Free(piece):
                one, *others = adders.pop(piece, [-1])
                if one >= 0 and not others and piece in peers and not _leaves_rows_out(program[one]):
                    found[one, piece] = peers[piece]
    return found


def _leaves_rows_out(action: Action) -> bool:
    return isinstance(action, Attend) and action.band is not None


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
    at_home: list[int]
    """Packed operands of the own shard from which it sends."""


@dataclass
class _Walk:
    pass_: Pass
    problem: Problem
    rank: int
    wide: Container[tuple[str, bool]]
    added_once: Mapping[tuple[int, Piece], int]
    at: int = 0
    buffers: list[Buffer] = field(default_factory=list)
    num_held: list[int] = field(default_factory=list)  # pieces of each buffer that are not freed yet
    home: dict[str, int] = field(default_factory=dict)
    packed: dict[str, int] = field(default_factory=dict)
    stand_ins: dict[int, int] = field(default_factory=dict)  # by the buffer that it stands beside
    places: dict[Piece, _Place] = field(default_factory=dict)
    open: dict[Key, _Open] = field(default_factory=dict)
    copied: set[Piece] = field(
        default_factory=set
    )  # results that leave as copies, and have no place any more

    def run(self, program: Program) -> Storage:
        for payload in (self.pass_.q_down, self.pass_.kv_down, *self.pass_.results):
            pieces = self.problem.local_pieces(payload, self.rank)
            self.home[payload.name] = self._take(pieces, is_accumulator=payload.is_result, is_home=True)
            self._put(self.home[payload.name], is_fresh=payload.is_result)
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
        held = [i for i, n in enumerate(self.num_held) if n and not self.buffers[i].is_home]
        assert not held, "the program ends with buffers in use"
        assert not self.copied, "the program ends with results that nobody has freed"
        for buffer in self.home.values():
            self._give(buffer)
        results = [self.buffers[self.home[payload.name]].pieces for payload in self.pass_.results]
        untouched = tuple(x for pieces in results for x in self._ranges(pieces) if x.is_fresh)
        return Storage(tuple(self.buffers), tuple(steps), self.home, self.packed, untouched)

    # ------------------------------------------------------------------ buffers

    def _take(
        self,
        pieces: Sequence[Piece],
        *,
        is_accumulator: bool = False,
        is_home: bool = False,
        crosses: bool = False,
    ) -> int:
        payload = PAYLOADS[pieces[0].payload]
        return self._append(
            Buffer(payload, tuple(pieces), is_accumulator, is_home, crosses, self.at, self.at)
        )

    def _travelling(self, message: Message) -> int:
        """A buffer for a message."""
        return self._take(message.pieces, crosses=self._crosses(message.peer, message.pieces[0]))

    def _crosses(self, peer: int, piece: Piece) -> bool:
        """Whether it travels as what crosses domains does: operands are the same everywhere."""
        return PAYLOADS[piece.payload].is_result and self.problem.domains.crosses(self.rank, peer)

    def _append(self, buffer: Buffer) -> int:
        self.buffers.append(buffer)
        self.num_held.append(0)
        return len(self.buffers) - 1

    def _give(self, buffer: int, *, after: int = 0) -> None:
        self.buffers[buffer] = replace(self.buffers[buffer], last=self.at + after)

    def _drop(self, piece: Piece) -> list[int]:
        """A piece is needed no more: gives the buffer of which it is the last, and what stands in for that."""
        buffer = self.places.pop(piece).buffer
        assert not self.buffers[buffer].is_home, f"{piece} is at home here"
        self.num_held[buffer] -= 1
        if self.num_held[buffer]:
            return []
        beside = self.stand_ins.pop(buffer, None)
        return [buffer] if beside is None else [buffer, beside]

    def _put(self, buffer: int, *, is_fresh: bool = False) -> None:
        """From now on the pieces of a buffer may be read, or, while it is fresh, written."""
        made = self.buffers[buffer]
        self.num_held[buffer] = len(made.pieces)
        for index, piece in enumerate(made.pieces):
            self.places[piece] = _Place(buffer, index, is_fresh)

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
        recvs = tuple(Receive(message.peer, self._travelling(message)) for message in post.recvs)
        step = PostStep(post.key, sends, recvs, tuple(self._copied(post, sends)))
        packed = [send.buffer for send in sends if isinstance(send, SendPacked)]
        at_home = [at.buffer for at in step.sources if at.buffer in self.packed.values()]
        self.open[post.key] = _Open(post, [recv.buffer for recv in recvs], packed, at_home)
        return step

    def _send(self, message: Message) -> SendInPlace | SendPacked:
        payload = PAYLOADS[message.pieces[0].payload]
        sources = tuple(self._as_travelling(at) for at in self._ranges(message.pieces))
        first, *others = sources
        source = self.buffers[first.buffer]
        is_whole = first.stop - first.start == len(source.pieces)
        crosses = self._crosses(message.peer, message.pieces[0])
        is_wide = (payload.name, crosses) in self.wide
        as_it_travels = is_wide if source.is_accumulator else source.crosses == crosses
        if not others and as_it_travels and (is_whole or not payload.num_stats):
            return SendInPlace(message.peer, first)
        return SendPacked(message.peer, self._travelling(message), sources)

    def _copied(self, post: Post, sends: Sequence[SendInPlace | SendPacked]) -> Iterator[int]:
        """Buffers of results that are copied when they leave: a result is complete then, and leaves once."""
        for message, send in zip(post.sends, sends, strict=True):
            if isinstance(send, SendPacked) and PAYLOADS[message.pieces[0].payload].is_result:
                self.copied.update(message.pieces)
                for buffer in (buffer for piece in message.pieces for buffer in self._drop(piece)):
                    self._give(buffer, after=1)  # what arrives in this post lies elsewhere
                    yield buffer

    def _as_travelling(self, at: Range) -> Range:
        """A range of own operands, where they lie as they travel."""
        payload = self.buffers[at.buffer].payload
        is_one_tensor = (
            len(payload.values) + payload.num_stats == 1 and self.problem.head_groups(payload.side) == 1
        )
        if at.buffer != self.home[payload.name] or payload.is_result or is_one_tensor:
            return at
        if payload.name not in self.packed:
            home = self.buffers[at.buffer]
            self.packed[payload.name] = self._append(replace(home, is_home=False, first=0))
        return at._replace(buffer=self.packed[payload.name])

    def _wait(self, key: Key) -> WaitStep:
        done = self.open.pop(key)
        for buffer in done.landing:
            self._put(buffer)
        for buffer in (*done.packed, *done.at_home):
            self._give(buffer)
        return WaitStep(key, tuple(done.packed))

    def _attend(self, action: Attend) -> AttendStep:
        q, kv = tuple(self._ranges(action.q)), tuple(self._ranges(action.kv))
        sides = ((action.q, self.pass_.q_up), (action.kv, self.pass_.kv_up))
        results = tuple(
            self._accumulators([piece.of(up.name) for piece in pieces]) for pieces, up in sides if up
        )
        rows = self._rows(action.q), self._rows(action.kv)
        return AttendStep(action, q, kv, results, *rows, *self._stand_ins(q))

    def _stand_ins(self, q: Sequence[Range]) -> tuple[tuple[StandIn, ...], tuple[Range | None, ...]]:
        """What is to be made for ranges of queries that are read for the first time; and what stands in for each."""
        made: list[StandIn] = []
        found: list[Range | None] = []
        for at in q:
            source = self.buffers[at.buffer]
            if self.pass_.stand_in is None or source.is_home:
                found.append(None)
                continue
            if at.buffer not in self.stand_ins:
                beside = replace(source, payload=self.pass_.stand_in, first=self.at, last=self.at)
                self.stand_ins[at.buffer] = self._append(beside)
                made.append(StandIn(at.buffer, self.stand_ins[at.buffer]))
            found.append(at._replace(buffer=self.stand_ins[at.buffer]))
        return tuple(made), tuple(found)

    def _accumulate(self, piece: Piece) -> AccumulateStep:
        (source,) = self._ranges([piece])
        (target,) = self._accumulators([piece.own])
        return AccumulateStep(source, target)

    def _accumulators(self, pieces: Sequence[Piece]) -> tuple[Range, ...]:
        """The accumulators of `pieces`, taken where there are none; none is fresh any more afterwards."""
        missing = [p for p in pieces if self.problem.resident(p, self.rank) not in self.places]
        if missing:
            # What nothing more is added to lies as it travels from the start.
            peers = {self.added_once.get((self.at, piece), self.rank) for piece in missing}
            links = {None if peer == self.rank else self._crosses(peer, missing[0]) for peer in peers}
            link = links.pop() if len(links) == 1 else None
            taken = self._take(missing, is_accumulator=link is None, crosses=bool(link))
            self._put(taken, is_fresh=True)
        found = tuple(self._ranges(pieces))
        for piece in pieces:
            self._place(piece).is_fresh = False
        return found

    def _free(self, piece: Piece) -> FreeStep:
        for under_way in self.open.values():
            assert piece not in under_way.post.sent, f"{piece} is being sent"
        if piece in self.copied:
            self.copied.remove(piece)
            return FreeStep(())
        gives = self._drop(piece)
        for buffer in gives:
            self._give(buffer)
        return FreeStep(tuple(gives))
