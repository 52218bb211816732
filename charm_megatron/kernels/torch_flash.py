"""Block attention through the flash attention that ships inside torch, on CPU and on CUDA.

Both pairs of operators return `lse`, share KV heads among query heads natively (the backward sums dk
and dv over a group), and want `d == d_v`: the narrower side is padded with zeros, which changes neither
logits nor lse, and the padding of the results is cut off again. Gradients come in the model's dtype.

Argument lists are those of torch 2.11 to 2.14 (`torch.ops.aten.<operator>.default._schema`); what is
said of strides and dtypes below is from ATen/native/cpu/FlashAttentionKernel.cpp and
ATen/native/transformers/cuda/{attention_backward.cu, flash_attn/flash_api.cpp}.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from charm_megatron.kernels.base import (
    BlockSizes,
    accumulate_dtype,
    check_block,
    check_rows,
    dtype_name,
    hidden_elements,
)
from charm_megatron.kernels.reference import attention_of_rows
from charm_megatron.workload import ITEMSIZE_BYTES, Band

CPU_DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in ITEMSIZE_BYTES)
CUDA_DTYPES = (torch.bfloat16, torch.float16)

# mha_fwd and mha_bwd in flash_api.cpp: "head_size must be a multiple of 8", "head dimension at most 256".
CUDA_HEAD_DIM_MULTIPLE = 8
CUDA_MAX_HEAD_DIM = 256

# flash_api.cpp: "FlashAttention only supports Ampere GPUs or newer".
AMPERE = 8
"""Major compute capability."""

# FlashAttention copies rows to shared memory 128 bits at a time, and does not check that it may.
CUDA_ALIGNMENT_BYTES = 16


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
        return _dtype_obstacle(sizes, CPU_DTYPES)

    def merit(self, sizes: BlockSizes) -> str:
        return _merit(sizes, max(sizes.head_dim, sizes.head_dim_v))

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


class TorchCudaKernel:
    """`_flash_attention_forward` and `_backward` (FlashAttention 2): float16 and bfloat16, d up to 256.

    The operators take [b, s, h, d] by strides, so transposed views go in uncopied where their rows are
    aligned, save that the backward makes `dout` and `out` contiguous. With shared KV heads the backward
    rounds the gradient of each query head before it sums a group. Its order of additions, so the last
    bits of dq, varies from run to run unless `torch.use_deterministic_algorithms(True)` is set.
    """

    name = "torch"

    def runs_on(self, device_type: str) -> bool:
        return device_type == "cuda"

    def obstacle(self, sizes: BlockSizes) -> str | None:
        width = cuda_width(sizes.head_dim, sizes.head_dim_v)
        if width > CUDA_MAX_HEAD_DIM:
            return f"torch's flash attention on cuda takes heads up to {CUDA_MAX_HEAD_DIM} wide, not {width}"
        if 0 < sizes.capability < AMPERE:
            return (
                f"torch's flash attention needs a GPU of compute capability {AMPERE}, not {sizes.capability}"
            )
        return _dtype_obstacle(sizes, CUDA_DTYPES)

    def merit(self, sizes: BlockSizes) -> str:
        return _merit(sizes, cuda_width(sizes.head_dim, sizes.head_dim_v))

    def widths(self, head_dim: int, head_dim_v: int) -> tuple[int, int]:
        """To which q and k, and v, are padded: equal, as FlashAttention 2 wants it."""
        width = cuda_width(head_dim, head_dim_v)
        return width, width

    def grad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

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
        width, width_v = self.widths(q.shape[3], v.shape[3])
        out: Tensor
        lse: Tensor
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(_batch_before_rows(aligned(widened(x, w))) for x, w in ((q, width), (k, width), (v, width_v))),
            None,  # cum_seq_q, cum_seq_k: absent: all sequences of the batch are equally long
            None,
            q.shape[0],
            k.shape[0],
            0.0,  # dropout
            causal,
            False,  # return_debug_mask
            scale=softmax_scale,
            **_window(q, k, band),
        )
        # A row without a finite logit has lse +inf here.
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)
        # [b, s, h, d] -> [s, b, h, d]; [b, h, s] -> [s, b, h]
        return out.transpose(0, 1)[..., : v.shape[3]], lse.permute(2, 0, 1)

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
        width, width_v = self.widths(q.shape[3], v.shape[3])
        # The state of dropout's random numbers: must be a tensor, is not read without dropout.
        unread = torch.empty(2, dtype=torch.uint64, device=q.device)
        gradients = torch.ops.aten._flash_attention_backward(
            _batch_before_rows(widened(dout, width_v)),
            *(_batch_before_rows(aligned(widened(x, w))) for x, w in ((q, width), (k, width), (v, width_v))),
            _batch_before_rows(widened(out, width_v)),
            lse.permute(1, 2, 0).contiguous(),  # [s, b, h] -> [b, h, s], read without strides
            None,  # cum_seq_q, cum_seq_k, as in the forward
            None,
            q.shape[0],
            k.shape[0],
            0.0,  # dropout
            causal,
            unread,
            unread,
            scale=softmax_scale,
            **_window(q, k, band),
        )
        dq, dk, dv = (x.transpose(0, 1) for x in gradients)  # [b, s, h, d] -> [s, b, h, d]
        return dq[..., : q.shape[3]], dk[..., : k.shape[3]], dv[..., : v.shape[3]]


def _additive_mask(q: Tensor, k: Tensor, band: Band | None) -> Tensor | None:
    """The band as the CPU operator takes it: 0 or -inf for each element, [s_q, s_k] in the model's dtype."""
    if band is None:
        return None
    hidden = hidden_elements(q.shape[0], k.shape[0], band, q.device)
    return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill(hidden, -torch.inf)


def _window(q: Tensor, k: Tensor, band: Band | None) -> dict[str, int]:
    """The band as FlashAttention takes it: reach to the left and right of a diagonal that ends in the last corner.

    A negative reach would mean no bound; a trimmed band has none.
    """
    if band is None:
        return {}
    apart = k.shape[0] - q.shape[0]
    return {"window_size_left": band.hi + apart, "window_size_right": -band.lo - apart}


def _dtype_obstacle(sizes: BlockSizes, dtypes: Sequence[torch.dtype]) -> str | None:
    if sizes.dtype in dtypes:
        return None
    known = ", ".join(map(dtype_name, dtypes))
    return f"torch's flash attention on {sizes.device_type} takes {known}, not {dtype_name(sizes.dtype)}"


def _merit(sizes: BlockSizes, width: int) -> str:
    padded = [
        f"{what} padded from {dim} to {width}"
        for what, dim in (("q and k", sizes.head_dim), ("v", sizes.head_dim_v))
        if dim != width
    ]
    return ", ".join([f"its flash attention on {sizes.device_type} takes these tensors", *padded])


def cuda_width(head_dim: int, head_dim_v: int) -> int:
    """The head width to which q, k and v are padded for the CUDA operators."""
    return rounded_width(max(head_dim, head_dim_v))


def rounded_width(head_dim: int) -> int:
    """The next width that the CUDA operators take."""
    return -(-head_dim // CUDA_HEAD_DIM_MULTIPLE) * CUDA_HEAD_DIM_MULTIPLE


def widened(x: Tensor, width: int) -> Tensor:
    """[s, b, h, d] -> [s, b, h, width] with zeros behind; `x` itself where it is that wide already."""
    if x.shape[3] == width:
        return x
    wider: Tensor = pad(x, (0, width - x.shape[3]))
    return wider


def aligned(x: Tensor) -> Tensor:
    """`x` itself where each of its rows starts at a multiple of 16 bytes, else a contiguous copy.

    `x` [s, b, h, d] with d a multiple of 8. Keys and values interleaved in one tensor are aligned; what
    follows an odd number of float32 values in a packed row is not.
    """
    steps = [x.stride(dim) * x.element_size() for dim in range(3) if x.shape[dim] > 1]
    if all(offset % CUDA_ALIGNMENT_BYTES == 0 for offset in (x.data_ptr(), *steps)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _heads_before_rows(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3)  # [s, b, h, d] -> [b, h, s, d]


def _batch_before_rows(x: Tensor) -> Tensor:
    return x.transpose(0, 1)  # [s, b, h, d] -> [b, s, h, d]
