"""Chooses the implementation of block attention, and says why."""

from dataclasses import dataclass

import torch

from charm_megatron.errors import ConfigError, nearest
from charm_megatron.kernels.base import BlockKernel, BlockSizes, LeavesMultiprocessors, SelectableKernel
from charm_megatron.kernels.flash import AMPERE
from charm_megatron.kernels.flash_attn import FlashAttn2Kernel, FlashAttn3Kernel
from charm_megatron.kernels.reference import ReferenceKernel
from charm_megatron.kernels.torch_cudnn import TorchCudnnKernel
from charm_megatron.kernels.torch_flash import TorchCpuKernel, TorchCudaKernel
from charm_megatron.kernels.torch_flash_3 import TorchFlash3Kernel

KERNELS: tuple[SelectableKernel, ...] = (
    TorchCpuKernel(),
    FlashAttn3Kernel(),
    TorchFlash3Kernel(),
    FlashAttn2Kernel(),
    TorchCudaKernel(),
    TorchCudnnKernel(),
    ReferenceKernel(),
)
"""All of them: with `auto` the first that takes the tensors is used.

FlashAttention 3 comes first, which is made for Hopper. Of the ways to one and the same algorithm, an installed package
comes before what torch has compiled in. cuDNN, which nothing here has measured, comes after all of those.
"""

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
    """Returns the kernel called `name`, or with "auto" the first of `KERNELS` that takes these tensors.

    The choice follows from the arguments and from the installed packages alone, so ranks with equal ones choose alike.
    What holds whole matrices of logits is never chosen for a GPU unless it is named. Raises `ConfigError` for an
    unknown name, for a named kernel that does not take these tensors, where none does, and for bfloat16 on a GPU that
    has none.
    """
    require_kernel_name(name)
    _require_dtype(sizes)
    obstacles: dict[str, str] = {}
    for kernel in KERNELS:
        if name not in (AUTO, kernel.name) or not kernel.runs_on(sizes.device_type):
            continue
        if name == AUTO and sizes.device_type == "cuda" and isinstance(kernel, ReferenceKernel):
            break
        obstacle = _obstacle(kernel, sizes)
        if obstacle is None:
            why = kernel.merit(sizes) if name == AUTO else "the setting names it"
            chosen = kernel.leaving(sizes.sm_margin) if isinstance(kernel, LeavesMultiprocessors) else kernel
            return Selection(chosen, f"{kernel.name}, because {why}", _others(obstacles))
        obstacles[kernel.name] = obstacle
    raise _refusal(name, sizes, obstacles)


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


def _obstacle(kernel: SelectableKernel, sizes: BlockSizes) -> str | None:
    """What keeps a kernel from these tensors, and from leaving multiprocessors to NCCL."""
    if sizes.sm_margin:
        if not isinstance(kernel, LeavesMultiprocessors):
            return f"it cannot leave {sizes.sm_margin} multiprocessors to NCCL (sm_margin)"
        if 0 < sizes.multiprocessors <= sizes.sm_margin:
            return f"sm_margin {sizes.sm_margin} leaves it none of {sizes.multiprocessors} multiprocessors"
    return kernel.obstacle(sizes)


def _others(obstacles: dict[str, str]) -> tuple[str, ...]:
    """Why not each of them; those with the same reason together."""
    names: dict[str, list[str]] = {}
    for name, obstacle in obstacles.items():
        names.setdefault(obstacle, []).append(name)
    return tuple(f"not {' or '.join(of)}, because {obstacle}" for obstacle, of in names.items())


def _refusal(name: str, sizes: BlockSizes, obstacles: dict[str, str]) -> ConfigError:
    """What is wrong with the kernel called `name`, and which ones would do."""
    why = [*obstacles.values()][-1] if obstacles else f"it does not run on {sizes.device_type}"
    if name == AUTO:
        why = obstacles.get(FlashAttn3Kernel.name if sizes.sm_margin else TorchCudaKernel.name, why)
    usable = [
        repr(other.name)
        for other in {kernel.name: kernel for kernel in KERNELS}.values()
        if other.name != name and other.runs_on(sizes.device_type) and _obstacle(other, sizes) is None
    ]
    if not usable and sizes.sm_margin:
        return ConfigError(f"kernel {name!r} cannot be used: {why}; use sm_margin 0")
    note = ", which holds all logits of a block" if repr(ReferenceKernel.name) in usable else ""
    return ConfigError(f"kernel {name!r} cannot be used: {why}; use {' or '.join(usable)}{note}")
