"""Context-parallel attention as one autograd function: two programs, one for each direction."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from charm_megatron.executor.parcels import BufferPool
from charm_megatron.executor.run import ProgramRun, RankPlan
from charm_megatron.executor.transport import Transport
from charm_megatron.kernels import BlockKernel, accumulate_dtype


@dataclass(frozen=True)
class AttentionCall:
    """Everything a call needs beside its tensors.

    Shapes: s tokens of this rank, b batch, h query heads, h_k KV heads, d and d_v head widths.
    """

    forward_plan: RankPlan
    backward_plan: RankPlan
    kernel: BlockKernel
    transport: Transport
    pool: BufferPool
    softmax_scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Q [s, b, h, d], k [s, b, h_k, d], v [s, b, h_k, d_v] -> out [s, b, h, d_v] in q's dtype, lse [s, b, h]."""
        run = self._run(self.forward_plan)
        run.take_home("q", (q,))
        run.take_home("kv", (k, v))
        run.expect_home("o")
        run.run()
        out, lse = run.home_result("o")
        return out.to(q.dtype), lse[..., 0]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Dout and out [s, b, h, d_v], lse [s, b, h] -> dq, dk, dv, shaped and typed like q, k, v."""
        wide = accumulate_dtype(q.dtype)
        delta = (dout.to(wide) * out.to(wide)).sum(-1)  # [s, b, h]
        run = self._run(self.backward_plan)
        run.take_home("g", (q, dout), (lse, delta))
        run.take_home("kv", (k, v))
        run.expect_home("dq")
        run.expect_home("dkv")
        run.run()
        dq, _ = run.home_result("dq")
        dkv, _ = run.home_result("dkv")
        dk, dv = torch.split(dkv, [k.shape[-1], v.shape[-1]], dim=-1)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _run(self, plan: RankPlan) -> ProgramRun:
        return ProgramRun(plan, self.kernel, self.transport, self.pool, self.softmax_scale)


class ContextParallelAttention(torch.autograd.Function):
    """`apply(q, k, v, call)` -> (out, lse); lse carries no gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        out, lse = call.forward(q, k, v)
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        dout, _ = grads
        return *ctx.call.backward(dout, *ctx.saved_tensors), None
