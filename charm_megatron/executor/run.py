"""One rank's program on tensors: a loop over its bound operations."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from charm_megatron.compile import RankProgram
from charm_megatron.cost.wire import WireFormat
from charm_megatron.executor.computations import COMPUTATIONS, BlockContext
from charm_megatron.executor.flight import FlightRecorder
from charm_megatron.executor.lost import TransferLost
from charm_megatron.executor.memory import Memory
from charm_megatron.executor.steps import CompiledProgram, Waiting, compile_program
from charm_megatron.executor.transport import Transport
from charm_megatron.executor.views import LazyViews
from charm_megatron.kernels.elementwise import Elementwise
from charm_megatron.schedule.actions import Key


class BoundProgram:
    """A rank's program, resolved when it first runs; and the text of each action, under which profilers show it."""

    def __init__(self, compiled: RankProgram, wire: WireFormat):
        self.compiled, self.wire = compiled, wire

    @cached_property
    def bound(self) -> CompiledProgram:
        return compile_program(self.compiled, self.wire)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        return tuple(str(action) for action in self.compiled.program)


class ProgramRun:
    """Runs a program once over the tensors of a rank's shard, by the names of their fields.

    Operands are values [s, b, h, ..] and statistics [s, b, h]. `close` gives the memory back, in any case.
    """

    def __init__(
        self,
        program: BoundProgram,
        memory: Memory,
        context: BlockContext,
        transport: Transport,
        elementwise: Elementwise,
        recorder: FlightRecorder,
        tensors: Mapping[str, Tensor],
    ):
        self.program, self.memory, self.recorder = program, memory, recorder
        self.context, self.transport, self.elementwise = context, transport, elementwise
        bound = self.bound = program.bound
        self.attend = COMPUTATIONS[bound.of.pass_].attend
        self.handles: dict[Key, object] = {}
        self.waiting: dict[int, Any] = {}
        """Partial results that wait for another one, by place."""
        self._position = 0
        # A label takes longer than many an action.
        self._is_profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        self._results = self._own_results()
        self._stretch = memory.take(bound.num_bytes)
        self.views = self._stretch.kept(bound, lambda: LazyViews(bound.views, self._stretch))
        operands = {name: _in_order(x, is_sent=name in bound.sent) for name, x in tensors.items()}
        self.views.bind(operands | self._results, bound.of_tensors)

    def _own_results(self) -> dict[str, Tensor]:
        """The accumulators in which the rank's own results add up."""
        workload, problem = self.program.wire.workload, self.program.wire.problem
        dtype = getattr(torch, workload.accumulate_dtype)
        rows, heads = (
            workload.seq_len // problem.cp_size,
            {"q": workload.num_heads, "kv": workload.num_kv_heads},
        )
        made = {}
        for payload in self.bound.of.pass_.results:
            shape = rows, workload.batch, heads[payload.side]
            for name, width in zip(payload.values, payload.widths, strict=True):
                size = *shape, workload.width(width)
                made[name] = torch.empty(size, dtype=dtype, device=self.memory.device)
            for name in payload.stats:
                made[name] = torch.empty(shape, dtype=dtype, device=self.memory.device)
        return made

    def results(self) -> dict[str, Tensor]:
        """The rank's results after the run: values [s, b, h, w] and statistics [s, b, h] in the accumulate dtype."""
        return self._results

    def run(self) -> None:
        """Runs all actions in order."""
        while not self.is_finished:
            self.step()
        self.recorder.note(self.bound.of, self._position)

    def close(self) -> None:
        """Gives the memory back; where transfers are under way it is left to them."""
        self.views.bind({}, self.bound.of_tensors)
        if self.handles:
            self.memory.lose(self._stretch)
        else:
            self.memory.give(self._stretch)

    @property
    def is_finished(self) -> bool:
        return self._position == len(self.bound.operations)

    def step(self) -> None:
        """Runs the next action; with the first what comes before it."""
        position = self._position
        if not position:
            self._begin()
        self.recorder.note(self.bound.of, position)
        operation = self.bound.operations[position]
        if operation is not None:
            if self._is_profiled:
                with record_function(self.program.labels[position]):
                    operation.run(self)
            else:
                operation.run(self)
        if self.memory.watches_frees:
            for number in self.bound.frees[position]:
                self.memory.freed(self.views[number])
        self._position += 1

    def _begin(self) -> None:
        for pack in self.bound.begin:
            pack.run(self)
        for number in self.bound.untouched:
            self.views[number].zero_()

    @property
    def waits_for(self) -> object | None:
        """The transport's handle of the post that the next action waits for, if it is a Wait."""
        if not self.is_finished:
            operation = self.bound.operations[self._position]
            if isinstance(operation, Waiting):
                return self.handles[operation.key]
        return None

    def wait(self, key: Key) -> None:
        """Returns when the transfers of a post are done. Raises `TransferTimeout` with what was lost."""
        try:
            self.transport.wait(self.handles.pop(key))
        except TransferLost as error:
            raise self.recorder.lost(self.bound.of, self._position, error) from error


def _in_order(x: Tensor, *, is_sent: bool) -> Tensor:
    """As kernels, or the network, can read it."""
    if is_sent:
        return x.detach().contiguous()
    return x if x.dim() < 4 or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
