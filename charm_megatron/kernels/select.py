"""Chooses the implementation of block attention, and says why."""

from dataclasses import dataclass

import torch

from charm_megatron.errors import ConfigError, nearest
from charm_megatron.kernels.base import BlockKernel, BlockSizes, SelectableKernel
from charm_megatron.kernels.reference import ReferenceKernel
from charm_megatron.kernels.torch_flash import AMPERE, TorchCpuKernel, TorchCudaKernel
from charm_megatron.kernels.torch_flash_3 import TorchFlash3Kernel

KERNELS: tuple[SelectableKernel, ...] = (
    TorchCpuKernel(),
    TorchFlash3Kernel(),
    TorchCudaKernel(),
    ReferenceKernel(),
)
"""All of them, the fastest first: with `auto` the first that takes the tensors is used."""

AUTO = "auto"
KERNEL_NAMES = (AUTO, *dict.fromkeys(kernel.name for kernel in KERNELS))


@dataclass(frozen=True)
class Selection:
    """A kernel and the reason for it, a clause for a start-up receipt; and why not each one that would be faster."""

    kernel: BlockKernel
    reason: str
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "; ".join([self.reason, *self.others])


def select_kernel(name: str, sizes: BlockSizes) -> Selection:
    """Returns the kernel called `name`, or with "auto" the fastest that takes these tensors.

    The choice follows from the arguments alone, so ranks with equal arguments choose alike. What holds whole matrices
    of logits is never chosen for a GPU unless it is named. Raises `ConfigError` for an unknown name, for a named kernel
    that does not take these tensors, where none does, and for bfloat16 on a GPU that has none.
    """
    require_kernel_name(name)
    _require_dtype(sizes)
    obstacles: dict[str, str] = {}
    for kernel in KERNELS:
        if name not in (AUTO, kernel.name) or not kernel.runs_on(sizes.device_type):
            continue
        if name == AUTO and sizes.device_type == "cuda" and isinstance(kernel, ReferenceKernel):
            break
        obstacle = kernel.obstacle(sizes)
        if obstacle is None:
            why = kernel.merit(sizes) if name == AUTO else "the setting names it"
            others = tuple(f"not {other}, because {obstacle}" for other, obstacle in obstacles.items())
            return Selection(kernel, f"{kernel.name}, because {why}", others)
        obstacles[kernel.name] = obstacle
    why = [*obstacles.values()][-1] if obstacles else f"it does not run on {sizes.device_type}"
    usable = " or ".join(
        repr(other.name)
        for other in {kernel.name: kernel for kernel in KERNELS}.values()
        if other.name != name and other.runs_on(sizes.device_type) and other.obstacle(sizes) is None
    )
    note = ", which holds all logits of a block" if ReferenceKernel.name in usable else ""
    raise ConfigError(f"kernel {name!r} cannot be used: {why}; use {usable}{note}")


def _require_dtype(sizes: BlockSizes) -> None:
    """GPUs have bfloat16 since Ampere. Those before have float16, for which no flash attention of torch's is left."""
    if sizes.dtype == torch.bfloat16 and 0 < sizes.capability < AMPERE:
        raise ConfigError(
            f"a GPU of compute capability {sizes.capability} has no bfloat16, which came with {AMPERE}; float16 would "
            f"work with kernel '{ReferenceKernel.name}', which holds all logits of a block"
        )


def require_kernel_name(name: str) -> None:
    """Raises `ConfigError` for a name that no kernel has."""
    if name not in KERNEL_NAMES:
        raise ConfigError(f"unknown kernel {name!r}{nearest(name, KERNEL_NAMES)}")
