"""Block attention as the formulas say it, in plain torch: the judge of the other backends.

It runs on any device and dtype, computes in float32 (float64 for float64 inputs), and holds the whole
`[b, h, s_q, s_k]` matrix of logits. Legend of shapes in `base`; `g` = h // h_k here.
"""

import math

import torch
from torch import Tensor

from charm_megatron.kernels.base import BlockSizes, accumulate_dtype, check_block, check_rows, hidden_elements
from charm_megatron.workload import Band


class ReferenceKernel:
    """Attention over one block with the logits written out; gradients come in float32 or float64."""

    name = "reference"

    def runs_on(self, device_type: str) -> bool:
        return True

    def obstacle(self, sizes: BlockSizes) -> str | None:
        return None

    def merit(self, sizes: BlockSizes) -> str:
        return f"no other kernel takes such tensors on {sizes.device_type}"

    def grad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return accumulate_dtype(dtype)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        softmax_scale: float,
        band: Band | None = None,
    ) -> tuple[Tensor, Tensor]:
        check_block(q, k, v, causal, band)
        out, lse = _softmax_of(masked_logits(q, k, causal, softmax_scale, band), v)
        return out.to(q.dtype), lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        softmax_scale: float,
        band: Band | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        check_block(q, k, v, causal, band)
        check_rows(q, v, dout, out, lse)
        num_kv_heads = k.shape[2]
        logits = masked_logits(q, k, causal, softmax_scale, band)
        probabilities = torch.exp(logits - _finite(_per_logit_row(lse, num_kv_heads)))
        grouped_dout = _grouped(dout, num_kv_heads)
        delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        dv = torch.einsum("bkgqs,qbkgd->sbkd", probabilities, grouped_dout)
        dprobabilities = torch.einsum("qbkgd,sbkd->bkgqs", grouped_dout, v.to(grouped_dout.dtype))
        dlogits = probabilities * (dprobabilities - _per_logit_row(delta, num_kv_heads)) * softmax_scale
        dq = torch.einsum("bkgqs,sbkd->qbkgd", dlogits, k.to(dlogits.dtype))
        dk = torch.einsum("bkgqs,qbkgd->sbkd", dlogits, _grouped(q, num_kv_heads))
        return dq.flatten(2, 3), dk, dv


def attention_of_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    *,
    causal: bool,
    softmax_scale: float,
    band: Band | None = None,
) -> tuple[Tensor, Tensor]:
    """As `ReferenceKernel.forward`, for some `rows` of the block only: int64 [r]. Shapes as there, r for s_q."""
    logits = masked_logits(q[rows], k, False, softmax_scale)
    if causal:
        band = Band(0, q.shape[0] - 1)
    if band is not None:
        logits.masked_fill_(hidden_elements(q.shape[0], k.shape[0], band, q.device)[rows], -math.inf)
    out, lse = _softmax_of(logits, v)
    return out.to(q.dtype), lse


def _softmax_of(logits: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [b, h_k, g, s_q, s_k] -> out [s_q, b, h, d_v], lse [s_q, b, h]; a row without a finite logit: 0, -inf."""
    lse = torch.logsumexp(logits, dim=-1, keepdim=True)  # [b, h_k, g, s_q, 1]
    probabilities = torch.exp(logits - _finite(lse))
    out = torch.einsum("bkgqs,sbkd->qbkgd", probabilities, v.to(logits.dtype))
    return out.flatten(2, 3), lse.squeeze(-1).permute(3, 0, 1, 2).flatten(2, 3)


def _finite(lse: Tensor) -> Tensor:
    """With 0 in place of -inf: then a row of -inf has probabilities of 0, and not of NaN."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def _grouped(x: Tensor, num_kv_heads: int) -> Tensor:
    """[s, b, h, d], any dtype -> [s, b, h_k, g, d], float32 or float64."""
    s, b, _, d = x.shape
    return x.to(accumulate_dtype(x.dtype)).reshape(s, b, num_kv_heads, -1, d)


def _per_logit_row(x: Tensor, num_kv_heads: int) -> Tensor:
    """Lays lse or delta [s_q, b, h] out as [b, h_k, g, s_q, 1], to broadcast over the keys of a row."""
    s_q, b, _ = x.shape
    return x.reshape(s_q, b, num_kv_heads, -1).permute(1, 2, 3, 0).unsqueeze(-1)


def masked_logits(
    q: Tensor, k: Tensor, causal: bool, softmax_scale: float, band: Band | None = None
) -> Tensor:
    """Scaled logits [b, h_k, g, s_q, s_k], float32 or float64; -inf above the diagonal or outside the band."""
    queries = _grouped(q, k.shape[2])
    logits = torch.einsum("qbkgd,sbkd->bkgqs", queries, k.to(queries.dtype)) * softmax_scale
    if causal:
        band = Band(0, q.shape[0] - 1)
    if band is None:
        return logits
    return logits.masked_fill(hidden_elements(q.shape[0], k.shape[0], band, q.device), -math.inf)
