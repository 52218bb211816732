"""When each action of a schedule runs, given what each takes: the critical path of its programs.

Each rank works through its program: a block takes its time, a Post is free, a Wait ends when every transfer of its post
has. A transfer begins when its post has begun at both ends and, where links are shared, both ends' links are free.
Without queues a post begins where it stands in the program. With them (`schedule.queues`: a GPU under NCCL) it also
waits until all of the post before it on its communicator is over, and a single hardware queue holds back what stands
behind a post that cannot begin. Not modelled: that computing and sending disturb each other, merging, the time of the
host.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from charm_megatron.cost.model import CostModel
from charm_megatron.cost.spans import Span, Timeline, attend_span, transfer_span
from charm_megatron.cost.wire import WireFormat
from charm_megatron.errors import ScheduleFault
from charm_megatron.schedule.actions import Attend, Key, Message, Post, Program, Wait
from charm_megatron.schedule.queues import Queues
from charm_megatron.schedule.schedule import Schedule

LAUNCH_S = 5e-6
"""From the moment that a post may begin on its communicator until NCCL's kernel runs."""


def evaluate(schedule: Schedule, wire: WireFormat, cost: CostModel, queues: Queues | None = None) -> Timeline:
    """Runs all programs against the clock, on devices with these queues; None: every transfer is by itself.

    Raises `ScheduleFault` when the programs do not end, and for a post that none of the communicators takes.
    """
    return _Clockwork(schedule, wire, cost, queues).run()


@dataclass(eq=False)
class _Running:
    """A post under way. `ready_s`: when all is done that its rank was to compute before it.

    `num_left` transfers have not been timed; `last_end_s` is of those that have. `after` is the next post of its
    communicator, where that waits for this one.
    """

    rank: int
    post: Post
    ready_s: float
    num_left: int
    last_end_s: float = 0.0
    after: "_Running | None" = None

    @property
    def is_timed(self) -> bool:
        return self.num_left == 0


@dataclass
class _Rank:
    """`launched_s`: when the last post left a single hardware queue; `last` post of each communicator."""

    program: Program
    now_s: float = 0.0
    launched_s: float = 0.0
    position: int = 0
    busy_s: float = 0.0
    posts: dict[Key, _Running] = field(default_factory=dict)
    last: dict[int, _Running] = field(default_factory=dict)


@dataclass(frozen=True)
class _Half:
    """One end of a transfer: a message of a post that has begun."""

    of: _Running
    message: Message
    begin_s: float


@dataclass(frozen=True)
class _Transfer:
    send: _Half
    recv: _Half
    crosses: bool

    @property
    def begin_s(self) -> float:
        return max(self.send.begin_s, self.recv.begin_s)

    @property
    def links(self) -> tuple[tuple[int, bool, str], ...]:
        """(rank, whether it crosses, direction)."""
        return (self.send.of.rank, self.crosses, "out"), (self.recv.of.rank, self.crosses, "in")


class _Clockwork:
    def __init__(self, schedule: Schedule, wire: WireFormat, cost: CostModel, queues: Queues | None):
        self.schedule, self.wire, self.cost, self.queues = schedule, wire, cost, queues
        self.is_single = queues is not None and queues.is_single
        self.domains = schedule.problem.domains
        self.ranks = [_Rank(schedule.program(rank)) for rank in range(schedule.cp_size)]
        self.halves: dict[tuple[int, int, Key, int], _Half] = {}
        self.ready: list[tuple[float, int, _Transfer]] = []  # a heap by earliest start
        self.num_ready = 0
        self.free_s: dict[tuple[int, bool, str], float] = defaultdict(float)  # by `_Transfer.links`
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
                self._transfer(transfer, start_s)
        for rank, state in enumerate(self.ranks):
            if state.position < len(state.program):
                action = state.program[state.position]
                raise ScheduleFault(f"{self.schedule.name}: rank {rank} never gets past {action}")
        ends = [span.end_s for span in self.spans] + [state.now_s for state in self.ranks]
        return Timeline(tuple(self.spans), max(ends), tuple(state.busy_s for state in self.ranks))

    # ------------------------------------------------------------------ one rank

    def _advance(self, rank: int) -> None:
        """Runs a rank until it waits for a transfer that has not been timed, or cannot post."""
        state = self.ranks[rank]
        while state.position < len(state.program):
            action = state.program[state.position]
            match action:
                case Post():
                    if not self._post(rank, action):
                        return
                case Wait(key):
                    if not state.posts[key].is_timed:
                        return
                    state.now_s = max(state.now_s, state.posts[key].last_end_s)
                case Attend():
                    self._attend(rank, action)
                case _:
                    pass
            state.position += 1

    def _attend(self, rank: int, attend: Attend) -> None:
        state = self.ranks[rank]
        start_s = max(state.now_s, state.launched_s)
        took_s = self.cost.attend_s(attend, self.wire, self.schedule.pass_)
        self.spans.append(attend_span(rank, attend, start_s, took_s))
        state.now_s = start_s + took_s
        state.busy_s += took_s

    def _post(self, rank: int, post: Post) -> bool:
        """False where a single hardware queue holds the post back, and with it all that stands behind."""
        state = self.ranks[rank]
        running = _Running(rank, post, state.now_s, len(post.sends) + len(post.recvs))
        if self.queues is None:
            self._begin(running, state.now_s)
        else:
            communicator = self.queues.communicator(post, rank, self.domains)
            before = state.last.get(communicator)
            if before is None or before.is_timed:
                self._launch(running, before.last_end_s if before else 0.0)
            elif self.is_single:
                return False
            else:
                before.after = running
            state.last[communicator] = running
        state.posts[post.key] = running
        return True

    def _launch(self, running: _Running, free_s: float) -> None:
        """Begins a post whose communicator is free from `free_s` on."""
        begin_s = max(running.ready_s, free_s)
        if self.is_single:
            state = self.ranks[running.rank]
            begin_s = state.launched_s = max(begin_s, state.launched_s)
        self._begin(running, begin_s + LAUNCH_S)

    def _begin(self, running: _Running, now_s: float) -> None:
        """What both ends have begun is ready."""
        rank, post = running.rank, running.post
        running.last_end_s = now_s
        for is_send, messages in ((True, post.sends), (False, post.recvs)):
            for message, nth in _numbered(messages):
                src, dst = (rank, message.peer) if is_send else (message.peer, rank)
                half, pair = _Half(running, message, now_s), (src, dst, post.key, nth)
                if pair not in self.halves:
                    self.halves[pair] = half
                    continue
                other = self.halves.pop(pair)
                send, recv = (half, other) if is_send else (other, half)
                transfer = _Transfer(send, recv, self.domains.crosses(src, dst))
                heappush(self.ready, (self._start_s(transfer), self.num_ready, transfer))
                self.num_ready += 1

    # ------------------------------------------------------------------ transfers

    def _start_s(self, transfer: _Transfer) -> float:
        if not self.cost.is_shared:
            return transfer.begin_s
        return max(transfer.begin_s, *(self.free_s[link] for link in transfer.links))

    def _transfer(self, transfer: _Transfer, start_s: float) -> None:
        message, (src, dst) = transfer.send.message, (transfer.send.of.rank, transfer.recv.of.rank)
        end_s = start_s + self.cost.message_s(message, self.wire, crosses=transfer.crosses)
        self.free_s.update(dict.fromkeys(transfer.links, end_s))
        self.spans.append(transfer_span(src, dst, message, transfer.crosses, start_s, end_s))
        for running in (transfer.send.of, transfer.recv.of):
            running.num_left -= 1
            running.last_end_s = max(running.last_end_s, end_s)
            if self.queues is None or running.is_timed:
                if running.after is not None:
                    self._launch(running.after, running.last_end_s)
                self._advance(running.rank)


def _numbered(messages: tuple[Message, ...]) -> Iterator[tuple[Message, int]]:
    """Each message with its number among those with the same peer: they match in this order."""
    seen: dict[int, int] = defaultdict(int)
    for message in messages:
        yield message, seen[message.peer]
        seen[message.peer] += 1
