"""`charm-megatron --version`: this package, and all whose versions decide how it runs."""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from charm_megatron import __version__
from charm_megatron.doctor.apex import is_nvidias_apex
from charm_megatron.doctor.probe import nccl_version

NOT_INSTALLED = "not installed"
UNRELATED = " (PyPI's unrelated package)"
DISTRIBUTIONS = ("megatron-core", "transformer-engine", "flash-attn")


def version_lines() -> Iterator[str]:
    """One line per package. Imports torch, but neither Megatron nor Transformer Engine."""
    yield f"charm-megatron: {__version__}"
    yield f"Python: {platform.python_version()}"
    yield f"torch: {_installed('torch')}"
    cuda, nccl = _cuda_and_nccl()
    yield f"CUDA: {cuda}"
    yield f"NCCL: {nccl}"
    for name in DISTRIBUTIONS:
        yield f"{name}: {_installed(name)}"
    apex = _installed("apex")
    if apex != NOT_INSTALLED:
        yield f"apex: {apex}{'' if is_nvidias_apex() else UNRELATED}"


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return NOT_INSTALLED


def _cuda_and_nccl() -> tuple[str, str]:
    """Of the build of torch that is installed."""
    try:
        import torch
    except ImportError:
        return NOT_INSTALLED, NOT_INSTALLED
    return torch.version.cuda or NOT_INSTALLED, nccl_version() or NOT_INSTALLED
