"""Attention over one block, forward and backward, with the statistics that merging blocks needs.

One signature (`BlockKernel`), one file per backend, one selector that gives its reason.
"""

from charm_megatron.kernels.base import BlockKernel, BlockSizes, accumulate_dtype
from charm_megatron.kernels.flash_attn import FlashAttn2Kernel, FlashAttn3Kernel
from charm_megatron.kernels.reference import ReferenceKernel, masked_logits
from charm_megatron.kernels.select import KERNEL_NAMES, Selection, require_kernel_name, select_kernel
from charm_megatron.kernels.torch_cudnn import TorchCudnnKernel
from charm_megatron.kernels.torch_flash import TorchCpuKernel, TorchCudaKernel
from charm_megatron.kernels.torch_flash_3 import TorchFlash3Kernel

__all__ = [
    "KERNEL_NAMES",
    "BlockKernel",
    "BlockSizes",
    "FlashAttn2Kernel",
    "FlashAttn3Kernel",
    "ReferenceKernel",
    "Selection",
    "TorchCpuKernel",
    "TorchCudaKernel",
    "TorchCudnnKernel",
    "TorchFlash3Kernel",
    "accumulate_dtype",
    "masked_logits",
    "require_kernel_name",
    "select_kernel",
]
