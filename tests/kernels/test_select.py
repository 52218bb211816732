"""The choice of a kernel and the reason it gives."""

import sys
import types
from collections.abc import Iterator

import pytest
import torch

from charm_megatron.errors import ConfigError
from charm_megatron.kernels import (
    BlockSizes,
    ReferenceKernel,
    TorchCpuKernel,
    TorchCudaKernel,
    select_kernel,
    torch_flash_3,
)

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("name", "device_type", "dtype", "expected"),
    [
        ("auto", "cpu", torch.float32, TorchCpuKernel),
        ("torch", "cpu", torch.float64, TorchCpuKernel),
        ("reference", "cpu", torch.float32, ReferenceKernel),
        ("auto", "cuda", torch.bfloat16, TorchCudaKernel),
        ("reference", "cuda", torch.float32, ReferenceKernel),
        ("auto", "xpu", torch.bfloat16, ReferenceKernel),
    ],
)
def test_selection_takes_the_fastest_kernel_that_fits(
    name: str, device_type: str, dtype: torch.dtype, expected: type
) -> None:
    selection = select_kernel(name, BlockSizes(device_type, dtype, 64, 64))
    assert type(selection.kernel) is expected
    assert selection.reason.startswith(selection.kernel.name)


@pytest.mark.parametrize(
    ("dtype", "width", "why"),
    [
        (torch.float32, 64, "takes bfloat16, float16, not float32"),
        (torch.float16, 260, "up to 256 wide, not 264"),
    ],
)
def test_whole_matrices_of_logits_are_held_on_a_gpu_only_where_that_is_asked_for(
    dtype: torch.dtype, width: int, why: str
) -> None:
    with pytest.raises(ConfigError) as error:
        select_kernel("auto", BlockSizes("cuda", dtype, width, 64))
    assert why in str(error.value)
    assert str(error.value).endswith("use 'reference', which holds all logits of a block")
    chosen = select_kernel("reference", BlockSizes("cuda", dtype, width, 64))
    assert chosen.reason == "reference, because the setting names it"


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
        ("torch", "cuda", torch.float32, "takes bfloat16, float16, not float32; use 'reference'"),
        ("torch", "cpu", torch.float8_e4m3fn, "not float8_e4m3fn"),
    ],
)
def test_selection_refuses_what_cannot_be_done(
    name: str, device_type: str, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        select_kernel(name, BlockSizes(device_type, dtype, 64, 64))
    assert message in str(error.value)


# ---------------------------------------------------------------------- FlashAttention 3


@pytest.fixture
def flash_3(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, types.ModuleType]]:
    """Modules that may stand in for packages; what was found out before is forgotten, before and after."""
    torch_flash_3._why_not.cache_clear()
    yield {}
    torch_flash_3._why_not.cache_clear()


HOPPER = BlockSizes("cuda", torch.bfloat16, 192, 128, 9)


def test_flash_attention_3_is_taken_on_hopper_where_it_loads(
    flash_3: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setitem(sys.modules, "flash_attn_interface", types.ModuleType("flash_attn_interface"))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", asked.append, raising=False)
    selection = select_kernel("auto", HOPPER)
    assert selection.reason == "torch_fa3, because FlashAttention 3 is there for this Hopper GPU"
    assert asked == ["FA3"]
    assert selection.kernel.widths(192, 128) == (192, 128)  # no padding of v
    assert type(select_kernel("auto", HOPPER._replace(capability=8)).kernel) is TorchCudaKernel


def test_flash_attention_3_that_is_absent_or_broken_is_passed_over_with_the_reason(
    flash_3: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    selection = select_kernel("auto", HOPPER)
    assert selection.reason.startswith("torch, because its flash attention on cuda takes these tensors")
    assert selection.others == ("not torch_fa3, because flash-attn 3 is not installed",)
    torch_flash_3._why_not.cache_clear()

    def activate(name: str) -> None:
        raise RuntimeError("does not expose FA3 kernels")

    monkeypatch.setitem(sys.modules, "flash_attn_interface", types.ModuleType("flash_attn_interface"))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate, raising=False)
    (reason,) = select_kernel("auto", HOPPER).others
    assert reason.endswith("installed, but does not load: RuntimeError: does not expose FA3 kernels")
    torch_flash_3._why_not.cache_clear()
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
    assert "cannot take FlashAttention 3 up" in str(select_kernel("auto", HOPPER))
