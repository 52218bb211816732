"""The judge of every distributed result: fp64 attention on one process."""

import torch
from torch import Tensor

from charm_megatron.workload import Mask


def full_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """q [s, b, h, d], k [s, b, h_k, d], v [s, b, h_k, d_v] -> out [s, b, h, d_v], lse [s, b, h]."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    logits = torch.einsum("sbhd,tbhd->bhst", q, k) * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~visible(mask, q.shape[0]), -torch.inf)
    return torch.einsum("bhst,tbhd->sbhd", logits.softmax(-1), v), logits.logsumexp(-1).permute(2, 0, 1)


def visible(mask: Mask, seq_len: int) -> Tensor:
    """Which key each query sees, bool [seq_len, seq_len]."""
    position = torch.arange(seq_len)
    distance = position[:, None] - position
    seen = torch.ones(seq_len, seq_len, dtype=torch.bool)
    if mask.left is not None:
        seen &= distance <= mask.left
    if mask.right is not None:
        seen &= distance >= -mask.right
    if mask.documents:
        document = torch.repeat_interleave(torch.tensor(mask.documents))
        seen &= document[:, None] == document
    return seen


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Largest difference over the largest entry of the reference."""
    value, reference = value.detach(), reference.detach()
    return float((value - reference).abs().max() / reference.abs().max())
