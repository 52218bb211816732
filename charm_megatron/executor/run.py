"""One rank's program on tensors: a loop over its actions."""

from dataclasses import dataclass, field

from torch import Tensor
from torch.profiler import record_function

from charm_megatron.executor.blocks import ATTENDS, BlockContext, accumulate
from charm_megatron.executor.buffers import Parcel
from charm_megatron.executor.store import PieceStore
from charm_megatron.executor.transport import Transfer, Transport
from charm_megatron.schedule.actions import (
    Accumulate,
    Attend,
    Free,
    Key,
    Message,
    Piece,
    Post,
    Program,
    Wait,
)
from charm_megatron.schedule.passes import PAYLOADS, Pass
from charm_megatron.schedule.schedule import Schedule


@dataclass(frozen=True)
class RankPlan:
    """One phase of one rank: its program, and the text of each action, under which profilers show it."""

    pass_: Pass
    program: Program
    labels: tuple[str, ...]


def rank_plan(schedule: Schedule, rank: int) -> RankPlan:
    """The program of one rank, ready to run many times."""
    program = schedule.program(rank)
    return RankPlan(schedule.pass_, program, tuple(str(action) for action in program))


@dataclass
class _Open:
    """A post under way."""

    post: Post
    handle: object = None
    landing: list[Parcel] = field(default_factory=list)
    packed: list[Tensor] = field(default_factory=list)


class ProgramRun:
    """Runs a program once over the pieces of `store`."""

    def __init__(self, plan: RankPlan, store: PieceStore, context: BlockContext, transport: Transport):
        self.plan, self.store, self.context, self.transport = plan, store, context, transport
        self._open: dict[Key, _Open] = {}
        self._attend = ATTENDS[plan.pass_.name]
        self._position = 0

    def run(self) -> None:
        """Runs all actions in order."""
        while not self.is_finished:
            self.step()
        self.close()

    def close(self) -> None:
        """Asserts that nothing is left under way, and gives the buffers of the operands at home back."""
        assert not self._open, "the program ends with transfers under way"
        self.store.close()

    @property
    def is_finished(self) -> bool:
        return self._position == len(self.plan.program)

    def step(self) -> None:
        """Runs the next action."""
        action = self.plan.program[self._position]
        with record_function(self.plan.labels[self._position]):
            match action:
                case Post():
                    self._post(action)
                case Wait(key):
                    self._wait(key)
                case Attend():
                    self._attend(self.store, self.context, action)
                case Accumulate(name):
                    accumulate(self.store, self.plan.pass_.name, name)
                case Free(name):
                    self._free(name)
        self._position += 1

    @property
    def waits_for(self) -> object | None:
        """The transport's handle of the post that the next action waits for, if it is a Wait."""
        if not self.is_finished:
            action = self.plan.program[self._position]
            if isinstance(action, Wait):
                return self._open[action.key].handle
        return None

    def _post(self, post: Post) -> None:
        assert post.key not in self._open, f"post {post.key} is still under way"
        under_way = _Open(post)
        sends = [self._outgoing(message, under_way) for message in post.sends]
        recvs: list[Transfer] = []
        for peer, names in post.recvs:
            parcel = self.store.incoming(names)
            under_way.landing.append(parcel)
            recvs.append((peer, parcel.buffer))
        under_way.handle = self.transport.post(sends, recvs)
        self._open[post.key] = under_way

    def _outgoing(self, message: Message, under_way: _Open) -> Transfer:
        """The message as bytes: in place where its pieces lie side by side as they travel, else packed."""
        peer, names = message
        if not PAYLOADS[names[0].payload].is_result:
            runs = list(self.store.runs(names))
            if len(runs) == 1:
                in_place = runs[0].parcel.wire_bytes(runs[0].start, runs[0].stop)
                if in_place is not None:
                    return peer, in_place
        packed = self.store.packed(names)
        under_way.packed.append(packed.buffer)
        return peer, packed.buffer

    def _free(self, name: Piece) -> None:
        for under_way in self._open.values():
            assert all(name not in message.names for message in under_way.post.sends), f"{name} is being sent"
        self.store.free(name)

    def _wait(self, key: Key) -> None:
        done = self._open.pop(key)
        self.transport.wait(done.handle)
        for parcel in done.landing:
            self.store.put(parcel)
        for buffer in done.packed:
            self.store.pool.give(buffer)
