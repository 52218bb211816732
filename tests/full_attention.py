"""The judge of every distributed result: fp64 attention on one process."""

import torch
from torch import Tensor


def full_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """q [s, b, h, d], k [s, b, h_k, d], v [s, b, h_k, d_v] -> out [s, b, h, d_v], lse [s, b, h]."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    logits = torch.einsum("sbhd,tbhd->bhst", q, k) * q.shape[-1] ** -0.5
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhst,tbhd->sbhd", logits.softmax(-1), v), logits.logsumexp(-1).permute(2, 0, 1)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Largest difference over the largest entry of the reference."""
    value, reference = value.detach(), reference.detach()
    return float((value - reference).abs().max() / reference.abs().max())
