"""The packages flash-attn 2 and 3 through stand-ins with the parameters of each version, against float64."""

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from charm_megatron.errors import ConfigError
from charm_megatron.kernels import (
    BlockSizes,
    FlashAttn2Kernel,
    FlashAttn3Kernel,
    ReferenceKernel,
    flash_attn,
    select_kernel,
    torch_flash_3,
)
from charm_megatron.workload import Band
from tests.kernels.flash_attn_stand_ins import FLASH_2, FLASH_3, SIGNATURES, StandIn

pytestmark = pytest.mark.torch

KERNELS = {FLASH_2: FlashAttn2Kernel, FLASH_3: FlashAttn3Kernel}
TOO_OLD = {
    "2.3.6": "_flash_attn_backward has no deterministic",
    "7f67966c of 2024-07-11": "_flash_attn_forward has no window_size",
    "a5a75274 of 2024-10-15": "_flash_attn_forward has no sm_margin",
}
VERSIONS = [(package, version) for package in KERNELS for version in SIGNATURES[package]]
each_version = pytest.mark.parametrize(
    ("package", "version"), [one for one in VERSIONS if one[1] not in TOO_OLD], ids=str
)
NEWEST_2, NEWEST_3 = "2.7.4 and 2.8.3", "3fcde4b3 of 2025-11-21"
HOPPER = BlockSizes("cuda", torch.bfloat16, 64, 64, 9)
SCALE = 0.27

Install = Callable[[str, str], StandIn]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What was found out of packages, and what they imported, is forgotten before and after."""

    def forget() -> None:
        flash_attn._package.cache_clear()
        torch_flash_3._why_not.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0].startswith("flash_attn")]:
            del sys.modules[name]

    forget()
    yield
    forget()


@pytest.fixture
def install() -> Install:
    """Puts a stand-in where the package would be imported from."""

    def put(package: str, version: str) -> StandIn:
        stand_in = StandIn(package, version)
        parent = ModuleType(package.partition(".")[0])
        parent.__version__ = version
        parent.__path__ = []
        sys.modules[parent.__name__] = parent
        sys.modules[package] = stand_in.module
        return stand_in

    return put


def draw(s_q: int, s_k: int, group: int, d: int, d_v: int) -> list[Tensor]:
    """q, k, v and dout of a block in float32, as views of wider rows; four query heads, batch 2."""
    random = torch.Generator().manual_seed(s_q * 100 + s_k)
    shapes = ((s_q, 4, d), (s_k, 4 // group, d), (s_k, 4 // group, d_v), (s_q, 4, d_v))
    return [torch.randn(s, 2, h, width + 3, generator=random)[..., :width] for s, h, width in shapes]


def global_statistics(q: Tensor, k: Tensor, v: Tensor, causal: bool, band: Band | None) -> list[Tensor]:
    """out and lse as other blocks over the same queries leave them: a larger lse, and another out. In float64."""
    out, lse = ReferenceKernel().forward(
        q.double(), k.double(), v.double(), causal=causal, softmax_scale=SCALE, band=band
    )
    return [out * 0.5 + 0.1, lse + 0.7]


BLOCKS = {
    "full": (9, 9, False, None),
    "causal": (9, 9, True, None),
    "wide": (5, 12, False, None),
    "high": (12, 5, False, None),
    "one row": (1, 9, False, None),
    "window": (9, 9, False, Band(0, 3)),
    "both ways": (9, 9, False, Band(-2, 3)),
    "wide band": (5, 12, False, Band(-7, 0)),
    "wide triangle": (5, 12, False, Band(-7, 4)),
    "high band": (12, 5, False, Band(0, 7)),
    "high triangle": (12, 5, False, Band(-4, 8)),
    "next diagonal": (9, 9, False, Band(-1, 8)),
}


@each_version
@pytest.mark.parametrize("block", BLOCKS)
def test_every_version_gives_the_block_its_results_and_gradients_under_global_statistics(
    install: Install, package: str, version: str, block: str
) -> None:
    install(package, version)
    s_q, s_k, causal, band = BLOCKS[block]
    for group, d, d_v in ((1, 16, 16), (2, 20, 12), (4, 8, 24)):
        q, k, v, dout = draw(s_q, s_k, group, d, d_v)
        how = {"causal": causal, "softmax_scale": SCALE, "band": band}
        kernel, judge = KERNELS[package](), ReferenceKernel()
        expected = judge.forward(q.double(), k.double(), v.double(), **how)
        out, lse = global_statistics(q, k, v, causal, band)
        gradients = judge.backward(dout.double(), q.double(), k.double(), v.double(), out, lse, **how)
        got = kernel.forward(q, k, v, **how)
        got_gradients = kernel.backward(dout, q, k, v, out.float(), lse.float(), **how)
        for one, right in zip((*got, *got_gradients), (*expected, *gradients), strict=True):
            assert one.shape == right.shape
            assert float((one.double() - right).abs().max()) < 1e-5


@each_version
def test_deterministic_mode_reaches_the_backward(install: Install, package: str, version: str) -> None:
    stand_in, kernel = install(package, version), KERNELS[package]()
    q, k, v, dout = draw(5, 5, 1, 8, 8)
    out, lse = (x.float() for x in global_statistics(q, k, v, False, None))
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            kernel.backward(dout, q, k, v, out, lse, causal=False, softmax_scale=SCALE)
        finally:
            torch.use_deterministic_algorithms(False)
        assert stand_in.calls[-1]["deterministic"] is wanted


@pytest.mark.parametrize("version", [version for version in SIGNATURES[FLASH_3] if version not in TOO_OLD])
def test_flash_attention_3_is_told_how_many_multiprocessors_to_leave(install: Install, version: str) -> None:
    stand_in = install(FLASH_3, version)
    q, k, v, dout = draw(5, 5, 1, 8, 8)
    for margin in (0, 12):
        kernel = select_kernel("auto", HOPPER._replace(sm_margin=margin)).kernel
        out, lse = kernel.forward(q, k, v, causal=True, softmax_scale=SCALE)
        kernel.backward(dout, q, k, v, out.contiguous(), lse, causal=True, softmax_scale=SCALE)
        assert [call["sm_margin"] for call in stand_in.calls[-2:]] == [margin, margin]


@pytest.mark.parametrize(
    ("version", "widths", "padded"),
    [
        (NEWEST_3, (192, 128), (192, 128)),
        (NEWEST_3, (192, 64), (192, 128)),
        (NEWEST_3, (96, 64), (96, 96)),
        (NEWEST_3, (64, 100), (104, 104)),
        ("909eb7ce of 2025-04-10", (192, 128), (192, 192)),
    ],
)
def test_values_keep_their_width_where_flash_attention_3_takes_it(
    install: Install, version: str, widths: tuple[int, int], padded: tuple[int, int]
) -> None:
    stand_in = install(FLASH_3, version)
    q, k, v, dout = draw(5, 7, 2, *widths)
    out, lse = FlashAttn3Kernel().forward(q, k, v, causal=False, softmax_scale=SCALE)
    gradients = FlashAttn3Kernel().backward(dout, q, k, v, out, lse, causal=False, softmax_scale=SCALE)
    assert [x.shape for x in (out, *gradients)] == [dout.shape, q.shape, k.shape, v.shape]
    assert [(call["q"].shape[3], call["v"].shape[3]) for call in stand_in.calls] == [padded, padded]


@each_version
def test_rows_without_a_finite_logit_have_lse_minus_infinity(
    install: Install, package: str, version: str
) -> None:
    install(package, version)
    q, k, v, _ = draw(5, 7, 1, 8, 8)
    q[..., 0], k[..., 0] = 1, -math.inf
    out, lse = KERNELS[package]().forward(q, k, v, causal=False, softmax_scale=SCALE)
    assert (lse == -math.inf).all()
    assert (out == 0).all()


def test_operands_in_half_precision_go_in_uncopied_where_they_are_aligned(install: Install) -> None:
    stand_in = install(FLASH_2, NEWEST_2)
    q, k, v = (torch.randn(6, 2, 2, 24)[..., :16].to(torch.bfloat16) for _ in range(3))
    out, lse = FlashAttn2Kernel().forward(q, k, v, causal=True, softmax_scale=SCALE)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert [stand_in.calls[0][name].data_ptr() for name in "qkv"] == [x.data_ptr() for x in (q, k, v)]
    assert {
        x.dtype for x in FlashAttn2Kernel().backward(out, q, k, v, out, lse, causal=True, softmax_scale=1.0)
    } == {torch.bfloat16}


# ---------------------------------------------------------------------- which one is chosen


def test_the_package_is_chosen_by_what_the_card_can_do(install: Install) -> None:
    install(FLASH_3, NEWEST_3)
    chosen = select_kernel("auto", HOPPER)
    assert str(chosen) == "flash_attn_3, because FlashAttention 3 is there for this Hopper GPU"
    ampere = select_kernel("auto", HOPPER._replace(capability=8))
    assert ampere.kernel.name == "torch"
    assert ampere.others == (
        "not flash_attn_3 or torch_fa3, because FlashAttention 3 needs a GPU of compute capability 9, not 8",
        "not flash_attn_2, because flash-attn 2 is not installed",
    )
    install(FLASH_2, NEWEST_2)
    assert select_kernel("auto", HOPPER).kernel.name == "flash_attn_3"


@pytest.mark.parametrize(
    ("capability", "installed", "chosen"),
    [
        (8, "2.7.4", "flash_attn_2"),
        (10, "2.7.4", "torch"),
        (10, "2.8.3", "flash_attn_2"),
    ],
)
def test_flash_attn_2_is_taken_from_ampere_on(
    install: Install, capability: int, installed: str, chosen: str
) -> None:
    install(FLASH_2, NEWEST_2)
    sys.modules["flash_attn"].__version__ = installed
    assert select_kernel("auto", HOPPER._replace(capability=capability)).kernel.name == chosen


def test_before_ampere_no_flash_attention_is_taken(install: Install) -> None:
    install(FLASH_2, NEWEST_2)
    with pytest.raises(ConfigError, match="compute capability 8, not 7; use 'reference'"):
        select_kernel("auto", HOPPER._replace(capability=7, dtype=torch.float16))


def test_padding_by_flash_attn_2_is_told(install: Install) -> None:
    install(FLASH_2, NEWEST_2)
    reason = select_kernel("auto", HOPPER._replace(capability=8, head_dim=192, head_dim_v=128)).reason
    assert (
        reason == "flash_attn_2, because flash-attn 2 on cuda takes these tensors, v padded from 128 to 192"
    )


def test_wide_heads_are_left_to_others_where_flash_attention_3_would_not_be_deterministic(
    install: Install,
) -> None:
    install(FLASH_3, NEWEST_3)
    wide = HOPPER._replace(head_dim=256, head_dim_v=256)
    assert select_kernel("auto", wide).kernel.name == "flash_attn_3"
    torch.use_deterministic_algorithms(True)
    try:
        selection = select_kernel("auto", wide)
    finally:
        torch.use_deterministic_algorithms(False)
    assert selection.kernel.name == "torch"
    assert "up to 192 wide with deterministic algorithms, not 256" in selection.others[0]


@pytest.mark.parametrize("version", TOO_OLD)
def test_versions_that_lack_what_a_block_needs_are_passed_over(install: Install, version: str) -> None:
    package = FLASH_2 if version[1] == "." else FLASH_3
    install(package, version)
    selection = select_kernel("auto", HOPPER)
    assert selection.kernel.name == "torch"
    assert f"is of a version that is not known: {TOO_OLD[version]}" in str(selection)


def test_a_function_that_asks_for_what_is_not_known_is_passed_over(install: Install) -> None:
    install(FLASH_2, NEWEST_2)

    def asks(q, k, v, softmax_scale, causal, window_size, attention_sinks, learnt=None):
        raise AssertionError

    sys.modules[FLASH_2]._flash_attn_forward = asks
    assert "_flash_attn_forward asks for attention_sinks" in str(select_kernel("auto", HOPPER))


BROKEN = {
    "no compiled part": (
        "import flash_attn_2_cuda",
        "ModuleNotFoundError: No module named 'flash_attn_2_cuda'",
    ),
    "built for another torch": (
        "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E')",
        "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E",
    ),
    "no CUDA library": ("raise OSError('libcudart.so.11.0: cannot open')", "OSError: libcudart.so.11.0"),
    "anything": ("import torch; torch.no_such_thing", "AttributeError: module 'torch' has no attribute"),
}


@pytest.mark.parametrize("way", BROKEN)
def test_broken_packages_are_passed_over_and_told(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, reason = BROKEN[way]
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn/__init__.py").write_text("from flash_attn.flash_attn_interface import f", "utf-8")
    (tmp_path / "flash_attn/flash_attn_interface.py").write_text(code, "utf-8")
    (tmp_path / "flash_attn_interface.py").write_text(code, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    selection = select_kernel("auto", HOPPER)
    assert selection.kernel.name == "torch"
    names = ("flash_attn_3 or torch_fa3", "flash_attn_2")
    for name, other in zip(names, selection.others, strict=True):
        title = f"flash-attn {2 if name == 'flash_attn_2' else 3}"
        assert other.startswith(f"not {name}, because {title} is installed, but does not load: {reason}")


def test_flash_attn_4_alone_is_not_taken_for_flash_attn_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn/cute").mkdir(parents=True)
    (tmp_path / "flash_attn/cute/__init__.py").write_text("", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert "not flash_attn_2, because flash-attn 2 is not installed" in select_kernel("auto", HOPPER).others
