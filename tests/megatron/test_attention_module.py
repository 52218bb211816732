"""The module asks the runtime for what Megatron asked of it, and refuses the rest in one sentence."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from charm_megatron.errors import InvalidInput
from charm_megatron.mcore.attention import core_attention_class
from charm_megatron.mcore.bridge import Notices, SplitAttention
from charm_megatron.mcore.install import charm_attention_installed
from charm_megatron.workload import CAUSAL, NO_MASK, Mask

pytestmark = [
    pytest.mark.megatron,
    # Of the defaults of its own configuration.
    pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning"),
]

Values = dict[str, Any]


class FakeGroup:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


class FakeRuntime:
    """Answers with the query, its heads cut to the width of the values."""

    def __init__(self) -> None:
        self.asked: Values = {}

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **asked: Any) -> Tensor:
        self.asked = asked
        return query[..., : value.shape[-1]]

    def receipt(self, *_: Any, **__: Any) -> Any:
        plan = SimpleNamespace(name="fake")
        return SimpleNamespace(plan=plan, lines=lambda: ["receipt"], schedule_line="fake, as set")


def build(
    runtime: FakeRuntime,
    cp_size: int = 2,
    config: Values | None = None,
    attention: SplitAttention | None = None,
    **arguments: Any,
) -> Any:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "attention_dropout": 0.0}
    return core_attention_class(attention or SplitAttention(runtime))(  # type: ignore[arg-type]
        **{
            "config": TransformerConfig(**{**sizes, "context_parallel_size": cp_size, **(config or {})}),
            "layer_number": 1,
            "attn_mask_type": AttnMaskType.causal,
            "attention_type": "self",
            "cp_comm_type": "charm",
            "pg_collection": SimpleNamespace(tp=FakeGroup(1), cp=FakeGroup(cp_size)),
            **arguments,
        }
    )


def qkv(head_dim: int = 8, head_dim_v: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(6, 2, 4, head_dim), torch.randn(6, 2, 2, head_dim), torch.randn(6, 2, 2, head_dim_v)


def test_heads_are_joined_and_the_group_and_scale_are_passed_on() -> None:
    runtime = FakeRuntime()
    module = build(runtime)
    query, key, value = qkv()
    out = module(query, key, value, None, attn_mask_type=AttnMaskType.causal)
    assert torch.equal(out, query.reshape(6, 2, 32))
    assert runtime.asked.pop("checked").name == "layer 1"
    assert runtime.asked == {"group": module.cp_group, "mask": CAUSAL, "softmax_scale": 8**-0.5, "sink": None}


def test_the_receipt_has_a_line_for_each_kind_of_layer_and_for_each_plan() -> None:
    runtime, said = FakeRuntime(), []
    attention = SplitAttention(runtime, Notices(said.append))  # type: ignore[arg-type]
    config: Values = {"window_size": (4, 0), "window_attn_skip_freq": 3, "num_layers": 7}
    layers = [build(runtime, config=config, attention=attention, layer_number=n) for n in range(1, 8)]
    for layer in layers:
        layer(*qkv(), None, attn_mask_type=AttnMaskType.causal)
    assert said == [
        "charm-megatron: receipt",
        "charm-megatron: layers 1-2, 4-5, 7: window 4,0, 4 on 4 heads: computed by charm",
        "charm-megatron: layers 3, 6: no window, 4 on 4 heads: computed by charm",
        "charm-megatron: layer 3, 2 x 12 tokens, 4 on 2 heads of 8 and 8, float32, mask causal: fake, as set",
    ]


def test_a_group_of_another_size_than_the_configuration_says_is_refused() -> None:
    groups = SimpleNamespace(tp=FakeGroup(1), cp=FakeGroup(3))
    with pytest.raises(
        InvalidInput, match="group has 3 ranks, but context_parallel_size is 2; initialize_model"
    ):
        build(FakeRuntime(), pg_collection=groups)


def test_scale_and_mask_of_the_layer_are_used() -> None:
    runtime = FakeRuntime()
    build(runtime, softmax_scale=0.5)(*qkv(), None, attn_mask_type=AttnMaskType.no_mask)
    assert (runtime.asked["softmax_scale"], runtime.asked["mask"]) == (0.5, NO_MASK)
    build(runtime, attn_mask_type=AttnMaskType.no_mask)(*qkv(), None)
    assert runtime.asked["mask"] == NO_MASK


def test_layers_have_their_own_windows() -> None:
    """With a frequency of 2 every second layer sees everything."""
    config: Values = {"window_size": (4, 0), "window_attn_skip_freq": 2}
    for layer_number, mask in ((1, Mask(4, 0)), (2, CAUSAL)):
        runtime = FakeRuntime()
        build(runtime, config=config, layer_number=layer_number)(*qkv(), None)
        assert runtime.asked["mask"] == mask


def test_query_and_value_heads_may_differ_in_width() -> None:
    runtime = FakeRuntime()
    out = build(runtime, k_channels=12, v_channels=8)(*qkv(12, 8), None)
    assert out.shape == (6, 2, 32)
    assert runtime.asked["softmax_scale"] == 12**-0.5


@pytest.mark.parametrize(
    ("config", "arguments", "sentence"),
    [
        ({"attention_dropout": 0.1}, {}, "attention_dropout 0.1; set it to 0"),
        ({}, {"attention_dropout": 0.1}, "attention_dropout 0.1; set it to 0"),
        ({"fp8": "e4m3", "fp8_dot_product_attention": True}, {}, "fp8_dot_product_attention; switch it off"),
        ({}, {"attention_type": "cross"}, "attention of type 'cross'"),
        ({}, {"cp_comm_type": "p2p"}, "layer 1 has cp_comm_type 'p2p', which needs Transformer Engine"),
    ],
)
def test_a_layer_that_cannot_be_split_is_refused(config: Values, arguments: Values, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        build(FakeRuntime(), config=config, **arguments)
    build(FakeRuntime(), cp_size=1, config=config, **arguments)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ({"packed_seq_params": object()}, "packed sequences"),
        ({"attention_bias": torch.zeros(1)}, "attention_bias"),
        ({"attention_mask": torch.zeros(1)}, "pass --no-create-attention-mask-in-dataloader"),
        ({"attn_mask_type": AttnMaskType.padding}, "mask type 'padding'"),
    ],
)
def test_a_call_that_cannot_be_split_is_refused(call: Values, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        build(FakeRuntime())(*qkv(), **{"attention_mask": None, **call})


def test_a_layer_without_cp_comm_type_is_refused_when_it_is_used() -> None:
    """Multi-latent attention builds such a one, and throws it away."""
    with pytest.raises(InvalidInput, match="pass --cp-comm-type charm"):
        build(FakeRuntime(), cp_comm_type=None)(*qkv(), None)


def test_local_layer_specs_hold_the_module_only_while_it_is_installed() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    def core_attention() -> Any:
        return get_gpt_layer_local_spec().submodules.self_attention.submodules.core_attention

    with charm_attention_installed(SplitAttention(FakeRuntime())) as installed:  # type: ignore[arg-type]
        assert core_attention() is installed.local
        assert issubclass(installed.local, DotProductAttention)
    assert core_attention() is DotProductAttention
