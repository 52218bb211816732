"""Context-parallel attention as one autograd function: the phases of either direction, one after the other."""

from collections.abc import Generator, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from charm_megatron.compile import Plan
from charm_megatron.cost.wire import WireFormat
from charm_megatron.executor.computations import COMPUTATIONS, BlockContext, BlockKey
from charm_megatron.executor.flight import FlightRecorder
from charm_megatron.executor.memory import Memory
from charm_megatron.executor.run import BoundProgram, ProgramRun
from charm_megatron.executor.sink import sink_gradient, with_sink
from charm_megatron.executor.transport import Transport
from charm_megatron.kernels import BlockKernel
from charm_megatron.kernels.elementwise import Elementwise, TorchElementwise
from charm_megatron.lowering.storage import PostStep
from charm_megatron.schedule.passes import DIRECTIONS, LOGITS, Direction


@dataclass(frozen=True)
class AttentionCall:
    """Everything a call needs beside its tensors.

    Shapes: s tokens of this rank, b batch, h query heads, h_k KV heads, d and d_v head widths.
    """

    rank: int
    forward_programs: tuple[BoundProgram, ...]
    backward_programs: tuple[BoundProgram, ...]
    wire: WireFormat
    kernel: BlockKernel
    elementwise: Elementwise
    transport: Transport
    memory: Memory
    recorder: FlightRecorder
    names: Mapping[Direction, str]
    """Of the pass, for other ranks to compare."""

    @property
    def posts(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(peers to send to, peers to receive from) of all posts, in their order."""
        for program in (*self.forward_programs, *self.backward_programs):
            for step in program.compiled.storage.steps:
                if isinstance(step, PostStep):
                    yield tuple(send.peer for send in step.sends), tuple(recv.peer for recv in step.recvs)

    @property
    def keeps_logits(self) -> bool:
        """Whether the backward pass needs the logits of all blocks, from the forward pass."""
        return any(program.compiled.pass_ is LOGITS for program in self.forward_programs)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, sink: Tensor | None = None
    ) -> "ForwardResult":
        """q [s, b, h, d], k [s, b, h_k, d], v [s, b, h_k, d_v] -> out [s, b, h, d_v] in q's dtype, lse [s, b, h].

        `sink` [h]: see `executor.sink`.
        """
        return run_phases(self.forward_phases(q, k, v, softmax_scale, sink))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: "ForwardResult", softmax_scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dout [s, b, h, d_v] -> dq, dk, dv, shaped and typed like q, k, v."""
        return run_phases(self.backward_phases(dout, q, k, v, result, softmax_scale))

    def forward_phases(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, sink: Tensor | None = None
    ) -> "Phases[ForwardResult]":
        """The runs of the forward pass; whoever takes them runs each to its end before taking the next."""
        self._announce(Direction.FORWARD, softmax_scale, q.device)
        tensors = {"q": q, "k": k, "v": v}
        context = self._context(softmax_scale, {})
        yield from self._phases(self.forward_programs, context, tensors)
        out, lse = tensors["out"], tensors["lse"]
        if sink is not None:
            out, lse = with_sink(out, lse, sink)
        return ForwardResult(out.to(q.dtype), lse, context.logits)

    def backward_phases(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: "ForwardResult", softmax_scale: float
    ) -> "Phases[tuple[Tensor, Tensor, Tensor]]":
        """The runs of the backward pass, as `forward_phases`."""
        self._announce(Direction.BACKWARD, softmax_scale, q.device)
        tensors = {"q": q, "k": k, "v": v, "dout": dout, "lse": result.lse, "out": result.out}
        context = self._context(softmax_scale, dict(result.probabilities))
        yield from self._phases(self.backward_programs, context, tensors)
        return tensors["dq"].to(q.dtype), tensors["dk"].to(k.dtype), tensors["dv"].to(v.dtype)

    def _phases(
        self, programs: Sequence[BoundProgram], context: BlockContext, tensors: MutableMapping[str, Tensor]
    ) -> "Phases[None]":
        """Runs the phases of one direction; each adds its results to `tensors`."""
        chunks = self.wire.problem.sharding.chunks_of(self.rank)
        for program in programs:
            COMPUTATIONS[program.compiled.pass_].prepare(context, chunks, tensors)
            run = ProgramRun(
                program, self.memory, context, self.transport, self.elementwise, self.recorder, tensors
            )
            try:
                yield run
            finally:
                run.close()
            tensors.update(run.results())

    def _announce(self, direction: Direction, softmax_scale: float, device: torch.device) -> None:
        self.transport.announce(f"makes {self.names[direction]}, scale {softmax_scale:.17g}", device)

    def _context(self, softmax_scale: float, logits: dict[BlockKey, Tensor]) -> BlockContext:
        return BlockContext(self.kernel, softmax_scale, logits)


def attention_call(
    plan: Plan,
    rank: int,
    kernel: BlockKernel,
    transport: Transport,
    memory: Memory,
    recorder: FlightRecorder | None = None,
    elementwise: Elementwise | None = None,
) -> AttentionCall:
    """What one rank runs of a plan; `elementwise` is torch's unless another one is given."""
    forward, backward = (
        tuple(BoundProgram(program, plan.wire) for program in plan.rank_programs(direction, rank))
        for direction in DIRECTIONS
    )
    recorder = recorder or FlightRecorder(rank)
    layout = plan.problem.sharding.layout
    names = {
        direction: f"{plan.name} {direction} of {plan.workload.summary}, {layout}, plan {plan.digest[:12]}"
        for direction in DIRECTIONS
    }
    return AttentionCall(
        rank,
        forward,
        backward,
        plan.wire,
        kernel,
        elementwise or TorchElementwise(),
        transport,
        memory,
        recorder,
        names,
    )


@dataclass(frozen=True)
class ForwardResult:
    """out [s, b, h, d_v], lse [s, b, h], and the probabilities that ring self-attention keeps."""

    out: Tensor
    lse: Tensor
    probabilities: dict[BlockKey, Tensor]


type Phases[Result] = Generator[ProgramRun, None, Result]


def run_phases[Result](phases: Phases[Result]) -> Result:
    """Runs all phases of one rank, one after the other, and returns their result."""
    while True:
        try:
            run = next(phases)
        except StopIteration as end:
            result: Result = end.value
            return result
        try:
            run.run()
        except BaseException:
            phases.close()
            raise


class ContextParallelAttention(torch.autograd.Function):
    """`apply(q, k, v, call, softmax_scale, sink)` -> (out, lse); lse carries no gradient.

    That of `sink`, if there is one, is of this rank's rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: AttentionCall,
        softmax_scale: float,
        sink: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        # Under autocast float32 tensors would be multiplied in bfloat16 here.
        with torch.autocast(q.device.type, enabled=False):
            result = call.forward(q, k, v, softmax_scale, sink)
        ctx.call, ctx.softmax_scale, ctx.probabilities = call, softmax_scale, result.probabilities
        ctx.save_for_backward(q, k, v, sink, result.out, result.lse)
        ctx.mark_non_differentiable(result.lse)
        ctx.set_materialize_grads(False)
        return result.out, result.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dout, _ = grads
        if dout is None:  # nothing depends on out, on no rank
            return None, None, None, None, None, None
        q, k, v, sink, out, lse = ctx.saved_tensors
        result = ForwardResult(out, lse, ctx.probabilities)
        dsink = None
        with torch.autocast(q.device.type, enabled=False):
            gradients = ctx.call.backward(dout, q, k, v, result, ctx.softmax_scale)
            if sink is not None and ctx.needs_input_grad[5]:
                dsink = sink_gradient(sink, dout, out, lse, ctx.call.elementwise)
        return *gradients, None, None, dsink
