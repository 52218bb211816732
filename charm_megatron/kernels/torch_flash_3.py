"""FlashAttention 3 behind torch's own operators, on Hopper GPUs.

torch 2.14 can put the package flash-attn 3 (module `flash_attn_interface`) behind `_flash_attention_forward` and
`_backward`, for the whole process: `torch.nn.attention.activate_flash_attention_impl("FA3")`. Deterministic mode
reaches it, and multiprocessors that torch's SM carveout leaves out are left to NCCL: torch/nn/attention/_fa3.py passes
the carveout on as `sm_margin`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from charm_megatron.kernels.base import BlockSizes
from charm_megatron.kernels.flash import Window, flash_3_obstacle, flash_3_widths
from charm_megatron.kernels.packages import broken, import_problem
from charm_megatron.kernels.torch_flash import TorchCudaKernel

TITLE = "flash-attn 3"


class TorchFlash3Kernel(TorchCudaKernel):
    """As `TorchCudaKernel`, by FlashAttention 3: who asks for obstacles and finds none has put it behind torch.

    `sm_margin` multiprocessors are left to NCCL; 0 leaves torch's SM carveout as it is.
    """

    name = "torch_fa3"

    def __init__(self, sm_margin: int = 0) -> None:
        self.sm_margin = sm_margin

    def leaving(self, sm_margin: int) -> "TorchFlash3Kernel":
        """The kernel that leaves so many multiprocessors to NCCL."""
        return TorchFlash3Kernel(sm_margin)

    def obstacle(self, sizes: BlockSizes) -> str | None:
        if sizes.sm_margin and not hasattr(torch._C, "_set_sm_carveout_experimental"):
            return f"torch {torch.__version__} has no SM carveout, by which it would leave multiprocessors to NCCL"
        return flash_3_obstacle(sizes) or super().obstacle(sizes) or _why_not()

    def merit(self, sizes: BlockSizes) -> str:
        return "FlashAttention 3 is there for this Hopper GPU"

    def widths(self, head_dim: int, head_dim_v: int) -> tuple[int, int]:
        return flash_3_widths(head_dim, head_dim_v)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float, window: Window | None
    ) -> tuple[Tensor, Tensor]:
        with _carveout(self.sm_margin):
            return super().attend(q, k, v, causal=causal, softmax_scale=softmax_scale, window=window)

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
        with _carveout(self.sm_margin):
            return super().gradients(
                dout, q, k, v, out, lse, causal=causal, softmax_scale=softmax_scale, window=window
            )


@contextmanager
def _carveout(sm_margin: int) -> Iterator[None]:
    """Sets torch's SM carveout, which matrix products heed too, for what is launched inside."""
    if not sm_margin:
        yield
        return
    before = torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(sm_margin)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(before)


@cache
def _why_not() -> str | None:
    """Why FlashAttention 3 cannot be used in this process; None where it can, and then it is."""
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        return f"torch {torch.__version__} cannot take FlashAttention 3 up"
    problem = import_problem(TITLE, "flash_attn_interface")
    if problem is not None:
        return problem
    try:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    except Exception as error:
        return broken(TITLE, error)
    return None
