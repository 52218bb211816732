"""Proves a schedule by running every rank's program on names instead of tensors.

The transport is the strictest one: sends are rendezvous, and every rank works through its posts in one
ordered queue, a whole post at a time; under NCCL in one for each communicator (`schedule.queues`). A schedule that ends
in a single queue ends on any transport that keeps order.

What is proved: every unmasked block is computed exactly once; every result comes home once, complete;
nothing is read before it arrived, freed while it is being sent, or added to after it left; sends and
receives agree; nothing is left behind. Not proved: that transfers overlap with computation.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from charm_megatron.errors import ScheduleFault
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
    reads,
)
from charm_megatron.schedule.passes import Pass
from charm_megatron.schedule.payload import PAYLOADS
from charm_megatron.schedule.piece import Piece
from charm_megatron.schedule.problem import Problem
from charm_megatron.schedule.queues import ONE_QUEUE, Queues
from charm_megatron.schedule.schedule import Schedule
from charm_megatron.schedule.text import excerpt
from charm_megatron.show.grid import format_grid
from charm_megatron.verify.flights import Flight, Value, match

GRID_AROUND = 1
"""Steps and ranks to either side of a fault that its message shows."""


@dataclass(frozen=True)
class CheckReport:
    """What a checked schedule moves and holds: pieces sent by payload, messages, most foreign pieces on any rank."""

    num_messages: int
    num_pieces_sent: dict[str, int]
    peak_pieces: int


@dataclass
class _Rank:
    """The state of one rank."""

    program: Program
    held: dict[Piece, Value]
    own: frozenset[Piece]  # the operands of its shard
    home: frozenset[Piece]  # these, and the results of its shard
    position: int = 0
    queues: defaultdict[int, list[Flight]] = field(default_factory=lambda: defaultdict(list))
    """By communicator."""
    flights: dict[Key, Flight] = field(default_factory=dict)
    in_flight: defaultdict[Piece, int] = field(default_factory=lambda: defaultdict(int))
    landing: set[Piece] = field(default_factory=set)
    left: set[Piece] = field(default_factory=set)
    spent: set[Piece] = field(default_factory=set)
    num_foreign: int = 0
    peak_pieces: int = 0


def check_schedule(schedule: Schedule, queues: Queues = ONE_QUEUE) -> CheckReport:
    """Checks all ranks of `schedule`; raises `ScheduleFault` at the first fault, with the grid around it."""
    programs = [schedule.program(rank) for rank in range(schedule.cp_size)]
    try:
        return check_programs(schedule.name, schedule.problem, schedule.pass_, programs, queues)
    except ScheduleFault as fault:
        if fault.rank is None or fault.step is None:
            raise
        steps = range(fault.step - GRID_AROUND, fault.step + GRID_AROUND + 1)
        ranks = range(fault.rank - GRID_AROUND, fault.rank + GRID_AROUND + 1)
        grid = format_grid(schedule, steps, ranks)
        raise ScheduleFault(f"{fault}\n\n{grid}", fault.rank, fault.step) from fault


def check_programs(
    name: str,
    problem: Problem,
    pass_: Pass,
    programs: Sequence[Program],
    queues: Queues = ONE_QUEUE,
) -> CheckReport:
    """Checks programs, one per rank, against the problem that they are to solve.

    Raises `ScheduleFault` with rank, action and piece of the first fault and the actions around it.
    """
    return _Machine(name, problem, pass_, programs, queues).run()


class _Machine:
    def __init__(self, name: str, problem: Problem, pass_: Pass, programs: Sequence[Program], queues: Queues):
        if len(programs) != problem.cp_size:
            raise ScheduleFault(f"{name}: {len(programs)} programs for {problem.cp_size} ranks")
        self.name, self.problem, self.pass_, self.queues = name, problem, pass_, queues
        self.ranks = []
        for rank, program in enumerate(programs):
            own, results = (
                frozenset(piece for payload in payloads for piece in problem.local_pieces(payload, rank))
                for payloads in ((pass_.q_down, pass_.kv_down), pass_.results)
            )
            home = own | results
            self.ranks.append(_Rank(program, dict.fromkeys(own), own, home))
        self.done: set[tuple[int, int, int]] = set()
        self.num_messages = 0
        self.num_pieces_sent: dict[str, int] = defaultdict(int)

    def run(self) -> CheckReport:
        runnable = set(range(len(self.ranks)))
        while runnable:
            rank = runnable.pop()
            while self._step(rank):
                pass
            runnable |= self._transfer(rank)
        for rank, state in enumerate(self.ranks):
            if state.position < len(state.program):
                self._fault(rank, self._why_stuck(rank))
        self._check_end()
        peak = max(state.peak_pieces for state in self.ranks)
        return CheckReport(self.num_messages, dict(self.num_pieces_sent), peak)

    def _fault(self, rank: int, why: str) -> NoReturn:
        state = self.ranks[rank]
        at = state.position
        action = str(state.program[at]) if at < len(state.program) else "end of program"
        posted = [past.key.step for past in state.program[: at + 1] if isinstance(past, Post)]
        raise ScheduleFault(
            f"{self.name} {self.pass_.name}, rank {rank}, action {at} ({action}): {why}\n"
            f"{excerpt(state.program, at)}",
            rank,
            posted[-1] if posted else 0,
        )

    # ------------------------------------------------------------------ one rank's actions

    def _step(self, rank: int) -> bool:
        """Runs the next action of a rank; False when there is none or it must wait."""
        state = self.ranks[rank]
        if state.position == len(state.program):
            return False
        action: Action = state.program[state.position]
        if isinstance(action, Wait) and not self._may_pass(rank, action.key):
            return False
        if isinstance(action, Post) and self.queues.is_single and self._queue_of(rank, action):
            return False  # what cannot begin holds up everything behind it
        for name in reads(action):
            if self.problem.resident(name, rank) not in state.held:
                self._fault(rank, f"{name} is not here yet")
        match action:
            case Post():
                self._post(rank, action)
            case Wait(key):
                self._wait(rank, key)
            case Attend():
                self._attend(rank, action)
            case Accumulate(name):
                self._accumulate(rank, name)
            case Free(name):
                self._free(rank, name)
        state.position += 1
        return True

    def _post(self, rank: int, post: Post) -> None:
        state = self.ranks[rank]
        if post.key in state.flights:
            self._fault(rank, "posts what is still under way")
        for message in (*post.sends, *post.recvs):
            self._check_message(rank, message)
        for name in reads(post):
            state.in_flight[name] += 1
        num_landing = len(state.landing)
        for name in post.received:
            if name in state.held or name in state.landing:
                self._fault(rank, f"{name} arrives twice")
            state.landing.add(name)
        self._count_foreign(state, len(state.landing) - num_landing)
        values = {name: state.held[self.problem.resident(name, rank)] for name in reads(post)}
        flight = Flight(post, values, list(post.sends), list(post.recvs))
        self._queue_of(rank, post).append(flight)
        state.flights[post.key] = flight

    def _queue_of(self, rank: int, post: Post) -> list[Flight]:
        try:
            communicator = self.queues.communicator(post, rank, self.problem.domains)
        except ScheduleFault as fault:
            self._fault(rank, str(fault))
        return self.ranks[rank].queues[communicator]

    def _check_message(self, rank: int, message: Message) -> None:
        peer, pieces = message
        if peer == rank or not 0 <= peer < len(self.ranks):
            self._fault(rank, f"there is no peer {peer}")
        if len({piece.payload for piece in pieces}) != 1:
            self._fault(rank, "a message mixes payloads")

    def _may_pass(self, rank: int, key: Key) -> bool:
        flight = self.ranks[rank].flights.get(key)
        if flight is None:
            self._fault(rank, "waits for what is not in flight")
        return flight.is_done

    def _wait(self, rank: int, key: Key) -> None:
        state = self.ranks[rank]
        flight = state.flights.pop(key)
        for name, value in flight.arrived.items():
            state.held[name] = value
            state.landing.discard(name)
        for name in reads(flight.post):
            state.in_flight[name] -= 1

    def _attend(self, rank: int, action: Attend) -> None:
        chunks = [name.chunk for name in action.q]
        if action.causal and action.band is not None:
            self._fault(rank, "a rectangle is causal or a band, not both")
        if action.causal:
            same = chunks == [name.chunk for name in action.kv] == sorted(set(chunks))
            if not same:
                self._fault(rank, "a causal rectangle needs the same ascending chunks on both sides")
        for q in action.q:
            for kv in action.kv:
                if action.causal and kv.chunk > q.chunk:
                    continue  # above the diagonal
                self._block(rank, action, q, kv)

    def _block(self, rank: int, action: Attend, q: Piece, kv: Piece) -> None:
        problem = self.problem
        block = (q.chunk, kv.chunk, q.head)
        if (q.payload, kv.payload) != (self.pass_.q_down.name, self.pass_.kv_down.name):
            self._fault(rank, f"block ({q}, {kv}) has the wrong payload for this pass")
        if kv.head != problem.kv_head_of(q.head):
            self._fault(rank, f"block ({q}, {kv}) joins head groups that do not belong together")
        if not problem.unmasked[q.chunk, kv.chunk]:
            self._fault(rank, f"block ({q}, {kv}) is masked")
        if not self._has_right_mask(action, q, kv):
            self._fault(rank, f"block ({q}, {kv}) has the wrong mask")
        if block in self.done:
            self._fault(rank, f"block ({q}, {kv}) is computed twice")
        self.done.add(block)
        if self.pass_.q_up:
            self._add(rank, Piece(self.pass_.q_up.name, q.chunk, q.head), 1 << kv.chunk)
        if self.pass_.kv_up:
            bit = problem.numbering("q").number(q.chunk, q.head)
            self._add(rank, kv.of(self.pass_.kv_up.name), 1 << bit)

    def _has_right_mask(self, action: Attend, q: Piece, kv: Piece) -> bool:
        problem = self.problem
        band, shape = problem.band(q.chunk, kv.chunk), problem.block_shape(q.chunk, kv.chunk)
        if action.band is not None:
            return band == action.band and not band.is_full(*shape)
        if action.causal and q.chunk == kv.chunk:
            return band.is_causal(*shape)
        return band.is_full(*shape)

    def _add(self, rank: int, name: Piece, blocks: int) -> None:
        state = self.ranks[rank]
        name = self.problem.resident(name, rank)
        if name in state.left:
            self._fault(rank, f"adds to {name} after it was sent")
        have = state.held.get(name) or 0
        if name not in state.held and name not in state.home:
            self._count_foreign(state, 1)
        if have & blocks:
            self._fault(rank, f"{name} would count blocks twice")
        state.held[name] = have | blocks

    def _accumulate(self, rank: int, name: Piece) -> None:
        state = self.ranks[rank]
        value = state.held[name]
        if name.src is None or value is None:
            self._fault(rank, f"{name} is not a received partial result")
        if name in state.spent:
            self._fault(rank, f"{name} is accumulated twice")
        state.spent.add(name)
        self._add(rank, name.own, value)

    def _free(self, rank: int, name: Piece) -> None:
        state = self.ranks[rank]
        if name not in state.held:
            self._fault(rank, f"{name} is not here")
        if name in state.own:
            self._fault(rank, f"{name} is at home here")
        if state.in_flight[name]:
            self._fault(rank, f"{name} is still being sent")
        if PAYLOADS[name.payload].is_result:
            used = name in state.spent if name.src is not None else name in state.left
            if not used:
                self._fault(rank, f"result {name} would be lost")
        del state.held[name]
        self._count_foreign(state, -1)

    @staticmethod
    def _count_foreign(state: _Rank, more: int) -> None:
        """Keeps count of the pieces that a rank holds or receives beside those of its own shard."""
        state.num_foreign += more
        state.peak_pieces = max(state.peak_pieces, state.num_foreign)

    # ------------------------------------------------------------------ transfers

    def _transfer(self, rank: int) -> set[int]:
        """Matches what can be matched around `rank`; returns the ranks that may now go on."""
        moved: set[int] = set()
        todo = {(rank, communicator) for communicator in self.ranks[rank].queues}
        while todo:
            current, communicator = todo.pop()
            queue = self.ranks[current].queues[communicator]
            if not queue:
                continue
            flight = queue[0]
            for peer in {message.peer for message in (*flight.sends, *flight.recvs)}:
                other = self.ranks[peer].queues[communicator]
                if other and (
                    self._match((current, flight), (peer, other[0]))
                    | self._match((peer, other[0]), (current, flight))
                ):
                    moved |= {current, peer}
                    todo.add((peer, communicator))
            if flight.is_done:
                queue.pop(0)
                moved.add(current)
                todo.add((current, communicator))
        return moved

    def _match(self, source: tuple[int, Flight], target: tuple[int, Flight]) -> bool:
        (src, out), (dst, into) = source, target
        try:
            sent = match(src, out, dst, into)
        except ScheduleFault as fault:
            self._fault(src, str(fault))
        for message in sent:
            self._count(src, message)
        return bool(sent)

    def _count(self, src: int, message: Message) -> None:
        self.num_messages += 1
        for name in message.pieces:
            self.num_pieces_sent[name.payload] += 1
            if PAYLOADS[name.payload].is_result:
                again = name in self.ranks[src].left
                if again:
                    self._fault(src, f"sends {name} twice")
                self.ranks[src].left.add(name)

    # ------------------------------------------------------------------ the end

    def _why_stuck(self, rank: int) -> str:
        heads = [queue[0] for queue in self.ranks[rank].queues.values() if queue]
        if not heads:
            return "deadlock"
        flight = heads[0]
        open_ends = [f"send {m}" for m in flight.sends] + [f"recv {m}" for m in flight.recvs]
        return f"deadlock: post {flight.post.key} still has {' | '.join(open_ends)} unmatched"

    def _check_end(self) -> None:
        problem = self.problem
        for rank, state in enumerate(self.ranks):
            if any(state.queues.values()) or state.flights:
                self._fault(rank, "ends with transfers not waited for")
        expected = int(problem.unmasked.sum()) * problem.q_head_groups
        if len(self.done) != expected:
            raise ScheduleFault(
                f"{self.name} {self.pass_.name}: {expected - len(self.done)} blocks are never computed"
            )
        results = self._expected_results()
        for rank, state in enumerate(self.ranks):
            mine = {x: v for x, v in results.items() if problem.sharding.home[x.chunk] == rank}
            for name, blocks in mine.items():
                if state.held.get(name) != blocks:
                    self._fault(rank, f"result {name} is not complete")
            left = state.held.keys() - state.own - mine.keys()
            if left:
                self._fault(rank, f"{', '.join(sorted(map(str, left)))} is left behind")

    def _expected_results(self) -> dict[Piece, int]:
        results: dict[Piece, int] = defaultdict(int)
        problem, (q_up, kv_up) = self.problem, (self.pass_.q_up, self.pass_.kv_up)
        for q, kv, head in self.done:
            if q_up:
                results[Piece(q_up.name, q, head)] |= 1 << kv
            if kv_up:
                kv_head = problem.kv_head_of(head)
                results[Piece(kv_up.name, kv, kv_head)] |= 1 << problem.numbering("q").number(q, head)
        return results
