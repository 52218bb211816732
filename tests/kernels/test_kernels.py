"""Every backend of block attention against float64 autograd of attention written out.

Legend of shapes as in `charm_megatron.kernels.base`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from charm_megatron.errors import ConfigError
from charm_megatron.kernels import (
    BlockKernel,
    BlockSizes,
    ReferenceKernel,
    TorchCpuKernel,
    TorchCudaKernel,
    accumulate_dtype,
    select_kernel,
)

pytestmark = pytest.mark.torch

# Largest error relative to the largest entry: some hundred roundings in double and single precision; in
# half precision P and dS are themselves rounded before they are multiplied, and results once more.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SCALE = 0.27

CPU_KERNELS = [ReferenceKernel(), TorchCpuKernel()]
every_cpu_kernel = pytest.mark.parametrize(
    "kernel", CPU_KERNELS, ids=[type(kernel).__name__ for kernel in CPU_KERNELS]
)
causal_and_full = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])


@dataclass(frozen=True)
class Case:
    """Inputs of one block, and its results in float64 by autograd: out, lse, dq, dk, dv."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    causal: bool

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def results(self) -> tuple[Tensor, Tensor]:
        """Gives out and lse in the dtypes in which a backward wants them."""
        return self.out.to(self.q.dtype), self.lse.to(accumulate_dtype(self.q.dtype))


def make_case(
    *,
    s_q: int = 33,
    s_k: int = 33,
    b: int = 2,
    h: int = 4,
    group: int = 1,
    d: int = 16,
    d_v: int = 16,
    dtype: torch.dtype = torch.float64,
    causal: bool = False,
    device: str = "cpu",
) -> Case:
    generator = torch.Generator().manual_seed(s_q * 1000 + s_k + group)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    q, k, v, dout = (
        draw(s_q, b, h, d),
        draw(s_k, b, h // group, d),
        draw(s_k, b, h // group, d_v),
        draw(s_q, b, h, d_v),
    )
    leaves = [x.to(torch.float64, copy=True).requires_grad_() for x in (q, k, v)]
    out, lse = attention_written_out(*leaves, causal)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout.double())
    out, lse = out.detach(), lse.detach()
    return Case(q, k, v, dout, out, lse, dq, dk, dv, causal)


def attention_written_out(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Naive attention, head by head of the queries, with a loop where the kernels have none."""
    group = q.shape[2] // k.shape[2]
    outs, lses = [], []
    for head in range(q.shape[2]):
        logits = torch.einsum("qbd,kbd->bqk", q[:, :, head], k[:, :, head // group]) * SCALE
        if causal:
            above = torch.arange(k.shape[0], device=q.device) > torch.arange(
                q.shape[0], device=q.device
            ).unsqueeze(1)
            logits = torch.where(above, -math.inf, logits)
        outs.append(torch.einsum("bqk,kbd->qbd", logits.softmax(-1), v[:, :, head // group]))
        lses.append(logits.logsumexp(-1).T)
    return torch.stack(outs, 2), torch.stack(lses, 2)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest error over the largest entry, which counts as 0.1 at least: some gradients here are zero."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return float((actual.double() - expected).abs().max() / expected.abs().max().clamp(min=0.1))


def assert_right(kernel: BlockKernel, case: Case, place: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    """Runs both directions on inputs put in memory by `place`, and compares with float64."""
    dtype = case.q.dtype
    q, k, v, dout = (place(x) for x in (*case.inputs, case.dout))
    out, lse = kernel.forward(q, k, v, causal=case.causal, softmax_scale=SCALE)
    assert (out.dtype, lse.dtype) == (dtype, accumulate_dtype(dtype))
    gradients = kernel.backward(
        dout, q, k, v, *(place(x) for x in case.results), causal=case.causal, softmax_scale=SCALE
    )
    assert {x.dtype for x in gradients} == {kernel.grad_dtype(dtype)}
    expected = {"out": case.out, "lse": case.lse, "dq": case.dq, "dk": case.dk, "dv": case.dv}
    errors = {
        name: relative_error(actual, right)
        for (name, right), actual in zip(expected.items(), (out, lse, *gradients), strict=True)
    }
    assert max(errors.values()) < TOLERANCE[dtype], errors


@every_cpu_kernel
@causal_and_full
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_results_and_gradients_equal_float64_autograd(
    kernel: BlockKernel, dtype: torch.dtype, group: int, causal: bool
) -> None:
    assert_right(kernel, make_case(dtype=dtype, group=group, causal=causal))


@every_cpu_kernel
@pytest.mark.parametrize(("s_q", "s_k"), [(1, 1), (1, 40), (40, 1), (20, 600), (600, 20)])
def test_oblong_blocks_are_right(kernel: BlockKernel, s_q: int, s_k: int) -> None:
    assert_right(kernel, make_case(s_q=s_q, s_k=s_k))


@every_cpu_kernel
@pytest.mark.parametrize("rows", [1, 2, 31, 600])
def test_causal_blocks_of_any_length_are_right(kernel: BlockKernel, rows: int) -> None:
    assert_right(kernel, make_case(s_q=rows, s_k=rows, group=2, causal=True))


@every_cpu_kernel
@causal_and_full
@pytest.mark.parametrize(("d", "d_v"), [(24, 16), (16, 24), (1, 3), (3, 1)])
def test_values_may_be_narrower_or_wider_than_keys(
    kernel: BlockKernel, d: int, d_v: int, causal: bool
) -> None:
    assert_right(kernel, make_case(d=d, d_v=d_v, group=2, causal=causal))


@every_cpu_kernel
@causal_and_full
@pytest.mark.parametrize("offset", [0, 3])
def test_inputs_may_be_views_of_wider_rows(kernel: BlockKernel, offset: int, causal: bool) -> None:
    def packed(x: Tensor) -> Tensor:
        room = torch.full((*x.shape[:-1], x.shape[-1] + 8), math.nan, dtype=x.dtype)
        view = room[..., offset : offset + x.shape[-1]]
        return view.copy_(x)

    assert_right(kernel, make_case(group=2, causal=causal), packed)


@every_cpu_kernel
def test_keys_and_values_may_be_interleaved_and_rows_may_be_a_slice(kernel: BlockKernel) -> None:
    case = make_case(s_q=20, s_k=30, group=2, d=24, d_v=16)
    payload = torch.cat([case.k, case.v], dim=-1)
    longer = torch.cat([torch.full_like(payload, math.nan), payload])[30:]
    out, lse = kernel.forward(case.q, longer[..., :24], longer[..., 24:], causal=False, softmax_scale=SCALE)
    assert relative_error(out, case.out) < 1e-12
    assert relative_error(lse, case.lse) < 1e-12


@every_cpu_kernel
@pytest.mark.parametrize("axis", ["batch", "heads"])
def test_inputs_may_be_a_slice_of_more_heads_or_samples(kernel: BlockKernel, axis: str) -> None:
    dim = {"batch": 1, "heads": 2}[axis]
    assert_right(
        kernel,
        make_case(group=2, causal=True),
        lambda x: torch.cat([torch.full_like(x, math.nan), x], dim).narrow(dim, x.shape[dim], x.shape[dim]),
    )


@every_cpu_kernel
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_blocks_merged_by_lse_equal_the_undivided_attention(kernel: BlockKernel, dtype: torch.dtype) -> None:
    case = make_case(s_q=40, s_k=40, group=2, d_v=24, dtype=dtype, causal=True)
    # The causal square as zigzag halves see it: two triangles and the rectangle below the diagonal.
    early, late = slice(0, 20), slice(20, 40)
    blocks = [(early, early, True), (late, early, False), (late, late, True)]
    out = torch.zeros_like(case.out)
    lse = torch.full_like(case.lse, -math.inf)
    for rows, columns, causal in blocks:
        block_out, block_lse = kernel.forward(
            case.q[rows], case.k[columns], case.v[columns], causal=causal, softmax_scale=SCALE
        )
        merged = torch.logaddexp(lse[rows], block_lse.double())
        out[rows] = out[rows] * (lse[rows] - merged).exp().unsqueeze(-1) + block_out.double() * (
            block_lse.double() - merged
        ).exp().unsqueeze(-1)
        lse[rows] = merged
    assert relative_error(out, case.out) < TOLERANCE[dtype]
    assert relative_error(lse, case.lse) < TOLERANCE[dtype]


@every_cpu_kernel
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gradients_of_blocks_under_global_statistics_add_up(kernel: BlockKernel, dtype: torch.dtype) -> None:
    case = make_case(s_q=40, s_k=40, group=2, d_v=24, dtype=dtype, causal=True)
    early, late = slice(0, 20), slice(20, 40)
    dq, dk, dv = (torch.zeros_like(x) for x in (case.dq, case.dk, case.dv))
    out, lse = case.results
    for rows, columns, causal in [(early, early, True), (late, early, False), (late, late, True)]:
        block = kernel.backward(
            case.dout[rows],
            case.q[rows],
            case.k[columns],
            case.v[columns],
            out[rows],
            lse[rows],
            causal=causal,
            softmax_scale=SCALE,
        )
        for total, part, where in zip((dq, dk, dv), block, (rows, columns, columns), strict=True):
            total[where] += part
    for actual, expected in ((dq, case.dq), (dk, case.dk), (dv, case.dv)):
        assert relative_error(actual, expected) < TOLERANCE[dtype]


@every_cpu_kernel
@pytest.mark.parametrize("size", [1e-30, 1e30], ids=["tiny", "huge"])
def test_gradients_scale_with_dout_where_its_squares_leave_float32(kernel: BlockKernel, size: float) -> None:
    case = make_case(dtype=torch.float32, causal=True)
    out, lse = case.results
    gradients = kernel.backward(case.dout * size, *case.inputs, out, lse, causal=True, softmax_scale=SCALE)
    for actual, expected in zip(gradients, (case.dq, case.dk, case.dv), strict=True):
        assert relative_error(actual.double() / size, expected) < 1e-5


@every_cpu_kernel
def test_rows_without_gradient_contribute_nothing(kernel: BlockKernel) -> None:
    case = make_case()
    out, lse = case.results
    keep = (torch.arange(33) % 2 == 0).to(case.dout.dtype).view(-1, 1, 1)
    every_row = kernel.backward(
        case.dout * keep.unsqueeze(-1), *case.inputs, out, lse, causal=False, softmax_scale=SCALE
    )
    kept_rows = kernel.backward(
        case.dout[::2], case.q[::2], case.k, case.v, out[::2], lse[::2], causal=False, softmax_scale=SCALE
    )
    assert not every_row[0][1::2].any()
    assert relative_error(every_row[1], kept_rows[1]) < 1e-12
    assert relative_error(every_row[2], kept_rows[2]) < 1e-12


@every_cpu_kernel
def test_logits_of_hundreds_keep_lse_and_gradients_finite(kernel: BlockKernel) -> None:
    case = make_case(dtype=torch.float32)
    out, lse = kernel.forward(case.q * 100, case.k, case.v, causal=False, softmax_scale=SCALE)
    gradients = kernel.backward(
        case.dout, case.q * 100, case.k, case.v, out, lse, causal=False, softmax_scale=SCALE
    )
    assert lse.abs().max() > 100
    assert all(x.isfinite().all() for x in (out, lse, *gradients))


@every_cpu_kernel
def test_results_repeat_bit_for_bit(kernel: BlockKernel) -> None:
    case = make_case(s_q=300, s_k=300, group=2, dtype=torch.float32, causal=True)
    out, lse = case.results

    def run() -> list[Tensor]:
        return [
            *kernel.forward(*case.inputs, causal=True, softmax_scale=SCALE),
            *kernel.backward(case.dout, *case.inputs, out, lse, causal=True, softmax_scale=SCALE),
        ]

    assert all(torch.equal(first, second) for first, second in zip(run(), run(), strict=True))


@every_cpu_kernel
def test_oblong_causal_blocks_are_refused(kernel: BlockKernel) -> None:
    case = make_case(s_q=20, s_k=30)
    with pytest.raises(AssertionError, match="causal block of 20 x 30 rows"):
        kernel.forward(*case.inputs, causal=True, softmax_scale=SCALE)


@causal_and_full
@pytest.mark.parametrize(("d", "d_v"), [(64, 64), (96, 64), (20, 36)])
def test_cuda_operators_accept_our_arguments_and_give_the_promised_shapes(
    d: int, d_v: int, causal: bool
) -> None:
    kernel, dtype = TorchCudaKernel(), torch.bfloat16
    q = torch.empty(32, 2, 8, d + 8, dtype=dtype, device="meta")[..., :d]
    payload = torch.empty(32, 2, 2, d + d_v, dtype=dtype, device="meta")
    k, v = payload[..., :d], payload[..., d:]
    out, lse = kernel.forward(q, k, v, causal=causal, softmax_scale=SCALE)
    assert (out.shape, out.dtype) == ((32, 2, 8, d_v), dtype)
    assert (lse.shape, lse.dtype) == ((32, 2, 8), torch.float32)
    gradients = kernel.backward(out, q, k, v, out, lse, causal=causal, softmax_scale=SCALE)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@causal_and_full
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize(("d", "d_v"), [(64, 64), (128, 128), (96, 64), (192, 128), (20, 36), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["torch", "flash_attn_3", "torch_fa3", "flash_attn_2", "torch_cudnn"])
def test_flash_attention_on_cuda_equals_float64_autograd(
    name: str, dtype: torch.dtype, d: int, d_v: int, group: int, causal: bool
) -> None:
    sizes = BlockSizes.on(torch.device("cuda"), dtype, d, d_v)._replace(has_bands=False)
    try:
        kernel = select_kernel(name, sizes).kernel
    except ConfigError as error:
        pytest.skip(str(error))
    case = make_case(s_q=200, s_k=200, group=group, d=d, d_v=d_v, dtype=dtype, causal=causal, device="cuda")
    assert_right(kernel, case)

    def packed(x: Tensor) -> Tensor:
        return torch.cat([x, x], dim=-1)[..., x.shape[-1] :]

    assert_right(kernel, case, packed)
