"""What all FlashAttention on CUDA has in common: its layout, its windows, the widths and alignment that it asks for.

The functions, in torch or in a package, take [b, s, h, d] by strides and return lse [b, h, s]. A block's rows are
padded with zeros to a width that they take, which changes neither logits nor lse, and the padding of the results is cut
off again. KV heads are shared among query heads natively. Gradients come in the model's dtype.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from charm_megatron.kernels.base import BlockSizes, check_block, check_rows, dtype_name
from charm_megatron.workload import Band

CUDA_DTYPES = (torch.bfloat16, torch.float16)

# mha_fwd and mha_bwd in flash_api.cpp: "head_size must be a multiple of 8", "head dimension at most 256".
CUDA_HEAD_DIM_MULTIPLE = 8
CUDA_MAX_HEAD_DIM = 256

# FlashAttention copies rows to shared memory 128 bits at a time, and does not check that it may.
CUDA_ALIGNMENT_BYTES = 16

HOPPER = 9
"""Major compute capability."""
# flash_api.cpp: "FlashAttention only supports Ampere GPUs or newer".
AMPERE = 8
"""Major compute capability."""
FLASH_3_MOST_DETERMINISTIC = 192
"""mha_bwd in hopper/flash_api.cpp: "Deterministic backward not supported for hdim 256"."""


class Window(NamedTuple):
    """A band as FlashAttention takes it: reach to the left and right of a diagonal that ends in the last corner.

    A negative reach would mean no bound; a trimmed band has none.
    """

    left: int
    right: int

    @classmethod
    def of(cls, band: Band | None, num_rows: int, num_columns: int) -> "Window | None":
        """Of a block of this size."""
        if band is None:
            return None
        apart = num_columns - num_rows
        return cls(band.hi + apart, -band.lo - apart)


class FlashKernel(ABC):
    """Turns a block into what FlashAttention takes, and back; children call one of its implementations."""

    name: str
    title: str
    """What refuses tensors, for errors."""

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float, window: Window | None
    ) -> tuple[Tensor, Tensor]:
        """q [b, s_q, h, d], k [b, s_k, h_k, d], v [b, s_k, h_k, d_v] -> out [b, s_q, h, d_v], lse [b, h, s_q]."""

    @abstractmethod
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
        """Returns dq, dk and dv, shaped as q, k and v; lse [b, h, s_q] is contiguous."""

    def runs_on(self, device_type: str) -> bool:
        return device_type == "cuda"

    def obstacle(self, sizes: BlockSizes) -> str | None:
        width = max(self.widths(sizes.head_dim, sizes.head_dim_v))
        if width > CUDA_MAX_HEAD_DIM:
            return f"{self.title} on cuda takes heads up to {CUDA_MAX_HEAD_DIM} wide, not {width}"
        if 0 < sizes.capability < AMPERE:
            return f"{self.title} needs a GPU of compute capability {AMPERE}, not {sizes.capability}"
        return dtype_obstacle(self.title, sizes, CUDA_DTYPES)

    def merit(self, sizes: BlockSizes) -> str:
        return merit_of("its flash attention", sizes, self.widths(sizes.head_dim, sizes.head_dim_v))

    def widths(self, head_dim: int, head_dim_v: int) -> tuple[int, int]:
        """To which q and k, and v, are padded: equal, as FlashAttention 2 wants it."""
        width = rounded_width(max(head_dim, head_dim_v))
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
        window = Window.of(band, q.shape[0], k.shape[0])
        out, lse = self.attend(
            *self._operands(q, k, v), causal=causal, softmax_scale=softmax_scale, window=window
        )
        # A row without a finite logit has lse +inf in FlashAttention 2.
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
        operands = self._operands(q, k, v)
        width_v = operands[2].shape[3]
        gradients = self.gradients(
            _batch_before_rows(widened(dout, width_v)),
            *operands,
            _batch_before_rows(widened(out, width_v)),
            lse.permute(1, 2, 0).contiguous(),  # [s, b, h] -> [b, h, s], read without strides
            causal=causal,
            softmax_scale=softmax_scale,
            window=Window.of(band, q.shape[0], k.shape[0]),
        )
        dq, dk, dv = (x.transpose(0, 1) for x in gradients)  # [b, s, h, d] -> [s, b, h, d]
        return dq[..., : q.shape[3]], dk[..., : k.shape[3]], dv[..., : v.shape[3]]

    def _operands(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As the functions take them, [b, s, h, d]."""
        width, width_v = self.widths(q.shape[3], v.shape[3])
        q, k, v = (aligned(widened(x, w)) for x, w in ((q, width), (k, width), (v, width_v)))
        return _batch_before_rows(q), _batch_before_rows(k), _batch_before_rows(v)


def dtype_obstacle(title: str, sizes: BlockSizes, dtypes: Sequence[torch.dtype]) -> str | None:
    """Why what is called `title` cannot take this dtype; None where it can."""
    if sizes.dtype in dtypes:
        return None
    known = ", ".join(map(dtype_name, dtypes))
    return f"{title} on {sizes.device_type} takes {known}, not {dtype_name(sizes.dtype)}"


def merit_of(what: str, sizes: BlockSizes, widths: tuple[int, int]) -> str:
    """That it takes the tensors, and what is padded for that."""
    padded = [
        f"{name} padded from {dim} to {width}"
        for name, dim, width in zip(("q and k", "v"), (sizes.head_dim, sizes.head_dim_v), widths, strict=True)
        if dim != width
    ]
    return ", ".join([f"{what} on {sizes.device_type} takes these tensors", *padded])


def rounded_width(head_dim: int) -> int:
    """The next width that the CUDA functions take."""
    return -(-head_dim // CUDA_HEAD_DIM_MULTIPLE) * CUDA_HEAD_DIM_MULTIPLE


def flash_3_widths(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """To which FlashAttention 3 wants q and k, and v, padded: equal, or these two classes of widths.

    mha_fwd in hopper/flash_api.cpp has more pairs, with v wider than q, that mha_bwd computes at the width of v anyway.
    """
    width, width_v = rounded_width(head_dim), rounded_width(head_dim_v)
    if 128 < width <= 192 and width_v <= 128:
        return width, width_v if width_v > 96 else 128
    return max(width, width_v), max(width, width_v)


def flash_3_obstacle(sizes: BlockSizes) -> str | None:
    """Why FlashAttention 3 cannot be used for these tensors, were it there; None where it can."""
    if sizes.capability != HOPPER:
        return f"FlashAttention 3 needs a GPU of compute capability {HOPPER}, not {sizes.capability}"
    width = max(flash_3_widths(sizes.head_dim, sizes.head_dim_v))
    if width > FLASH_3_MOST_DETERMINISTIC and torch.are_deterministic_algorithms_enabled():
        most = f"takes heads up to {FLASH_3_MOST_DETERMINISTIC} wide"
        return f"FlashAttention 3 {most} with deterministic algorithms, not {width}"
    return None


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


def _batch_before_rows(x: Tensor) -> Tensor:
    return x.transpose(0, 1)  # [s, b, h, d] -> [b, s, h, d]
