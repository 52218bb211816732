"""Values that are easily lost on the way: empty rows of a rank, NaN, autocast, second derivatives."""

import math

import pytest
import torch

import charm_megatron as cm
from tests.full_attention import full_attention
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo

SCHEDULES = ("ring", "charm", "all_gather", "ulysses", "ring_self_attention")
NONE = cm.Mask(None, None)


def operands(dtype=torch.float64):
    random = torch.Generator().manual_seed(0)
    return [torch.randn(32, 1, 4, 8, generator=random, dtype=torch.float64).to(dtype) for _ in range(3)]


def attend(name, tensors, **settings):
    shards = [cm.shard(x, group=None) for x in tensors]
    out = cm.context_parallel_attention(
        *shards, group=None, mask="none", schedule=name, domains=2, **settings
    )
    return cm.unshard(out, group=None)


def empty_rows():
    """Logits over all keys of rank 1 are -inf for every query."""
    q, k, v = operands()
    q[..., 0] = 1
    k[[*range(4, 8), *range(24, 28)], ..., 0] = -math.inf
    return q, k, v


def empty_rows_case(rank, size, kernel):
    return {name: attend(name, empty_rows(), kernel=kernel).numpy() for name in SCHEDULES}


@pytest.mark.parametrize("kernel", ["torch", "reference"])
def test_keys_of_a_rank_that_no_query_sees_change_nothing(kernel):
    wanted, _ = full_attention(*empty_rows(), NONE)
    for results in run_ranks(empty_rows_case, 4, kernel):
        for name, out in results.items():
            assert torch.allclose(torch.from_numpy(out), wanted, atol=1e-12), name


def nan_case(rank, size, length):
    q = torch.ones(length, 1, 1, 4)
    q[3] = math.nan
    k = torch.ones(length, 1, 1, 4)
    return {name: attend(name, (q, k, k)).numpy() for name in ("ring", "charm", "all_gather")}


@pytest.mark.parametrize("length", [8, 16, 128])
def test_nan_in_a_query_comes_out_as_nan_and_nowhere_else(length):
    for results in run_ranks(nan_case, 2, length):
        for name, out in results.items():
            is_nan = torch.from_numpy(out).isnan().all(-1).flatten()
            assert is_nan.nonzero().flatten().tolist() == [3], name


def autocast_case(rank, size):
    results = {}
    for kernel in ("torch", "reference"):
        for name in ("ring", "ring_self_attention"):
            shards = [cm.shard(x.float(), group=None).requires_grad_() for x in operands()]
            with torch.autocast("cpu", torch.bfloat16):
                out = cm.context_parallel_attention(
                    *shards, group=None, mask="none", schedule=name, kernel=kernel
                )
                (dq,) = torch.autograd.grad(out.sum(), shards[:1])
            results[kernel, name] = [cm.unshard(x, group=None).numpy() for x in (out, dq)]
    return results


def test_autocast_does_not_compute_float32_in_bfloat16():
    leaves = [x.requires_grad_() for x in operands()]
    wanted, _ = full_attention(*leaves, NONE)
    (dq,) = torch.autograd.grad(wanted.sum(), leaves[:1])
    for results in run_ranks(autocast_case, 2):
        for case, arrays in results.items():
            out, got_dq = map(torch.from_numpy, arrays)
            assert out.dtype == torch.float32, case
            assert torch.allclose(out.double(), wanted, atol=1e-5), case
            assert torch.allclose(got_dq.double(), dq, atol=1e-5), case


def second_derivative_case(rank, size):
    shards = [cm.shard(x, group=None).requires_grad_() for x in operands()]
    said = {}
    for name in ("ring", "ring_self_attention"):
        out = cm.context_parallel_attention(*shards, group=None, mask="none", schedule=name)
        (dq,) = torch.autograd.grad(out.square().sum(), shards[:1], create_graph=True)
        try:
            dq.square().sum().backward()
        except RuntimeError as error:
            said[name] = str(error)
    return said


def test_a_second_derivative_is_refused_and_not_dropped():
    for said in run_ranks(second_derivative_case, 2):
        assert said.keys() == {"ring", "ring_self_attention"}
        for words in said.values():
            assert "once_differentiable" in words


def half_case(rank, size, dtype):
    whole = [x.to(dtype) for x in operands()]
    shards = [cm.shard(x, group=None).requires_grad_() for x in whole]
    out = cm.context_parallel_attention(*shards, group=None, mask="none", grad_return_dtype="model")
    grads = torch.autograd.grad(out.sum(), shards)
    assert all(x.dtype == dtype for x in (out, *grads))
    return [cm.unshard(x, group=None).double().numpy() for x in (out, *grads)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_keep_their_dtype_and_come_within_a_rounding_or_two(dtype):
    leaves = [x.to(dtype).double().requires_grad_() for x in operands()]
    out, _ = full_attention(*leaves, NONE)
    wanted = [out.detach(), *torch.autograd.grad(out.sum(), leaves)]
    for got in run_ranks(half_case, 2, dtype):
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
            assert (
                float((torch.from_numpy(a) - b).abs().max() / b.abs().max()) < 3 * torch.finfo(dtype).eps
            ), name
