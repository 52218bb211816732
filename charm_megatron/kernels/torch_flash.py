"""Block attention through the flash attention that ships inside torch, on CPU and on CUDA.

Both pairs of operators return `lse`, share KV heads among query heads natively (the backward sums dk
and dv over a group), and want `d == d_v`: the narrower side is padded with zeros, which changes neither
logits nor lse, and the padding of the results is cut off again. Gradients come in the model's dtype.

Argument lists are those of torch 2.11 to 2.14 (`torch.ops.aten.<operator>.default._schema`); what is
said of strides and dtypes below is from ATen/native/cpu/FlashAttentionKernel.cpp and
ATen/native/transformers/cuda/{attention_backward.cu, flash_attn/flash_api.cpp}.
"""

import torch
from torch import Tensor

from charm_megatron.kernels.base import (
    BlockSizes,
    accumulate_dtype,
    check_block,
    check_rows,
    hidden_elements,
)
from charm_megatron.kernels.flash import FlashKernel, Window, dtype_obstacle, merit_of, widened
from charm_megatron.kernels.reference import attention_of_rows
from charm_megatron.workload import ITEMSIZE_BYTES, Band

CPU_DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in ITEMSIZE_BYTES)


class TorchCpuKernel:
    """`_scaled_dot_product_flash_attention_for_cpu`: float64 to float16, reads strided views in place.

    The operator takes [b, h, s, d] by strides, so permuted views go in uncopied, save that its backward makes `dout`
    contiguous. It gives out 0 and lse 0 for a row whose logits are all -inf, and for a row of NaN in a short block;
    rows with an lse of 0 are rare otherwise, so these are computed again as the formulas say. Its backward is ten times
    slower in half types than in float32 where the processor has no arithmetic for them, no faster where it has, and
    adds up dk and dv in the half type: so half types go in as float32, and gradients come in float32.
    """

    name = "torch"

    def runs_on(self, device_type: str) -> bool:
        return device_type == "cpu"

    def obstacle(self, sizes: BlockSizes) -> str | None:
        return dtype_obstacle("torch's flash attention", sizes, CPU_DTYPES)

    def merit(self, sizes: BlockSizes) -> str:
        width = max(sizes.head_dim, sizes.head_dim_v)
        return merit_of("its flash attention", sizes, (width, width))

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
        width = max(q.shape[3], v.shape[3])
        out: Tensor
        lse: Tensor
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(_heads_before_rows(widened(x, width)) for x in (q, k, v)),
            0.0,
            causal,
            attn_mask=_additive_mask(q, k, band),
            scale=softmax_scale,
        )
        # [b, h, s, d] -> [s, b, h, d]; [b, h, s] -> [s, b, h]
        out, lse = out.permute(2, 0, 1, 3)[..., : v.shape[3]], lse.permute(2, 0, 1)
        doubtful = (lse == 0).flatten(1).any(1)
        if doubtful.any():
            rows = doubtful.nonzero()[:, 0]
            out[rows], lse[rows] = attention_of_rows(
                q, k, v, rows, causal=causal, softmax_scale=softmax_scale, band=band
            )
        return out, lse

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
        width = max(q.shape[3], v.shape[3])
        operands = [x.to(self.grad_dtype(q.dtype)) for x in (dout, q, k, v, out)]
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_heads_before_rows(widened(x, width)) for x in operands),
            lse.permute(1, 2, 0),  # [s, b, h] -> [b, h, s]
            0.0,
            causal,
            attn_mask=_additive_mask(q, k, band),
            scale=softmax_scale,
        )
        dq, dk, dv = (x.permute(2, 0, 1, 3) for x in gradients)  # [b, h, s, d] -> [s, b, h, d]
        return dq[..., : q.shape[3]], dk[..., : k.shape[3]], dv[..., : v.shape[3]]


class TorchCudaKernel(FlashKernel):
    """`_flash_attention_forward` and `_backward` (FlashAttention 2): float16 and bfloat16, d up to 256.

    The operators take [b, s, h, d] by strides, so transposed views go in uncopied where their rows are
    aligned, save that the backward makes `dout` and `out` contiguous. With shared KV heads the backward
    rounds the gradient of each query head before it sums a group. Its order of additions, so the last
    bits of dq, varies from run to run unless `torch.use_deterministic_algorithms(True)` is set.
    """

    name = "torch"
    title = "torch's flash attention"

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float, window: Window | None
    ) -> tuple[Tensor, Tensor]:
        out: Tensor
        lse: Tensor
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            None,  # cum_seq_q, cum_seq_k: absent: all sequences of the batch are equally long
            None,
            q.shape[1],
            k.shape[1],
            0.0,  # dropout
            causal,
            False,  # return_debug_mask
            scale=softmax_scale,
            **_reach(window),
        )
        return out, lse

    def gradients(
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
        window: Window | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The state of dropout's random numbers: must be a tensor, is not read without dropout.
        unread = torch.empty(2, dtype=torch.uint64, device=q.device)
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            None,  # cum_seq_q, cum_seq_k, as in the forward
            None,
            q.shape[1],
            k.shape[1],
            0.0,  # dropout
            causal,
            unread,
            unread,
            scale=softmax_scale,
            **_reach(window),
        )
        return gradients


def _additive_mask(q: Tensor, k: Tensor, band: Band | None) -> Tensor | None:
    """The band as the CPU operator takes it: 0 or -inf for each element, [s_q, s_k] in the model's dtype."""
    if band is None:
        return None
    hidden = hidden_elements(q.shape[0], k.shape[0], band, q.device)
    return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill(hidden, -torch.inf)


def _reach(window: Window | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window.left, "window_size_right": window.right}


def _heads_before_rows(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3)  # [s, b, h, d] -> [b, h, s, d]
