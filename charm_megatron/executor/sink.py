"""A sink of the softmax: one logit more in every row of a head, whose value is zero.

It enters once, when a rank has the whole out and lse of its rows: no block, message or schedule knows of it. The
backward pass then has nothing to add, since all its probabilities are exp(logit - lse) with the lse of all logits.
gpt-oss has one per head that is learned; of "off-by-one" softmax (Miller, 2023) it is 0.
"""

import torch
from torch import Tensor

from charm_megatron.errors import WorkloadError
from charm_megatron.kernels.elementwise import Elementwise


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Out [s, b, h, d_v] and lse [s, b, h] with the logits `sink` [h] among all others, in the dtypes of both."""
    logits = sink.to(lse.dtype)
    total = torch.logaddexp(lse, logits)
    share = (lse - total).exp().masked_fill(lse == -torch.inf, 0)  # of a row without a finite logit
    return out * share.unsqueeze(-1).to(out.dtype), total


def sink_gradient(sink: Tensor, dout: Tensor, out: Tensor, lse: Tensor, elementwise: Elementwise) -> Tensor:
    """What these rows add to the gradient of `sink` [h], in its dtype; out and lse are those with the sink."""
    delta = torch.empty_like(lse)
    elementwise.row_dot(dout, out, delta)
    share = (sink.to(lse.dtype) - lse).exp().masked_fill(lse == -torch.inf, 0)
    return -(share * delta).sum(dim=(0, 1)).to(sink.dtype)


def require_sink(sink: Tensor, q: Tensor) -> None:
    """Raises `WorkloadError` for a tensor that is no sink of the heads of q [s, b, h, d]."""
    if not isinstance(sink, Tensor) or not sink.is_floating_point():
        kind = sink.dtype if isinstance(sink, Tensor) else type(sink).__name__
        raise WorkloadError(
            f"a sink is a tensor of floating point, but is {kind}; zeros are off-by-one softmax"
        )
    if sink.shape != q.shape[2:3]:
        raise WorkloadError(
            f"a sink has one logit for each of {q.shape[2]} query heads, but has shape {list(sink.shape)}"
        )
    if sink.device != q.device:
        raise WorkloadError(
            f"a sink is where q is, on {q.device}, but is on {sink.device}; sink.to(q.device) would work"
        )
