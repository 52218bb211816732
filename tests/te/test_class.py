"""The class is Megatron's own with one thing more, and leaves to Transformer Engine what is not done here."""

import inspect
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from transformer_engine.pytorch.constants import CPLoadBalancingStrategy as Strategy

from charm_megatron.errors import InvalidInput
from charm_megatron.workload import CAUSAL, NO_MASK, Mask
from tests.te.layers import HEAD_DIM, HEADS, Built, FakeGroup, Stock, Values

pytestmark = pytest.mark.te

# megatron/core/extensions/transformer_engine.py of the wheel of 0.16.1: names in order, and the defaults.
SIGNATURES_0_16_1: dict[str, Values] = {
    "__init__": {
        "self": inspect.Parameter.empty,
        "config": inspect.Parameter.empty,
        "layer_number": inspect.Parameter.empty,
        "attn_mask_type": inspect.Parameter.empty,
        "attention_type": inspect.Parameter.empty,
        "attention_dropout": None,
        "softmax_scale": None,
        "k_channels": None,
        "v_channels": None,
        "num_splits": None,
        "cp_comm_type": "p2p",
        "pg_collection": None,
    },
    "forward": {
        "self": inspect.Parameter.empty,
        "query": inspect.Parameter.empty,
        "key": inspect.Parameter.empty,
        "value": inspect.Parameter.empty,
        "attention_mask": inspect.Parameter.empty,
        "attn_mask_type": inspect.Parameter.empty,
        "attention_bias": None,
        "packed_seq_params": None,
        "num_splits": None,
    },
}


def signature(cls: type[Any], method: str) -> Values:
    return {name: p.default for name, p in inspect.signature(getattr(cls, method)).parameters.items()}


def test_the_class_is_a_subclass_of_the_real_one() -> None:
    cls = Built().cls
    assert isinstance(Stock.cls, type)
    assert issubclass(cls, Stock.cls)
    assert cls is not Stock.cls


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_signatures_are_those_of_both_versions_of_megatron(method: str) -> None:
    ours = signature(Built().cls, method)
    assert list(ours.items()) == list(signature(Stock.cls, method).items())
    assert list(ours.items()) == list(SIGNATURES_0_16_1[method].items())


def test_set_context_parallel_group_takes_what_transformer_engine_does() -> None:
    """Newer versions take more, which is passed on by name."""
    *ours, (others, _) = signature(Built().cls, "set_context_parallel_group").items()
    assert others == "others"
    assert ours == list(signature(Stock.cls, "set_context_parallel_group").items())[: len(ours)]


def test_a_split_other_than_the_zigzag_is_refused() -> None:
    built = Built()
    built.layer.set_context_parallel_group(
        built.group, [0, 1], None, load_balancing_strategy=Strategy.DUAL_CHUNK_SWAP
    )
    with pytest.raises(InvalidInput, match="charm does not do load_balancing_strategy 'no_load_balance'"):
        built.layer.set_context_parallel_group(
            built.group, [0, 1], None, load_balancing_strategy=Strategy.NO_LOAD_BALANCE
        )


def test_two_levels_of_groups_are_refused_with_what_takes_their_place() -> None:
    built = Built()
    with pytest.raises(
        InvalidInput, match=r"takes one context-parallel group, but is given 2; .* charm\.domains"
    ):
        built.layer.set_context_parallel_group([built.group, built.group], [[0], [1]], None, "charm")


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_checkpoints_have_the_same_keys(cp_size: int) -> None:
    ours, stock = Built(cp_size).layer, Built(cp_size, cp_comm_type="p2p").layer
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert [name for name, _ in ours.named_parameters()] == []


def test_a_split_layer_asks_the_runtime_and_not_transformer_engine() -> None:
    built = Built()
    assert built.call() == {}
    assert built.runtime.asked.pop("checked").name == "layer 1"
    assert built.runtime.asked == {
        "group": built.group,
        "mask": CAUSAL,
        "softmax_scale": HEAD_DIM**-0.5,
        "sink": None,
    }
    built.call(attn_mask_type=AttnMaskType.no_mask, attention_mask=torch.zeros(1))
    assert built.runtime.asked["mask"] == NO_MASK
    # Megatron's default makes a mask for every batch; Transformer Engine ignores it for causal attention too.
    assert built.call(attention_mask=torch.zeros(1)) == {}


def test_an_sbhd_call_with_empty_packed_seq_params_is_done_here() -> None:
    assert Built().call(packed_seq_params=PackedSeqParams(qkv_format="sbhd")) == {}


def test_scale_and_channels_of_the_layer_are_used() -> None:
    built = Built(softmax_scale=0.5)
    built.call()
    assert built.runtime.asked["softmax_scale"] == 0.5
    latent = Built(k_channels=12, v_channels=8)
    latent.call((6, 2, HEADS, 12))
    assert latent.runtime.asked["softmax_scale"] == 12**-0.5


def test_a_value_width_that_megatron_changes_for_a_call_is_followed() -> None:
    built = Built(k_channels=12, v_channels=8)
    built.layer.hidden_size_per_attention_head_v = 12
    value = torch.randn(6, 2, 2, 12)
    out = built.layer(torch.randn(6, 2, HEADS, 12), value, value, None, attn_mask_type=AttnMaskType.causal)
    assert out.shape == (6, 2, HEADS * 12)


def test_layers_have_their_own_windows() -> None:
    config: Values = {"window_size": (4, 0), "window_attn_skip_freq": 2}
    for layer_number, mask in ((1, Mask(4, 0)), (2, CAUSAL)):
        built = Built(config=config, layer_number=layer_number)
        assert built.call() == {}
        assert built.runtime.asked["mask"] == mask


@pytest.mark.parametrize("cp_comm_type", ["charm", "p2p", None])
def test_one_rank_is_transformer_engine_alone(cp_comm_type: str | None) -> None:
    built = Built(1, cp_comm_type=cp_comm_type, strict=True)
    assert built.call()["cp_comm_type"] == "p2p"
    assert (built.runtime.asked, built.said) == ({}, [])


@pytest.mark.parametrize("cp_comm_type", ["p2p", "a2a", "all_gather"])
def test_layers_of_another_type_are_transformer_engine_alone(cp_comm_type: str) -> None:
    built = Built(cp_comm_type=cp_comm_type, strict=True)
    reached = built.call()
    assert (reached["cp_comm_type"], reached["cp_group"]) == (cp_comm_type, built.group)
    assert (built.runtime.asked, built.said) == ({}, [])


PACKED = PackedSeqParams(qkv_format="thd")
LAYERS: dict[str, tuple[Values, Values]] = {
    "attention_dropout 0.1": ({"attention_dropout": 0.1}, {}),
    "attention_dropout 0.2": ({}, {"attention_dropout": 0.2}),
    "attention of type 'cross'": ({}, {"attention_type": "cross"}),
    "fp8_dot_product_attention": ({"fp8_dot_product_attention": True}, {}),
    "fp8_multi_head_attention": ({"fp8_multi_head_attention": True}, {}),
    "num_splits 2": ({}, {"num_splits": 2}),
    "attention inside a CUDA graph": ({"cuda_graph_impl": "local"}, {}),
}
CALLS: dict[str, Values] = {
    "packed sequences (packed_seq_params with qkv_format 'thd')": {
        "packed_seq_params": PACKED,
        "query_shape": (6, HEADS, HEAD_DIM),
    },
    "an attention_bias": {"attention_bias": torch.zeros(1)},
    "mask type 'padding'": {"attn_mask_type": AttnMaskType.padding},
    "num_splits 3": {"num_splits": 3},
    "a key whose length differs from the query's, as with a KV cache": {"num_keys": 9},
}


@pytest.mark.parametrize("what", LAYERS)
def test_a_layer_that_is_not_done_here_is_left_to_transformer_engine(what: str) -> None:
    config, arguments = LAYERS[what]
    built = Built(config=config, **arguments)
    for _ in range(2):
        reached = built.call()
        assert (reached["cp_comm_type"], reached["cp_group"]) == ("p2p", built.group)
    assert built.runtime.asked == {}
    assert built.said == [f"charm-megatron: {what}: left to Transformer Engine's p2p ring (layer 1)"]
    with pytest.raises(InvalidInput, match=r"charm does not do .*; or set charm.strict to false"):
        Built(config=config, strict=True, **arguments)


@pytest.mark.parametrize("what", CALLS)
def test_a_call_that_is_not_done_here_is_left_to_transformer_engine(what: str) -> None:
    built = Built()
    reached = built.call(**CALLS[what])
    assert (reached["cp_comm_type"], reached["cp_group"]) == ("p2p", built.group)
    assert built.said == [f"charm-megatron: {what}: left to Transformer Engine's p2p ring (layer 1)"]
    assert built.call() == {}
    assert built.said[1] == "charm-megatron: receipt for 12 tokens"
    assert built.said[2].startswith("charm-megatron: layer 1: no window, ")
    assert built.said[2].endswith(" heads: computed by charm")
    assert len(built.said) == 3
    strict = Built(strict=True)
    with pytest.raises(InvalidInput, match=r"charm does not do .*; or set charm.strict to false"):
        strict.call(**CALLS[what])
    assert strict.call() == {}


@pytest.mark.parametrize("name", ["qk_clip", "log_max_attention_logit"])
def test_the_largest_logit_comes_from_transformer_engine(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"charm does not do {name}; switch it off"):
        Built(config={name: True}, strict=True)
    assert Built(config={name: True}).layer.charm_limit.what == name


def test_learnable_sinks_come_from_transformer_engine() -> None:
    with pytest.raises(InvalidInput, match="charm does not do softmax_type 'off-by-one'"):
        Built(config={"softmax_type": "off-by-one"}, strict=True)


@pytest.mark.filterwarnings("ignore:window_size should be:UserWarning")
def test_a_window_into_the_future_of_a_causal_layer_is_left_to_transformer_engine() -> None:
    built = Built(config={"window_size": (4, 2)})
    assert built.call()["cp_comm_type"] == "p2p"
    assert built.call(attn_mask_type=AttnMaskType.no_mask) == {}
    assert built.runtime.asked["mask"] == Mask(4, 2)


def test_a_call_may_bring_its_own_group() -> None:
    built, other = Built(4), FakeGroup(2)
    built.call(packed_seq_params=PackedSeqParams(qkv_format="sbhd", cp_group=other, local_cp_size=2))
    assert built.runtime.asked["group"] is other
    built.call()
    assert built.runtime.asked["group"] is built.group


def test_a_call_may_switch_context_parallelism_off() -> None:
    built = Built(4, strict=True)
    off = PackedSeqParams(qkv_format="sbhd", local_cp_size=1)
    reached = built.call(packed_seq_params=off)
    assert (reached["cp_group"], reached["cp_comm_type"]) == (None, "p2p")
    assert built.runtime.asked == {}


def test_the_group_of_one_call_left_to_transformer_engine_does_not_stay() -> None:
    built, other = Built(4), FakeGroup(2)
    own = PackedSeqParams(qkv_format="sbhd", cp_group=other, local_cp_size=2)
    assert built.call(packed_seq_params=own, attention_bias=torch.zeros(1))["cp_group"] is other
    assert built.call(attention_bias=torch.zeros(1))["cp_group"] is built.group


def test_groups_may_be_set_after_the_layer_is_built() -> None:
    built, other = Built(2), FakeGroup(2)
    built.layer.set_context_parallel_group(other, [0, 1], None, "charm")
    assert built.layer.cp_comm_type == "p2p"
    built.call()
    assert built.runtime.asked["group"] is other
    built.layer.set_context_parallel_group(None, None, None, "charm")
    with pytest.raises(InvalidInput, match="layer 1 has no context-parallel group"):
        built.call()


def test_a_group_of_another_size_than_configured_is_refused() -> None:
    with pytest.raises(
        InvalidInput, match="the context-parallel group has 2 ranks, but context_parallel_size is 4"
    ):
        Built(2, config={"context_parallel_size": 4})


def test_hierarchical_layers_without_their_groups_are_refused() -> None:
    with pytest.raises(InvalidInput, match="pass --hierarchical-context-parallel-sizes"):
        Built(cp_comm_type="a2a+p2p")


@pytest.mark.parametrize(
    ("changes", "is_captured"),
    [
        ({}, False),
        ({"cuda_graph_impl": "local"}, True),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": ["mlp"]}, False),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]}, True),
        ({"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}, True),
    ],
)
def test_cuda_graphs_that_leave_attention_out_are_no_limit(changes: Values, is_captured: bool) -> None:
    assert (Built(config=changes).layer.charm_limit is not None) == is_captured
