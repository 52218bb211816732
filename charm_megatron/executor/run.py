"""One rank's program on tensors: a loop over its actions, with all names resolved ahead."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from torch.profiler import record_function

from charm_megatron.compile import RankProgram
from charm_megatron.cost.wire import WireFormat
from charm_megatron.executor.buffers import BufferPool
from charm_megatron.executor.computations import COMPUTATIONS, BlockContext, Operand
from charm_megatron.executor.flight import FlightRecorder
from charm_megatron.executor.held import HeldTensors
from charm_megatron.executor.lost import TransferLost
from charm_megatron.executor.reduce import Partial, add
from charm_megatron.executor.transport import Transfer, Transport
from charm_megatron.lowering.storage import (
    AccumulateStep,
    AttendStep,
    FreeStep,
    PostStep,
    Receive,
    SendInPlace,
    SendPacked,
    WaitStep,
)
from charm_megatron.schedule.actions import Key


@dataclass(frozen=True, eq=False)
class LabelledProgram:
    """A rank's program, and the text of each action, under which profilers show it."""

    compiled: RankProgram

    @cached_property
    def labels(self) -> tuple[str, ...]:
        return tuple(str(action) for action in self.compiled.program)


class ProgramRun:
    """Runs a program once over the tensors of a rank's shard."""

    def __init__(
        self,
        plan: LabelledProgram,
        wire: WireFormat,
        pool: BufferPool,
        context: BlockContext,
        transport: Transport,
        recorder: FlightRecorder,
    ):
        self.plan, self.context, self.transport, self.recorder = plan, context, transport, recorder
        self.pass_, self.storage = plan.compiled.pass_, plan.compiled.storage
        self.held = HeldTensors(self.storage, wire, pool)
        self._handles: dict[Key, object] = {}
        self._attend = COMPUTATIONS[self.pass_].attend
        self._position = 0

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts the rank's operands in place, by the names that payloads give to their fields."""
        for payload in (self.pass_.q_down, self.pass_.kv_down):
            self.held.bind_local(payload, tensors)
        for payload in self.pass_.results:
            self.held.alloc_result(payload)

    def results(self) -> dict[str, Tensor]:
        """The rank's results after the run, by field."""
        return {name: x for payload in self.pass_.results for name, x in self.held.result(payload).items()}

    def run(self) -> None:
        """Runs all actions in order."""
        while not self.is_finished:
            self.step()
        self.recorder.note(self.plan.compiled, self._position)

    def close(self) -> None:
        """Gives the buffers of the operands at home back."""
        assert not self._handles, "the program ends with transfers under way"
        self.held.close()

    @property
    def is_finished(self) -> bool:
        return self._position == len(self.storage.steps)

    def step(self) -> None:
        """Runs the next action."""
        step = self.storage.steps[self._position]
        self.recorder.note(self.plan.compiled, self._position)
        with record_function(self.plan.labels[self._position]):
            match step:
                case PostStep():
                    self._post(step)
                case WaitStep(key, gives):
                    self._wait(key)
                    self._give(gives)
                case AttendStep():
                    self._compute(step)
                case AccumulateStep():
                    self._accumulate(step)
                case FreeStep(gives):
                    self._give(gives)
        self._position += 1

    @property
    def waits_for(self) -> object | None:
        """The transport's handle of the post that the next action waits for, if it is a Wait."""
        if not self.is_finished:
            step = self.storage.steps[self._position]
            if isinstance(step, WaitStep):
                return self._handles[step.key]
        return None

    def _wait(self, key: Key) -> None:
        try:
            self.transport.wait(self._handles.pop(key))
        except TransferLost as error:
            raise self.recorder.lost(self.plan.compiled, self._position, error) from error

    def _post(self, step: PostStep) -> None:
        sends = [(send.peer, self._outgoing(send)) for send in step.sends]
        recvs: list[Transfer] = [(recv.peer, self._incoming(recv)) for recv in step.recvs]
        self._handles[step.key] = self.transport.post(sends, recvs)

    def _outgoing(self, send: SendInPlace | SendPacked) -> Tensor:
        match send:
            case SendInPlace(_, at):
                return self.held.buffer(at.buffer).wire_bytes(at.start, at.stop)
            case SendPacked(_, number, sources):
                return self.held.pack(number, sources).memory

    def _incoming(self, recv: Receive) -> Tensor:
        return self.held.take(recv.buffer).memory

    def _compute(self, step: AttendStep) -> None:
        # Kernels see only what is left of a band after trimming, so they cannot tell.
        assert not (step.action.causal and step.action.band), "a rectangle is causal or a band, not both"
        for number in step.takes:
            self.held.take(number)
        q, kv = Operand(*self.held.operand(step.q)), Operand(*self.held.operand(step.kv))
        partials = self._attend(self.context, step, q, kv)
        for payload, into, partial in zip(self.pass_.results, step.results, partials, strict=True):
            assert payload.reduction is not None, "results say how they add up"
            add(self.held, payload.reduction, into, partial)

    def _accumulate(self, step: AccumulateStep) -> None:
        for number in step.takes:
            self.held.take(number)
        payload = self.storage.buffers[step.source.buffer].payload
        assert payload.reduction is not None, "only results are accumulated"
        stats = self.held.stats(step.source)[..., 0] if payload.num_stats else None
        add(self.held, payload.reduction, [step.target], Partial((self.held.values(step.source),), stats))

    def _give(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            self.held.give(number)
