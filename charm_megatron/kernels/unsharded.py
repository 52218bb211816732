"""Attention of a whole sequence on one process: in float64, which judges every distributed result, and by torch."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from charm_megatron.kernels import TorchCpuKernel
from charm_megatron.workload import Mask, Workload

Shard = tuple[Tensor, Tensor, Tensor, Tensor]
"""q, k, v, dout of one rank, [s, b, h, d]."""

TENSORS = ("out", "lse", "dq", "dk", "dv")
RESULTS = ("out", "dq", "dk", "dv")


def unsharded_attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask) -> dict[str, Tensor]:
    """q [s, b, h, d], k [s, b, h_k, d], v [s, b, h_k, d_v], dout [s, b, h, d_v] -> `TENSORS` in float64.

    lse is [s, b, h], the others are shaped as what they belong to. One KV head at a time, to need less memory.
    """
    group, seen = q.shape[2] // k.shape[2], visible(mask, q.shape[0])
    parts: dict[str, list[Tensor]] = {name: [] for name in TENSORS}
    for head in range(k.shape[2]):
        of_head = slice(head * group, (head + 1) * group)
        q_h, k_h, v_h = (
            x.double().detach().requires_grad_() for x in (q[:, :, of_head], k[:, :, head], v[:, :, head])
        )
        logits = torch.einsum("sbgd,tbd->bgst", q_h, k_h) * q.shape[3] ** -0.5
        logits = logits.masked_fill(~seen, -torch.inf)
        out = torch.einsum("bgst,tbd->sbgd", logits.softmax(-1), v_h)
        out.backward(dout[:, :, of_head].double())  # type: ignore[no-untyped-call]
        lse = logits.detach().logsumexp(-1).permute(2, 0, 1)
        grads = (q_h.grad, k_h.grad.unsqueeze(2), v_h.grad.unsqueeze(2))  # type: ignore[union-attr]
        for name, part in zip(TENSORS, (out.detach(), lse, *grads), strict=True):
            assert part is not None
            parts[name].append(part)
    return {name: torch.cat(heads, dim=2) for name, heads in parts.items()}


def visible(mask: Mask, seq_len: int) -> Tensor:
    """Which key each query sees, bool [seq_len, seq_len]."""
    position = torch.arange(seq_len)
    return visible_keys(mask, position, position)


def visible_keys(mask: Mask, queries: Tensor, keys: Tensor) -> Tensor:
    """Which of the keys at positions `keys` [t] the queries at positions `queries` [s] see, bool [s, t]."""
    distance = queries[:, None] - keys
    seen = torch.ones(distance.shape, dtype=torch.bool, device=queries.device)
    if mask.left is not None:
        seen &= distance <= mask.left
    if mask.right is not None:
        seen &= distance >= -mask.right
    if mask.documents:
        stops = torch.tensor(mask.documents, device=queries.device).cumsum(0)
        of_query, of_key = (torch.searchsorted(stops, x, right=True) for x in (queries, keys))
        seen &= of_query[:, None] == of_key
    return seen


def draw_shard(seed: int, tokens: int, workload: Workload) -> Shard:
    """Random q, k, v and dout of `tokens` tokens of the workload: the same for all that ask with the same seed."""
    random, dtype = torch.Generator().manual_seed(seed), getattr(torch, workload.dtype)

    def draw(num_heads: int, width: int) -> Tensor:
        return torch.randn(tokens, workload.batch, num_heads, width, generator=random).to(dtype)

    return (
        draw(workload.num_heads, workload.head_dim),
        draw(workload.num_kv_heads, workload.head_dim),
        draw(workload.num_kv_heads, workload.head_dim_v),
        draw(workload.num_heads, workload.head_dim_v),
    )


def assembled(shards: Sequence[Tensor], tokens_by_rank: Sequence[Sequence[int]]) -> Tensor:
    """What the ranks hold, [s, ..] each, in the order of the sequence."""
    order = torch.cat([torch.tensor(tokens) for tokens in tokens_by_rank])
    return torch.cat(list(shards))[order.argsort()]


def relative_error(value: Tensor, reference: Tensor, whole: Tensor | None = None) -> float:
    """Largest difference over the largest entry of the reference, or of `whole`, of which it is a part.

    Infinite where there is anything that is not a number, which maxima would lose.
    """
    largest = (reference if whole is None else whole).abs().max()
    error = float((value.double() - reference).abs().max() / largest)
    return math.inf if math.isnan(error) else error


def flash_attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask) -> dict[str, Tensor]:
    """As `unsharded_attention`, for causal or no mask, by torch's operator in the dtype of q."""
    kernel, causal, scale = TorchCpuKernel(), mask.is_causal, q.shape[3] ** -0.5
    out, lse = kernel.forward(q, k, v, causal=causal, softmax_scale=scale)
    grads = kernel.backward(dout, q, k, v, out, lse, causal=causal, softmax_scale=scale)
    return {name: x.double() for name, x in zip(TENSORS, (out, lse, *grads), strict=True)}
