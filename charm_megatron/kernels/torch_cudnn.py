"""Block attention through cuDNN, behind torch's `_scaled_dot_product_cudnn_attention`.

Its limits are those of `can_use_cudnn_attention` in ATen/native/transformers/cuda/sdp_utils.cpp, save that widths are
padded to multiples of 8 and that heads of 256 are left out, which depend on how torch was built. The argument lists
are those of torch 2.11 to 2.14.
"""

import torch
from torch import Tensor

from charm_megatron.kernels.base import BlockSizes, check_block, check_rows
from charm_megatron.kernels.flash import (
    AMPERE,
    CUDA_DTYPES,
    aligned,
    dtype_obstacle,
    merit_of,
    rounded_width,
    widened,
)
from charm_megatron.kernels.reference import ReferenceKernel
from charm_megatron.workload import Band

MAX_HEAD_DIM = 128
WIDER = (192, 128)
"""The widths of q and k, and of v, that it takes beyond that, on compute capabilities 9 and 10."""
CAPABILITIES_FOR_WIDER = (9, 10)
VERSION_FOR_WIDER = 91100
LEAST_VERSION = 90000


class TorchCudnnKernel:
    """cuDNN's attention: float16 and bfloat16, heads up to 128 wide (q and k 192 with v 128 on newer GPUs), no bands.

    The operators take [b, h, s, d] by strides, so permuted views go in uncopied where their rows are aligned. They want
    two keys at least: a block of one key is computed as the formulas say. Their order of additions varies from run to
    run, so deterministic mode refuses them.
    """

    name = "torch_cudnn"
    title = "cuDNN's attention"

    def runs_on(self, device_type: str) -> bool:
        return device_type == "cuda"

    def obstacle(self, sizes: BlockSizes) -> str | None:
        version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        if version is None or version < LEAST_VERSION:
            return f"it needs a torch with cuDNN 9, not {'one without cuDNN' if version is None else version}"
        if sizes.capability < AMPERE:
            return f"{self.title} needs a GPU of compute capability {AMPERE} or more, not {sizes.capability}"
        if torch.are_deterministic_algorithms_enabled():
            return f"{self.title} adds up in an order of its own, and algorithms are to be deterministic"
        if sizes.has_bands:
            return f"{self.title} has no windows, which window masks and striped causal shards need"
        widths = self.widths(sizes.head_dim, sizes.head_dim_v)
        wider = (
            widths == WIDER and sizes.capability in CAPABILITIES_FOR_WIDER and version >= VERSION_FOR_WIDER
        )
        if max(widths) > MAX_HEAD_DIM and not wider:
            return f"{self.title} takes heads up to {MAX_HEAD_DIM} wide, not {max(widths)}"
        return dtype_obstacle(self.title, sizes, CUDA_DTYPES)

    def merit(self, sizes: BlockSizes) -> str:
        return merit_of("cuDNN's attention", sizes, self.widths(sizes.head_dim, sizes.head_dim_v))

    def widths(self, head_dim: int, head_dim_v: int) -> tuple[int, int]:
        """To which q and k, and v, are padded."""
        return rounded_width(head_dim), rounded_width(head_dim_v)

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
        assert band is None, f"cuDNN's attention has no windows, such as {band}"
        if k.shape[0] == 1:
            return ReferenceKernel().forward(q, k, v, causal=causal, softmax_scale=softmax_scale)
        out: Tensor
        lse: Tensor
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(_heads_before_rows(x) for x in (q, k, v)),
            None,  # attn_bias
            True,  # compute_log_sumexp
            0.0,  # dropout
            causal,
            False,  # return_debug_mask
            scale=softmax_scale,
        )
        # [b, h, s, d] -> [s, b, h, d]; [b, h, s, 1] -> [s, b, h]
        out, lse = out.permute(2, 0, 1, 3)[..., : v.shape[3]], lse.squeeze(3).permute(2, 0, 1)
        empty = lse.isinf()  # rows without a finite logit, whatever it says of them
        return out.masked_fill(empty.unsqueeze(3), 0), lse.masked_fill(empty, -torch.inf)

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
        assert band is None, f"cuDNN's attention has no windows, such as {band}"
        if k.shape[0] == 1:
            gradients = ReferenceKernel().backward(
                dout, q, k, v, out, lse, causal=causal, softmax_scale=softmax_scale
            )
            dq, dk, dv = (x.to(q.dtype) for x in gradients)
            return dq, dk, dv
        # The state of dropout's random numbers: must be tensors, are not read without dropout.
        unread = torch.empty((), dtype=torch.int64, device=q.device)
        gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(_heads_before_rows(x) for x in (dout, q, k, v, out)),
            lse.permute(1, 2, 0).unsqueeze(3).contiguous(),  # [s, b, h] -> [b, h, s, 1]
            unread,
            unread,
            None,  # attn_bias
            None,  # cum_seq_q, cum_seq_k: absent: all sequences of the batch are equally long
            None,
            q.shape[0],
            k.shape[0],
            0.0,  # dropout
            causal,
            scale=softmax_scale,
        )
        dq, dk, dv = (x.permute(2, 0, 1, 3) for x in gradients)  # [b, h, s, d] -> [s, b, h, d]
        return dq[..., : q.shape[3]], dk[..., : k.shape[3]], dv[..., : v.shape[3]]


def _heads_before_rows(x: Tensor) -> Tensor:
    return aligned(widened(x, rounded_width(x.shape[3]))).permute(1, 2, 0, 3)  # [s, b, h, d] -> [b, h, s, d]
