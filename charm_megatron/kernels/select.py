"""Chooses the implementation of block attention, and says why."""

from dataclasses import dataclass

from charm_megatron.errors import ConfigError, nearest
from charm_megatron.kernels.base import BlockKernel, BlockSizes, SelectableKernel
from charm_megatron.kernels.reference import ReferenceKernel
from charm_megatron.kernels.torch_flash import TorchCpuKernel, TorchCudaKernel

KERNELS: tuple[SelectableKernel, ...] = (
    TorchCpuKernel(),
    TorchCudaKernel(),
    ReferenceKernel(),
)
"""All of them, the fastest first: with `auto` the first that takes the tensors is used."""

AUTO = "auto"
KERNEL_NAMES = (AUTO, *dict.fromkeys(kernel.name for kernel in KERNELS))


@dataclass(frozen=True)
class Selection:
    """A kernel and the reason for it, a clause for a start-up receipt."""

    kernel: BlockKernel
    reason: str


def select_kernel(name: str, sizes: BlockSizes) -> Selection:
    """Returns the kernel called `name`, or with "auto" the fastest that takes these tensors.

    The choice follows from the arguments alone, so ranks with equal arguments choose alike. What holds whole matrices
    of logits is never chosen for a GPU unless it is named. Raises `ConfigError` for an unknown name, for a named kernel
    that does not take these tensors, and where none does.
    """
    require_kernel_name(name)
    obstacles: list[str] = []
    for kernel in KERNELS:
        if name not in (AUTO, kernel.name) or not kernel.runs_on(sizes.device_type):
            continue
        if name == AUTO and sizes.device_type == "cuda" and isinstance(kernel, ReferenceKernel):
            break
        obstacle = kernel.obstacle(sizes)
        if obstacle is None:
            why = "the setting names it" if name != AUTO else next(iter(obstacles), kernel.merit(sizes))
            return Selection(kernel, f"{kernel.name}, because {why}")
        obstacles.append(obstacle)
    why = obstacles[0] if obstacles else f"it does not run on {sizes.device_type}"
    others = " or ".join(
        repr(other.name)
        for other in {kernel.name: kernel for kernel in KERNELS}.values()
        if other.name != name and other.runs_on(sizes.device_type) and other.obstacle(sizes) is None
    )
    note = ", which holds all logits of a block" if ReferenceKernel.name in others else ""
    raise ConfigError(f"kernel {name!r} cannot be used: {why}; use {others}{note}")


def require_kernel_name(name: str) -> None:
    """Raises `ConfigError` for a name that no kernel has."""
    if name not in KERNEL_NAMES:
        raise ConfigError(f"unknown kernel {name!r}{nearest(name, KERNEL_NAMES)}")
