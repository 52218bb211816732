"""The choice of a kernel and the reason it gives."""

import pytest
import torch

from charm_megatron.errors import ConfigError
from charm_megatron.kernels import BlockSizes, ReferenceKernel, TorchCpuKernel, TorchCudaKernel, select_kernel

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("name", "device_type", "dtype", "expected"),
    [
        ("auto", "cpu", torch.float32, TorchCpuKernel),
        ("torch", "cpu", torch.float64, TorchCpuKernel),
        ("reference", "cpu", torch.float32, ReferenceKernel),
        ("auto", "cuda", torch.bfloat16, TorchCudaKernel),
        ("auto", "cuda", torch.float32, ReferenceKernel),
        ("auto", "xpu", torch.bfloat16, ReferenceKernel),
    ],
)
def test_selection_takes_the_fastest_kernel_that_fits(
    name: str, device_type: str, dtype: torch.dtype, expected: type
) -> None:
    selection = select_kernel(name, BlockSizes(device_type, dtype, 64, 64))
    assert type(selection.kernel) is expected
    assert selection.reason.startswith(selection.kernel.name)


def test_selection_gives_the_reason_for_a_slower_kernel() -> None:
    assert select_kernel("auto", BlockSizes("cuda", torch.float32, 64, 64)).reason == (
        "reference, because torch's flash attention on cuda takes bfloat16, float16, not float32"
    )
    assert (
        "up to 256 wide, not 264" in select_kernel("auto", BlockSizes("cuda", torch.float16, 260, 64)).reason
    )


def test_selection_tells_of_padding() -> None:
    assert select_kernel("auto", BlockSizes("cpu", torch.float32, 96, 64)).reason.endswith(
        "v padded from 64 to 96"
    )
    assert select_kernel("auto", BlockSizes("cuda", torch.float16, 100, 100)).reason.endswith(
        "q and k padded from 100 to 104, v padded from 100 to 104"
    )


@pytest.mark.parametrize(
    ("name", "device_type", "dtype", "message"),
    [
        ("torhc", "cpu", torch.float32, "unknown kernel 'torhc'; did you mean 'torch'"),
        ("torch", "cuda", torch.float32, "takes bfloat16, float16, not float32; use 'auto' or 'reference'"),
        ("torch", "cpu", torch.float8_e4m3fn, "not float8_e4m3fn"),
    ],
)
def test_selection_refuses_what_cannot_be_done(
    name: str, device_type: str, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        select_kernel(name, BlockSizes(device_type, dtype, 64, 64))
    assert message in str(error.value)
