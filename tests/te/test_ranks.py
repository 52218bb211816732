"""The class on real ranks, over gloo, against full attention in float64."""

from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from torch.utils.checkpoint import checkpoint

from charm_megatron.config import CharmConfig
from charm_megatron.errors import InvalidInput
from charm_megatron.executor import AttentionRuntime
from charm_megatron.mcore.bridge import SplitAttention
from charm_megatron.mcore.te_attention import te_core_attention_class
from charm_megatron.sharding import make_sharding
from charm_megatron.workload import CAUSAL, NO_MASK, Mask
from tests.full_attention import full_attention, relative_error
from tests.ranks import run_ranks
from tests.te.layers import HEAD_DIM, HEADS, KV_HEADS, Values, config_of, constructible

pytestmark = pytest.mark.te

BATCH, TOKENS_PER_RANK = 2, 12
CASES: dict[str, tuple[Mask, Values, Values]] = {
    "causal": (CAUSAL, {}, {}),
    "no mask": (NO_MASK, {}, {"attn_mask_type": AttnMaskType.no_mask}),
    "a window": (Mask(7, 0), {"window_size": (7, 0)}, {}),
    "wider keys than values": (CAUSAL, {}, {"k_channels": HEAD_DIM, "v_channels": 6}),
}


def build(cp_size: int, config: Values, arguments: Values) -> Any:
    runtime = AttentionRuntime(CharmConfig(domains=max(1, cp_size // 2)))
    cls = te_core_attention_class(SplitAttention(runtime), strict=True)
    given = {"attn_mask_type": AttnMaskType.causal, **arguments}
    with constructible():
        return cls(
            config=config_of(cp_size, **config),
            layer_number=1,
            attention_type="self",
            cp_comm_type="charm",
            **given,
        )


def errors_on_rank(rank: int, cp_size: int) -> dict[str, float]:
    """The largest error of out, dq, dk and dv of each case, recomputed and not."""
    parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
    mine = torch.tensor(make_sharding("zigzag", cp_size, cp_size * TOKENS_PER_RANK, ()).tokens_of(rank))
    worst = {}
    for name, (mask, config, arguments) in CASES.items():
        layer = build(cp_size, config, arguments)
        for recompute in (False, True):
            expected, got = results(layer, mine, mask, arguments.get("v_channels", HEAD_DIM), recompute)
            errors = [relative_error(ours, whole[mine]) for ours, whole in zip(got, expected, strict=True)]
            worst[f"{name}, {recompute=}"] = max(errors)
    return worst


def results(layer: Any, mine: torch.Tensor, mask: Mask, head_dim_v: int, recompute: bool) -> Any:
    """Out, dq, dk, dv of the whole sequence in one process, and of this rank's layer."""
    random = torch.Generator().manual_seed(1)
    seq_len = layer.config.context_parallel_size * TOKENS_PER_RANK
    widths = ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, head_dim_v), (HEADS, head_dim_v))
    whole = [torch.randn(seq_len, BATCH, *w, dtype=torch.float64, generator=random) for w in widths]
    qkv, dout = [x.requires_grad_() for x in whole[:3]], whole[3]
    out, _ = full_attention(*qkv, mask)
    shard = [x.detach()[mine].requires_grad_() for x in qkv]
    mask_type = AttnMaskType.no_mask if mask.is_none else AttnMaskType.causal

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        joined: torch.Tensor = layer(*tensors, None, attn_mask_type=mask_type)
        return joined

    got = checkpoint(attend, *shard, use_reentrant=False) if recompute else attend(*shard)
    got = got.unflatten(2, (HEADS, head_dim_v))
    expected = (out, *torch.autograd.grad(out, qkv, dout))
    return expected, (got, *torch.autograd.grad(got, shard, dout[mine]))


@pytest.mark.parametrize("cp_size", [2, 4])
def test_forward_and_backward_equal_full_attention(cp_size: int) -> None:
    for errors in run_ranks(errors_on_rank, cp_size):
        assert set(errors) == {f"{name}, {recompute=}" for name in CASES for recompute in (False, True)}
        assert max(errors.values()) < 1e-12, errors


def state_on_rank(rank: int, cp_size: int) -> tuple[bool, Any]:
    parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
    layer = build(cp_size, {}, {})
    return layer.charm_is_on, layer.cp_comm_type


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_the_class_is_built_on_the_groups_of_megatron(cp_size: int) -> None:
    assert run_ranks(state_on_rank, cp_size) == [(cp_size > 1, "p2p")] * cp_size


def refusals_on_rank(rank: int, cp_size: int) -> list[str]:
    """What is said to sizes that do not fit: an odd number of tokens, heads that are no multiple of KV heads."""
    parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
    layer = build(cp_size, {}, {})
    said = []
    for tokens, heads, kv_heads in ((5, 4, 2), (6, 4, 3)):
        query, key = torch.zeros(tokens, 1, heads, 8), torch.zeros(tokens, 1, kv_heads, 8)
        with pytest.raises(InvalidInput) as caught:
            layer(query, key, key, None, attn_mask_type=AttnMaskType.causal)
        said.append(str(caught.value))
    return said


def test_sizes_that_do_not_fit_are_one_sentence() -> None:
    for length, heads in run_ranks(refusals_on_rank, 2):
        assert "sequence length 10 does not divide over 2 ranks" in length
        assert "multiple of 4" in length
        assert "num_heads must be a multiple of num_kv_heads" in heads
