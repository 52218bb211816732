"""The benchmark's own judge: attention of a whole sequence in float64."""

import pytest
import torch

from charm_megatron.kernels.unsharded import (
    assembled,
    draw_shard,
    relative_error,
    unsharded_attention,
)
from charm_megatron.sharding import make_sharding
from charm_megatron.workload import CAUSAL, NO_MASK, Mask, Workload
from tests.full_attention import full_attention

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("mask", [NO_MASK, CAUSAL, Mask(5, 2), Mask(None, 0, (10, 14))])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_it_agrees_with_the_judge_of_all_tests(mask, kv_heads):
    q, k, v, dout = draw_shard(0, 24, Workload(2, 24, 4, kv_heads, 8, 6, "float32", mask))
    got = unsharded_attention(q, k, v, dout, mask)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = full_attention(*leaves, mask)
    grads = torch.autograd.grad(out, leaves, dout.double())
    expected = dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *grads), strict=True))
    for name, value in expected.items():
        assert got[name].shape == value.shape
        assert relative_error(got[name], value) < 1e-12, name


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_shards_are_put_back_in_the_order_of_the_sequence(layout):
    tokens = make_sharding(layout, 3, 12).tokens_by_rank
    whole = torch.arange(12.0)
    assert torch.equal(assembled([whole[list(mine)] for mine in tokens], tokens), whole)


def test_an_error_is_relative_to_the_largest_entry():
    assert relative_error(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 4.0]).double()) == 0.25
