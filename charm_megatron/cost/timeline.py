"""When each action of a schedule runs, given what each takes: the critical path of its programs.

Each rank works through its program: a block takes its time, a Post is free, a Wait ends when every transfer of
its post has. A transfer starts when both ends have posted it and, where links are shared, both ends' links are
free. Not modelled: that computing and sending disturb each other, merging, launch overhead.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal

from charm_megatron.cost.model import CostModel
from charm_megatron.cost.wire import WireFormat
from charm_megatron.errors import ScheduleFault
from charm_megatron.schedule.actions import Attend, Key, Message, Post, Program, Wait
from charm_megatron.schedule.payload import PAYLOADS, Payload
from charm_megatron.schedule.piece import Piece
from charm_megatron.schedule.schedule import Schedule

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


def evaluate(schedule: Schedule, wire: WireFormat, cost: CostModel) -> Timeline:
    """Runs all programs against the clock. Raises `ScheduleFault` when they do not end."""
    return _Clockwork(schedule, wire, cost).run()


@dataclass
class _Rank:
    program: Program
    now_s: float = 0.0
    position: int = 0
    busy_s: float = 0.0
    unfinished: dict[Key, int] = field(default_factory=dict)  # post -> transfers that have not been timed yet
    end_s: dict[Key, float] = field(default_factory=dict)  # post -> when the last of its timed transfers ends


@dataclass(frozen=True)
class _Transfer:
    src: int
    dst: int
    key: Key
    message: Message
    posted_s: float


class _Clockwork:
    def __init__(self, schedule: Schedule, wire: WireFormat, cost: CostModel):
        self.schedule, self.wire, self.cost = schedule, wire, cost
        self.ranks = [_Rank(schedule.program(rank)) for rank in range(schedule.cp_size)]
        self.half_posted: dict[tuple[int, int, Key, int], tuple[Message, float]] = {}
        self.ready: list[tuple[float, int, _Transfer]] = []  # a heap by earliest start
        self.num_ready = 0
        self.free_s: dict[tuple[int, bool, str], float] = defaultdict(float)  # (rank, crosses, direction)
        self.spans: list[Span] = []

    def run(self) -> Timeline:
        for rank in range(len(self.ranks)):
            self._advance(rank)
        while self.ready:
            # Whoever waits goes on no earlier than the earliest start, so nothing can come before it.
            start_s, number, transfer = heappop(self.ready)
            now_s = self._start_s(transfer)
            if now_s > start_s:  # another transfer has taken its link in the meantime
                heappush(self.ready, (now_s, number, transfer))
            else:
                self._transfer(transfer)
        for rank, state in enumerate(self.ranks):
            if state.position < len(state.program):
                action = state.program[state.position]
                raise ScheduleFault(f"{self.schedule.name}: rank {rank} never gets past {action}")
        ends = [span.end_s for span in self.spans] + [state.now_s for state in self.ranks]
        return Timeline(tuple(self.spans), max(ends), tuple(state.busy_s for state in self.ranks))

    def _advance(self, rank: int) -> None:
        """Runs a rank until it waits for a transfer that has not been timed."""
        state = self.ranks[rank]
        while state.position < len(state.program):
            action = state.program[state.position]
            match action:
                case Post():
                    self._post(rank, action)
                case Wait(key):
                    if state.unfinished[key]:
                        return
                    state.now_s = max(state.now_s, state.end_s[key])
                case Attend():
                    took_s = self.cost.attend_s(action, self.wire, self.schedule.pass_)
                    self.spans.append(attend_span(rank, action, state.now_s, took_s))
                    state.now_s += took_s
                    state.busy_s += took_s
                case _:
                    pass
            state.position += 1

    def _post(self, rank: int, post: Post) -> None:
        state = self.ranks[rank]
        state.unfinished[post.key] = len(post.sends) + len(post.recvs)
        state.end_s[post.key] = state.now_s
        for is_send, messages in ((True, post.sends), (False, post.recvs)):
            for message, nth in numbered(messages):
                src, dst = (rank, message.peer) if is_send else (message.peer, rank)
                pair = (src, dst, post.key, nth)
                if pair in self.half_posted:
                    other, posted_s = self.half_posted.pop(pair)
                    sent = message if is_send else other
                    transfer = _Transfer(src, dst, post.key, sent, max(posted_s, state.now_s))
                    heappush(self.ready, (self._start_s(transfer), self.num_ready, transfer))
                    self.num_ready += 1
                else:
                    self.half_posted[pair] = message, state.now_s

    def _start_s(self, transfer: _Transfer) -> float:
        if not self.cost.is_shared:
            return transfer.posted_s
        crosses = self.schedule.problem.domains.crosses(transfer.src, transfer.dst)
        out_s = self.free_s[transfer.src, crosses, "out"]
        return max(transfer.posted_s, out_s, self.free_s[transfer.dst, crosses, "in"])

    def _transfer(self, transfer: _Transfer) -> None:
        crosses = self.schedule.problem.domains.crosses(transfer.src, transfer.dst)
        start_s = self._start_s(transfer)
        end_s = start_s + self.cost.message_s(transfer.message, self.wire, crosses=crosses)
        self.free_s[transfer.src, crosses, "out"] = self.free_s[transfer.dst, crosses, "in"] = end_s
        self.spans.append(
            transfer_span(transfer.src, transfer.dst, transfer.message, crosses, start_s, end_s)
        )
        for rank in (transfer.src, transfer.dst):
            state = self.ranks[rank]
            state.unfinished[transfer.key] -= 1
            state.end_s[transfer.key] = max(state.end_s[transfer.key], end_s)
            self._advance(rank)


def attend_span(rank: int, attend: Attend, start_s: float, took_s: float) -> AttendSpan:
    label = f"{_chunks(attend.q)}·{_chunks(attend.kv)}"
    return AttendSpan(rank, start_s, start_s + took_s, label)


def transfer_span(
    src: int, dst: int, message: Message, crosses: bool, start_s: float, end_s: float
) -> TransferSpan:
    kind: LinkClass = "across" if crosses else "inside"
    pieces = message.pieces
    return TransferSpan(kind, src, dst, start_s, end_s, PAYLOADS[pieces[0].payload], pieces)


def numbered(messages: tuple[Message, ...]) -> Iterator[tuple[Message, int]]:
    """Each message with its number among those with the same peer: they match in this order."""
    seen: dict[int, int] = defaultdict(int)
    for message in messages:
        yield message, seen[message.peer]
        seen[message.peer] += 1


def _chunks(pieces: tuple[Piece, ...]) -> str:
    """As in "0,3": their chunks."""
    return ",".join(str(piece.chunk) for piece in pieces)
