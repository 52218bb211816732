"""When each action of a schedule runs on GPUs under NCCL, given what each takes. See `schedule.queues`.

Each rank's blocks run in their stream, its posts in those of the communicators. A transfer begins when the posts of
both ends have begun and both ends' links of its class are free. Not modelled: that computing and sending disturb each
other, merging, the time of the host.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

from charm_megatron.cost.model import CostModel
from charm_megatron.cost.timeline import Span, Timeline, attend_span, numbered, transfer_span
from charm_megatron.cost.wire import WireFormat
from charm_megatron.errors import ScheduleFault
from charm_megatron.schedule.actions import Attend, Key, Message, Post, Program, Wait
from charm_megatron.schedule.queues import Queues
from charm_megatron.schedule.schedule import Schedule

LAUNCH_S = 5e-6
"""From the moment that a post may begin until NCCL's kernel runs."""


def evaluate_on(schedule: Schedule, wire: WireFormat, cost: CostModel, queues: Queues) -> Timeline:
    """Runs all programs against the clock. Raises `ScheduleFault` when they do not end."""
    return _Clockwork(schedule, wire, cost, queues).run()


@dataclass(eq=False)
class _Running:
    """A post of a rank: behind the blocks that end at `ready_s`; `num_left` transfers are not over."""

    rank: int
    post: Post
    communicator: int
    ready_s: float
    num_left: int
    end_s: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.num_left == 0


@dataclass
class _Rank:
    """`stream_s`: when its blocks so far are done; `queue_s`: when a single hardware queue is free."""

    program: Program
    position: int = 0
    stream_s: float = 0.0
    queue_s: float = 0.0
    busy_s: float = 0.0
    posts: dict[Key, _Running] = field(default_factory=dict)
    waits_for: Key | None = None


class _Clockwork:
    def __init__(self, schedule: Schedule, wire: WireFormat, cost: CostModel, queues: Queues):
        self.schedule, self.wire, self.cost, self.queues = schedule, wire, cost, queues
        self.domains = schedule.problem.domains
        self.ranks = [_Rank(schedule.program(rank)) for rank in range(schedule.cp_size)]
        self.streams: dict[tuple[int, int], deque[_Running]] = defaultdict(deque)
        self.last: dict[tuple[int, int], _Running] = {}
        self.half: dict[tuple[int, int, Key, int], tuple[_Running, Message]] = {}
        self.free_s: dict[tuple[int, bool, str], float] = defaultdict(float)  # (rank, crosses, direction)
        # (time, number, posts, whether they begin or one transfer of each ends), a heap
        self.events: list[tuple[float, int, tuple[_Running, ...], bool]] = []
        self.num_events = 0
        self.spans: list[Span] = []

    def run(self) -> Timeline:
        for rank in range(len(self.ranks)):
            self._advance(rank)
        while self.events:
            now_s, _, posts, begins = heappop(self.events)
            if begins:
                self._begin(posts[0], now_s)
            else:
                for running in posts:
                    self._end_of_transfer(running, now_s)
        for rank, state in enumerate(self.ranks):
            if state.position < len(state.program):
                action = state.program[state.position]
                raise ScheduleFault(f"{self.schedule.name}: rank {rank} never gets past {action}")
        ends = [span.end_s for span in self.spans] + [state.stream_s for state in self.ranks]
        return Timeline(tuple(self.spans), max(ends), tuple(state.busy_s for state in self.ranks))

    def _later(self, at_s: float, posts: tuple[_Running, ...], *, begins: bool) -> None:
        self.num_events += 1
        heappush(self.events, (at_s, self.num_events, posts, begins))

    # ------------------------------------------------------------------ one rank

    def _advance(self, rank: int) -> None:
        """Runs a rank until it needs a post that is not over."""
        state = self.ranks[rank]
        state.waits_for = None
        while state.position < len(state.program) and state.waits_for is None:
            match state.program[state.position]:
                case Post() as post:
                    self._post(rank, post)
                case Wait(key):
                    self._wait(state, key)
                case Attend() as attend:
                    self._attend(rank, attend)
            state.position += state.waits_for is None

    def _post(self, rank: int, post: Post) -> None:
        state = self.ranks[rank]
        communicator = self.queues.communicator(post, rank, self.domains)
        stream = self.streams[rank, communicator]
        before = self.last.get((rank, communicator))
        if self.queues.is_single:
            if before is not None and not before.is_over:
                state.waits_for = before.post.key
                return
            state.queue_s = max(state.queue_s, state.stream_s, before.end_s if before else 0.0)
        ready_s = state.queue_s if self.queues.is_single else state.stream_s
        running = _Running(rank, post, communicator, ready_s, len(post.sends) + len(post.recvs))
        state.posts[post.key] = self.last[rank, communicator] = running
        stream.append(running)
        if len(stream) == 1:
            self._later(max(ready_s, before.end_s if before else 0.0) + LAUNCH_S, (running,), begins=True)

    def _wait(self, state: _Rank, key: Key) -> None:
        running = state.posts[key]
        if not running.is_over:
            state.waits_for = key
            return
        state.stream_s = max(state.stream_s, running.end_s)
        state.queue_s = max(state.queue_s, running.end_s)

    def _attend(self, rank: int, attend: Attend) -> None:
        state = self.ranks[rank]
        start_s = max(state.stream_s, state.queue_s) if self.queues.is_single else state.stream_s
        took_s = self.cost.attend_s(attend, self.wire, self.schedule.pass_)
        self.spans.append(attend_span(rank, attend, start_s, took_s))
        state.stream_s = state.queue_s = start_s + took_s
        state.busy_s += took_s

    # ------------------------------------------------------------------ transfers

    def _begin(self, running: _Running, now_s: float) -> None:
        """The post is at the head of its stream; what its peers have begun as well is on its way."""
        rank, post = running.rank, running.post
        for is_send, messages in ((True, post.sends), (False, post.recvs)):
            for message, nth in numbered(messages):
                src, dst = (rank, message.peer) if is_send else (message.peer, rank)
                pair = (src, dst, post.key, nth)
                if pair not in self.half:
                    self.half[pair] = running, message
                    continue
                other, theirs = self.half.pop(pair)
                end_s = self._transfer(src, dst, message if is_send else theirs, now_s)
                self._later(end_s, (running, other), begins=False)

    def _transfer(self, src: int, dst: int, message: Message, now_s: float) -> float:
        crosses = self.domains.crosses(src, dst)
        ends = ((src, crosses, "out"), (dst, crosses, "in"))
        start_s = max(now_s, *(self.free_s[end] for end in ends)) if self.cost.is_shared else now_s
        end_s = start_s + self.cost.message_s(message, self.wire, crosses=crosses)
        self.free_s.update(dict.fromkeys(ends, end_s))
        self.spans.append(transfer_span(src, dst, message, crosses, start_s, end_s))
        return end_s

    def _end_of_transfer(self, running: _Running, now_s: float) -> None:
        running.num_left -= 1
        running.end_s = max(running.end_s, now_s)
        if not running.is_over:
            return
        stream = self.streams[running.rank, running.communicator]
        assert stream.popleft() is running, "posts of a communicator run in order"
        if stream:
            self._later(max(now_s, stream[0].ready_s) + LAUNCH_S, (stream[0],), begins=True)
        if self.ranks[running.rank].waits_for == running.post.key:
            self._advance(running.rank)
