"""The one signature of block attention, and what every backend must keep to.

A block is some queries against some keys and values, with its own softmax. Its `out` and `lse` merge
with those of other blocks over the same queries into exact attention; its backward takes the merged
(global) `out` and `lse` and gives exact partial gradients, which add up over blocks.

Legend of shapes: `s_q`, `s_k` rows of the block; `b` batch; `h` query heads, `h_k` KV heads; `d` width
of q and k, `d_v` width of v and out. Query head `j` reads KV head `j // (h // h_k)`.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from charm_megatron.workload import Band


class BlockKernel(Protocol):
    """Attention over one block, forward and backward, with no state and no autograd of its own.

    | tensor | shape | dtype |
    |---|---|---|
    | q, dq | [s_q, b, h, d] | model |
    | k, dk | [s_k, b, h_k, d] | model |
    | v, dv | [s_k, b, h_k, d_v] | model |
    | out, dout | [s_q, b, h, d_v] | model |
    | lse | [s_q, b, h] | float32, or float64 where the model is float64 |

    Gradients have `grad_dtype` in place of the model's dtype. Inputs may be views with any strides, as
    long as their last dimension is contiguous: queries packed beside other values, or keys and values
    interleaved token by token. Results may be such views too, in whatever order the backend writes.

    `causal` masks what lies above the diagonal and needs `s_q == s_k`: backends align the diagonal of
    an oblong block differently, and an aligned schedule has none. `band` instead keeps the elements (a, b)
    with lo <= a - b <= hi of a block of any shape, in which every row and every column has some: callers
    trim it (`Band.trimmed`). A row may still have no finite logit, where keys or products overflow: then `out` is 0
    and `lse` -inf, whatever the backend says of it. NaN in a row of any input shows in its results.
    """

    name: str

    def grad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of dq, dk and dv for inputs of `dtype`."""
        ...

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
        """Returns `out` and `lse`, the natural logarithm of the sum of exp(softmax_scale * q.k)."""
        ...

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
        """Returns dq, dk and dv, the last two summed over the query heads that share a KV head.

        `out` and `lse` belong to all blocks of these queries together. Of `out` only rowsum(dout * out), delta, counts:
        another tensor with these row sums may stand in for it.
        """
        ...


class BlockSizes(NamedTuple):
    """What a kernel is chosen by: the same on all ranks of a group."""

    device_type: str
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    capability: int = 0
    """The major compute capability of a CUDA device; 0 where it is not known."""
    multiprocessors: int = 0
    """Of a CUDA device; 0 where it is not known."""
    sm_margin: int = 0
    """Multiprocessors that attention leaves to NCCL's kernels."""
    has_bands: bool = True
    """Whether any block is a band."""

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype, head_dim: int, head_dim_v: int) -> "BlockSizes":
        """Of tensors on this device."""
        if device.type != "cuda":
            return cls(device.type, dtype, head_dim, head_dim_v)
        card = torch.cuda.get_device_properties(device)
        return cls(device.type, dtype, head_dim, head_dim_v, card.major, card.multi_processor_count)


class SelectableKernel(BlockKernel, Protocol):
    """A kernel that says which tensors it takes. `name` is what the setting `kernel` calls it."""

    def runs_on(self, device_type: str) -> bool:
        """Whether it runs on devices of this type at all."""
        ...

    def obstacle(self, sizes: BlockSizes) -> str | None:
        """Why it cannot take such tensors of a device that it runs on, a clause; None where it can."""
        ...

    def merit(self, sizes: BlockSizes) -> str:
        """Why it is the one to take, a clause that follows "because"."""
        ...


@runtime_checkable
class LeavesMultiprocessors(Protocol):
    """A kernel that can leave multiprocessors of a GPU to NCCL's kernels."""

    def leaving(self, sm_margin: int) -> BlockKernel:
        """The kernel that leaves so many."""
        ...


def dtype_name(dtype: torch.dtype) -> str:
    """As in "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of lse, delta and accumulators for tensors of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_block(q: Tensor, k: Tensor, v: Tensor, causal: bool, band: Band | None = None) -> None:
    """Asserts what `BlockKernel` asks of its inputs; every backend calls it first."""
    assert q.dim() == k.dim() == v.dim() == 4, (q.shape, k.shape, v.shape)
    assert q.dtype == k.dtype == v.dtype, (q.dtype, k.dtype, v.dtype)
    assert q.shape[1::2] == k.shape[1::2], (q.shape, k.shape)  # b and d
    assert k.shape[:3] == v.shape[:3], (k.shape, v.shape)
    assert q.shape[2] % k.shape[2] == 0, f"{q.shape[2]} query heads over {k.shape[2]} KV heads"
    assert min(q.shape[0], k.shape[0]) > 0, "an empty block"
    assert not causal or q.shape[0] == k.shape[0], f"causal block of {q.shape[0]} x {k.shape[0]} rows"
    if band is not None:
        assert not causal, "a block is causal or a band, not both"
        whole = (slice(0, q.shape[0]), slice(0, k.shape[0]))
        assert band.trimmed(q.shape[0], k.shape[0])[:2] == whole, f"band {band} leaves empty rows or columns"
    for tensor in (q, k, v):
        assert tensor.stride(3) == 1 or tensor.shape[3] == 1, f"last dimension strided: {tensor.stride()}"


def hidden_elements(num_rows: int, num_columns: int, band: Band, device: torch.device) -> Tensor:
    """Which elements of a block `band` masks, bool [num_rows, num_columns]."""
    rows = torch.arange(num_rows, device=device).unsqueeze(1)
    distance = rows - torch.arange(num_columns, device=device)
    return (distance < band.lo) | (distance > band.hi)


def check_rows(q: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor) -> None:
    """Asserts that what a backward gets beside the block has the block's query rows."""
    assert dout.shape == out.shape == (*q.shape[:3], v.shape[3]), (dout.shape, out.shape, q.shape, v.shape)
    assert dout.dtype == out.dtype == q.dtype, (dout.dtype, out.dtype, q.dtype)
    assert lse.shape == q.shape[:3], (lse.shape, q.shape)
    assert lse.dtype == accumulate_dtype(q.dtype), lse.dtype
