"""The choice of a kernel and the reason it gives."""

import sys
import types
from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from charm_megatron.errors import ConfigError
from charm_megatron.kernels import (
    BlockSizes,
    ReferenceKernel,
    TorchCpuKernel,
    TorchCudaKernel,
    TorchCudnnKernel,
    flash_attn,
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
    for found in (torch_flash_3._why_not, flash_attn._package):
        found.cache_clear()
    yield {}
    for found in (torch_flash_3._why_not, flash_attn._package):
        found.cache_clear()


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
    assert selection.others == (
        "not flash_attn_3 or torch_fa3, because flash-attn 3 is not installed",
        "not flash_attn_2, because flash-attn 2 is not installed",
    )
    torch_flash_3._why_not.cache_clear()

    def activate(name: str) -> None:
        raise RuntimeError("does not expose FA3 kernels")

    monkeypatch.setitem(sys.modules, "flash_attn_interface", types.ModuleType("flash_attn_interface"))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate, raising=False)
    reason = select_kernel("auto", HOPPER).others[1]
    assert reason.endswith("installed, but does not load: RuntimeError: does not expose FA3 kernels")
    torch_flash_3._why_not.cache_clear()
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
    assert "cannot take FlashAttention 3 up" in str(select_kernel("auto", HOPPER))


# ---------------------------------------------------------------------- cuDNN


ONE_WIDTH = BlockSizes("cuda", torch.bfloat16, 128, 128, 8, has_bands=False)


@pytest.mark.parametrize(
    ("sizes", "version", "obstacle"),
    [
        (ONE_WIDTH, 92400, None),
        (ONE_WIDTH._replace(head_dim=20, head_dim_v=36), 92400, None),
        (ONE_WIDTH._replace(head_dim=192, capability=9), 92400, None),
        (ONE_WIDTH._replace(head_dim=192, capability=9), 91000, "heads up to 128 wide, not 192"),
        (ONE_WIDTH._replace(head_dim=192), 92400, "heads up to 128 wide, not 192"),
        (ONE_WIDTH._replace(head_dim_v=256, capability=9), 92400, "heads up to 128 wide, not 256"),
        (ONE_WIDTH._replace(dtype=torch.float32), 92400, "takes bfloat16, float16, not float32"),
        (ONE_WIDTH._replace(capability=7, dtype=torch.float16), 92400, "compute capability 8 or more, not 7"),
        (ONE_WIDTH._replace(has_bands=True), 92400, "has no windows"),
        (ONE_WIDTH, 8907, "a torch with cuDNN 9, not 8907"),
        (ONE_WIDTH, None, "a torch with cuDNN 9, not one without cuDNN"),
    ],
)
def test_cudnn_is_used_where_it_is_named_and_takes_the_tensors(
    monkeypatch: pytest.MonkeyPatch, sizes: BlockSizes, version: int | None, obstacle: str | None
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    if obstacle is None:
        assert type(select_kernel("torch_cudnn", sizes).kernel) is TorchCudnnKernel
        assert type(select_kernel("auto", sizes).kernel) is TorchCudaKernel
        return
    with pytest.raises(ConfigError) as error:
        select_kernel("torch_cudnn", sizes)
    assert obstacle in str(error.value)


def test_cudnn_is_refused_where_algorithms_are_to_be_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92400)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ConfigError, match="algorithms are to be deterministic; use 'torch'"):
            select_kernel("torch_cudnn", ONE_WIDTH)
    finally:
        torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------------- multiprocessors left to NCCL


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("auto", BlockSizes("cpu", torch.float32, 64, 64), "it cannot leave 8 multiprocessors to NCCL"),
        ("torch", HOPPER, "it cannot leave 8 multiprocessors to NCCL"),
        (
            "auto",
            HOPPER._replace(capability=8),
            "FlashAttention 3 needs a GPU of compute capability 9, not 8",
        ),
        ("auto", HOPPER, "flash-attn 3 is not installed"),
        ("auto", HOPPER._replace(multiprocessors=8), "sm_margin 8 leaves it none of 8 multiprocessors"),
    ],
)
def test_a_margin_that_a_kernel_cannot_leave_is_one_sentence(
    flash_3: object, name: str, sizes: BlockSizes, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        select_kernel(name, sizes._replace(sm_margin=8))
    assert message in str(error.value)
    assert str(error.value).endswith("; use sm_margin 0")
    assert len(str(error.value)) < 300


def test_torch_s_carveout_is_the_margin_while_its_flash_attention_3_is_called(
    flash_3: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", types.ModuleType("flash_attn_interface"))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", lambda name: None, raising=False)
    seen: list[int | None] = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "_flash_attention" in str(func):
                seen.append(torch._C._get_sm_carveout_experimental())
            return func(*args, **(kwargs or {}))

    kernel = select_kernel("auto", HOPPER._replace(sm_margin=8)).kernel
    assert kernel.name == "torch_fa3"
    q, k, v = (torch.empty(4, 1, 2, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
    with Watched():
        out, lse = kernel.forward(q, k, v, causal=True, softmax_scale=0.1)
        kernel.backward(out, q, k, v, out, lse, causal=True, softmax_scale=0.1)
        assert torch._C._get_sm_carveout_experimental() is None
        select_kernel("auto", HOPPER).kernel.forward(q, k, v, causal=True, softmax_scale=0.1)
    assert seen == [8, 8, None]
    monkeypatch.delattr(torch._C, "_set_sm_carveout_experimental")
    with pytest.raises(ConfigError, match="has no SM carveout"):
        select_kernel("torch_fa3", HOPPER._replace(sm_margin=8))
