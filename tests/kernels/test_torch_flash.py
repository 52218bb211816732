"""What the backend on torch's flash attention does to operands before the operator sees them."""

import math

import pytest
import torch
from torch import Tensor

from charm_megatron.kernels import accumulate_dtype
from charm_megatron.kernels.elementwise import stand_in_out
from charm_megatron.kernels.flash import aligned

pytestmark = pytest.mark.torch


def draw_dout_and_out() -> tuple[Tensor, Tensor]:
    """Two tensors [33, 2, 4, 16], float64."""
    generator = torch.Generator().manual_seed(0)
    dout, out = torch.randn(2, 33, 2, 4, 16, generator=generator, dtype=torch.float64)
    return dout, out


def error_of_row_sums(dout: Tensor, out: Tensor, delta: Tensor) -> float:
    """Largest error of rowsum(dout * out), taken in float64, over the largest delta."""
    sums = (dout.double() * out.double()).sum(-1)
    return float((sums - delta).abs().max() / delta.abs().max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_stand_in_out_has_delta_as_row_sums(dtype: torch.dtype) -> None:
    dout, out = draw_dout_and_out()
    dout = dout.to(dtype)
    delta = (dout.double() * out).sum(-1)
    stand_in = stand_in_out(dout, delta.to(accumulate_dtype(dtype)))
    assert stand_in.dtype == dtype
    assert error_of_row_sums(dout, stand_in, delta) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("size", [1e-40, 1e-25, 1e25], ids=str)
def test_stand_in_out_survives_doubtful_sizes_of_dout(size: float) -> None:
    dout, out = draw_dout_and_out()
    dout = dout.float() * size
    delta = (dout.double() * out).sum(-1)
    stand_in = stand_in_out(dout, delta.float())
    # Below 1e-38 float32 has the fewer bits the smaller a number is: delta itself is that coarse.
    tolerance = 1e-6 if size > 1e-38 else 1e-4
    assert error_of_row_sums(dout, stand_in, delta) < tolerance
    assert stand_in.norm(dim=-1).max() <= out.norm(dim=-1).max()


def test_stand_in_out_keeps_a_nan_visible() -> None:
    dout = torch.zeros(2, 1, 1, 4)
    dout[1, 0, 0, 2] = math.nan
    stand_in = stand_in_out(dout, torch.zeros(2, 1, 1))
    assert not stand_in[0].any()
    assert stand_in[1].isnan().any()


def test_views_that_are_aligned_are_not_copied() -> None:
    rows = torch.zeros(10, 2, 3, 64, dtype=torch.bfloat16)
    for view in (rows, rows[..., :24], rows[..., 8:32], rows[3:, :, 1:, :8]):
        assert aligned(view) is view


def test_views_that_are_not_aligned_are_copied() -> None:
    rows = torch.zeros(10, 2, 3, 68, dtype=torch.bfloat16)
    for view in (rows[..., :64], rows[..., 4:68]):
        copy = aligned(view)
        assert copy.is_contiguous()
        assert aligned(copy) is copy
