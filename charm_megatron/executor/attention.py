"""Context-parallel attention as one autograd function: the phases of either direction, one after the other."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from charm_megatron.cost.wire import WireFormat
from charm_megatron.executor.blocks import BlockContext, BlockKey, softmax_rows
from charm_megatron.executor.buffers import BufferPool
from charm_megatron.executor.run import ProgramRun, RankPlan
from charm_megatron.executor.store import PieceStore
from charm_megatron.executor.transport import Transport
from charm_megatron.kernels import BlockKernel, accumulate_dtype


@dataclass(frozen=True)
class AttentionCall:
    """Everything a call needs beside its tensors.

    Shapes: s tokens of this rank, b batch, h query heads, h_k KV heads, d and d_v head widths.
    """

    rank: int
    forward_plans: tuple[RankPlan, ...]
    backward_plans: tuple[RankPlan, ...]
    wire: WireFormat
    kernel: BlockKernel
    transport: Transport
    pool: BufferPool
    softmax_scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> "ForwardResult":
        """q [s, b, h, d], k [s, b, h_k, d], v [s, b, h_k, d_v] -> out [s, b, h, d_v] in q's dtype, lse [s, b, h]."""
        return run_phases(self.forward_phases(q, k, v))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: "ForwardResult"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dout [s, b, h, d_v] -> dq, dk, dv, shaped and typed like q, k, v."""
        return run_phases(self.backward_phases(dout, q, k, v, result))

    def forward_phases(self, q: Tensor, k: Tensor, v: Tensor) -> "Phases[ForwardResult]":
        """The runs of the forward pass; whoever takes them runs each to its end before taking the next."""
        if self.forward_plans[0].pass_.name == "logits":
            return (yield from self._forward_in_two_rounds(q, k, v))
        (plan,) = self.forward_plans
        store, context = self._store(), self._context()
        store.pack_local("q", (q,))
        store.pack_local("kv", (k, v))
        store.alloc_result("o")
        yield ProgramRun(plan, store, context, self.transport)
        out, lse = store.home_result("o")
        return ForwardResult(out.to(q.dtype), lse[..., 0], {})

    def backward_phases(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: "ForwardResult"
    ) -> "Phases[tuple[Tensor, Tensor, Tensor]]":
        """The runs of the backward pass, as `forward_phases`."""
        wide = accumulate_dtype(q.dtype)
        delta = (dout.to(wide) * result.out.to(wide)).sum(-1)  # [s, b, h]
        if self.backward_plans[0].pass_.name == "values_backward":
            return (yield from self._backward_in_two_rounds(dout, q, k, v, delta, result.probabilities))
        (plan,) = self.backward_plans
        store = self._store()
        store.pack_local("g", (q, dout), (result.lse, delta))
        store.pack_local("kv", (k, v))
        store.alloc_result("dq")
        store.alloc_result("dkv")
        yield ProgramRun(plan, store, self._context(), self.transport)
        dq, _ = store.home_result("dq")
        dkv, _ = store.home_result("dkv")
        dk, dv = torch.split(dkv, [k.shape[-1], v.shape[-1]], dim=-1)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _forward_in_two_rounds(self, q: Tensor, k: Tensor, v: Tensor) -> "Phases[ForwardResult]":
        """Ring self-attention: logits of whole rows, softmax, values."""
        logits_plan, values_plan = self.forward_plans
        store, context = self._store(), self._context()
        store.pack_local("q", (q,))
        store.pack_local("k", (k,))
        yield ProgramRun(logits_plan, store, context, self.transport)
        by_row = softmax_rows(context)
        store = self._store()
        store.bind_local("p", q)
        store.pack_local("v", (v,))
        store.alloc_result("o")
        yield ProgramRun(values_plan, store, context, self.transport)
        out, _ = store.home_result("o")
        # [b, h_k, g, s] -> [s, b, h]
        rows = [by_row[chunk, 0].permute(3, 0, 1, 2).flatten(2, 3) for chunk in store.chunks]
        return ForwardResult(out.to(q.dtype), torch.cat(rows), context.logits)

    def _backward_in_two_rounds(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        delta: Tensor,
        probabilities: dict[BlockKey, Tensor],
    ) -> "Phases[tuple[Tensor, Tensor, Tensor]]":
        values_plan, logits_plan = self.backward_plans
        context = self._context(dict(probabilities))
        store = self._store()
        store.bind_local("dp", dout, delta)
        store.pack_local("v", (v,))
        store.alloc_result("dv")
        yield ProgramRun(values_plan, store, context, self.transport)
        dv, _ = store.home_result("dv")
        store = self._store()
        store.bind_local("ds", q)
        store.pack_local("k", (k,))
        store.alloc_result("dq")
        store.alloc_result("dk")
        yield ProgramRun(logits_plan, store, context, self.transport)
        dq, _ = store.home_result("dq")
        dk, _ = store.home_result("dk")
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _context(self, logits: dict[BlockKey, Tensor] | None = None) -> BlockContext:
        return BlockContext(self.kernel, self.softmax_scale, self.wire.workload.head_dim, logits or {})

    def _store(self) -> PieceStore:
        return PieceStore(self.wire, self.rank, self.pool)


@dataclass(frozen=True)
class ForwardResult:
    """out [s, b, h, d_v], lse [s, b, h], and the probabilities that ring self-attention keeps."""

    out: Tensor
    lse: Tensor
    probabilities: dict[BlockKey, Tensor]


type Phases[Result] = Generator[ProgramRun, None, Result]


def run_phases[Result](phases: Phases[Result]) -> Result:
    """Runs all phases of one rank, one after the other, and gives their result."""
    while True:
        try:
            run = next(phases)
        except StopIteration as end:
            result: Result = end.value
            return result
        run.run()


class ContextParallelAttention(torch.autograd.Function):
    """`apply(q, k, v, call)` -> (out, lse); lse carries no gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        result = call.forward(q, k, v)
        ctx.call, ctx.probabilities = call, result.probabilities
        ctx.save_for_backward(q, k, v, result.out, result.lse)
        ctx.mark_non_differentiable(result.lse)
        return result.out, result.lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        dout, _ = grads
        q, k, v, out, lse = ctx.saved_tensors
        return *ctx.call.backward(dout, q, k, v, ForwardResult(out, lse, ctx.probabilities)), None
