"""FlashAttention 3 behind torch's own operators, on Hopper GPUs.

torch 2.14 can put the package flash-attn 3 (module `flash_attn_interface`) behind `_flash_attention_forward` and
`_backward`, for the whole process: `torch.nn.attention.activate_flash_attention_impl("FA3")`. Deterministic mode
reaches it, and multiprocessors that torch's SM carveout leaves out are left to NCCL. v needs no padding to the width of
q.
"""

import importlib
from functools import cache

import torch

from charm_megatron.errors import error_text
from charm_megatron.kernels.base import BlockSizes
from charm_megatron.kernels.torch_flash import TorchCudaKernel, rounded_width

HOPPER = 9
"""Major compute capability."""
MOST_REASON_CHARACTERS = 120


class TorchFlash3Kernel(TorchCudaKernel):
    """As `TorchCudaKernel`, by FlashAttention 3: who asks for obstacles and finds none has put it behind torch."""

    name = "torch_fa3"

    def obstacle(self, sizes: BlockSizes) -> str | None:
        if sizes.capability != HOPPER:
            return f"FlashAttention 3 needs a GPU of compute capability {HOPPER}, not {sizes.capability}"
        return super().obstacle(sizes) or _why_not()

    def merit(self, sizes: BlockSizes) -> str:
        return "FlashAttention 3 is there for this Hopper GPU"

    def widths(self, head_dim: int, head_dim_v: int) -> tuple[int, int]:
        return rounded_width(head_dim), rounded_width(head_dim_v)


@cache
def _why_not() -> str | None:
    """Why FlashAttention 3 cannot be used in this process; None where it can, and then it is."""
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        return f"torch {torch.__version__} cannot take FlashAttention 3 up"
    try:
        importlib.import_module("flash_attn_interface")
    except ImportError as error:
        if error.name == "flash_attn_interface":
            return "flash-attn 3 is not installed"
        return _broken(error)
    except Exception as error:  # a package that was built for another torch may raise anything
        return _broken(error)
    try:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    except Exception as error:
        return _broken(error)
    return None


def _broken(error: Exception) -> str:
    return f"flash-attn 3 is installed, but does not load: {error_text(error, MOST_REASON_CHARACTERS)}"
