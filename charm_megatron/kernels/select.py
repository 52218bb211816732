"""Chooses the implementation of block attention, and says why."""

from dataclasses import dataclass
from typing import Literal

import torch

from charm_megatron.errors import ConfigError, nearest
from charm_megatron.kernels.base import BlockKernel
from charm_megatron.kernels.reference import ReferenceKernel
from charm_megatron.kernels.torch_flash import (
    CPU_DTYPES,
    CUDA_DTYPES,
    CUDA_MAX_HEAD_DIM,
    TorchCpuKernel,
    TorchCudaKernel,
    cuda_width,
)

KernelName = Literal["auto", "reference", "torch"]
KERNEL_NAMES = ("auto", "reference", "torch")


@dataclass(frozen=True)
class Selection:
    """A kernel and the reason for it, a clause for a start-up receipt."""

    kernel: BlockKernel
    reason: str


def select_kernel(
    name: str, device_type: str, dtype: torch.dtype, head_dim: int, head_dim_v: int
) -> Selection:
    """Gives the kernel called `name`, or with "auto" the fastest that takes these tensors.

    The choice follows from the arguments alone, so ranks with equal arguments choose alike. Raises
    `ConfigError` for an unknown name, and for a named kernel that does not take these tensors.
    """
    if name not in KERNEL_NAMES:
        raise ConfigError(f"unknown kernel {name!r}{nearest(name, KERNEL_NAMES)}")
    if name == "reference":
        return Selection(ReferenceKernel(), "reference, as asked")
    obstacle = _obstacle_to_torch(device_type, dtype, cuda_width(head_dim, head_dim_v))
    if obstacle is None:
        kernel = TorchCpuKernel() if device_type == "cpu" else TorchCudaKernel()
        return Selection(kernel, _reason_for_torch(name, device_type, head_dim, head_dim_v))
    if name == "torch":
        raise ConfigError(f"kernel 'torch' cannot be used: {obstacle}; use 'auto' or 'reference'")
    return Selection(ReferenceKernel(), f"reference, as {obstacle}")


def _obstacle_to_torch(device_type: str, dtype: torch.dtype, padded_head_dim: int) -> str | None:
    """Why torch's own flash attention does not take such tensors; None where it does."""
    supported = {"cpu": CPU_DTYPES, "cuda": CUDA_DTYPES}
    if device_type not in supported:
        return f"torch's flash attention with lse runs on {' and '.join(supported)}, not on {device_type}"
    if dtype not in supported[device_type]:
        names = ", ".join(_short(known) for known in supported[device_type])
        return f"torch's flash attention on {device_type} takes {names}, not {_short(dtype)}"
    if device_type == "cuda" and padded_head_dim > CUDA_MAX_HEAD_DIM:
        return (
            f"torch's flash attention on cuda takes heads up to {CUDA_MAX_HEAD_DIM} wide, "
            f"not {padded_head_dim}"
        )
    return None


def _reason_for_torch(name: str, device_type: str, head_dim: int, head_dim_v: int) -> str:
    why = "as asked" if name == "torch" else f"as its flash attention on {device_type} takes these tensors"
    width = cuda_width(head_dim, head_dim_v) if device_type == "cuda" else max(head_dim, head_dim_v)
    padded = [
        f"{what} padded from {dim} to {width}"
        for what, dim in (("q and k", head_dim), ("v", head_dim_v))
        if dim != width
    ]
    return ", ".join([f"torch, {why}", *padded])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
