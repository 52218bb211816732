"""Rows without a finite logit, and NaN: every kernel says the same of them, and merging keeps it."""

import math

import pytest
import torch

from charm_megatron.kernels import ReferenceKernel, TorchCpuKernel
from charm_megatron.kernels.elementwise import TorchElementwise
from charm_megatron.workload import Band

pytestmark = pytest.mark.torch

KERNELS = [ReferenceKernel(), TorchCpuKernel()]
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)


def operands(size, dtype):
    random = torch.Generator().manual_seed(size)
    return [torch.randn(size, 1, 2, 16, generator=random).to(dtype) for _ in range(3)]


@each_kernel
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 4, 8, 64, 600])
def test_a_row_without_a_finite_logit_has_lse_minus_infinity_and_out_0(kernel, dtype, size):
    q, k, v = operands(size, dtype)
    q[..., 0] = 1
    k[..., 0] = -math.inf
    out, lse = kernel.forward(q, k, v, causal=False, softmax_scale=0.25)
    assert (lse == -math.inf).all()
    assert (out == 0).all()


@each_kernel
def test_finite_inputs_whose_logits_overflow_are_such_rows_too(kernel):
    q, k, v = operands(8, torch.float32)
    q[3], k[..., :] = 3.0, -3e38
    out, lse = kernel.forward(q, k, v, causal=False, softmax_scale=1.0)
    assert (lse[3] == -math.inf).all()
    assert (out[3] == 0).all()


@each_kernel
@pytest.mark.parametrize(("causal", "band"), [(True, None), (False, Band(0, 2)), (False, None)])
def test_only_the_rows_that_see_no_finite_key_are_empty(kernel, causal, band):
    q, k, v = operands(8, torch.float64)
    q[..., 0], k[:3, ..., 0] = 1, -math.inf
    out, lse = kernel.forward(q, k, v, causal=causal, softmax_scale=0.25, band=band)
    first = 3 if causal or band else 0
    assert (lse[:first] == -math.inf).all()
    assert lse[first:].isfinite().all()
    assert (out[:first] == 0).all()
    if not causal and band is None:
        without = kernel.forward(q, k[3:], v[3:], causal=False, softmax_scale=0.25)
        assert torch.allclose(out, without[0])
        assert torch.allclose(lse, without[1])


@each_kernel
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 4, 5, 8, 64])
def test_nan_in_a_query_shows_in_its_row(kernel, dtype, size):
    q, k, v = operands(size, dtype)
    q[size - 1, 0, 1, 3] = math.nan
    out, lse = kernel.forward(q, k, v, causal=False, softmax_scale=0.25)
    assert out[size - 1, 0, 1].isnan().all()
    assert lse[size - 1, 0, 1].isnan()
    assert out[:, :, 0].isfinite().all()


def test_merging_keeps_nan_and_leaves_empty_rows_empty():
    nan, inf = math.nan, math.inf
    cases = {  # lse of the sum, lse of the part, out of the part -> out, lse; out of the sum is 1, or 0 where empty
        (0.0, -inf, 0.0): (1.0, 0.0),
        (-inf, 0.0, 3.0): (3.0, 0.0),
        (-inf, -inf, 0.0): (0.0, -inf),
        (0.0, nan, nan): (nan, nan),
        (nan, 0.0, 3.0): (nan, nan),
        (0.0, 0.0, 3.0): (2.0, math.log(2)),
    }
    for (lse_sum, lse, out), wanted in cases.items():
        sums = torch.tensor([[0.0 if lse_sum == -inf else 1.0]]), torch.tensor([lse_sum])
        TorchElementwise().merge(*sums, [(torch.tensor([[out]]), torch.tensor([lse]))], is_first=False)
        got = (float(sums[0]), float(sums[1]))
        assert got == pytest.approx(wanted, nan_ok=True), (lse_sum, lse, out)
