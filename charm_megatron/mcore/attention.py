"""Megatron's core attention module for layers with `--cp-comm-type charm`, built on torch alone.

It takes the place of Megatron's `DotProductAttention`, which refuses context parallelism. Its constructor
and `forward` have the signatures of `megatron.core`'s `TEDotProductAttention`, so `Attention`,
`MultiLatentAttention` and multi-token prediction build and call it as they would that class. The subclass of
`TEDotProductAttention` for machines with Transformer Engine belongs beside it, in `te_attention.py`.

Shapes: s tokens of this rank, b sequences, h query heads and hk KV heads of this tensor-parallel rank, d the
width of a head of q and k, dv that of v.
"""

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor

from charm_megatron.errors import InvalidInput
from charm_megatron.mcore import CP_COMM_TYPE
from charm_megatron.workload import CAUSAL, NO_MASK, Mask

if TYPE_CHECKING:
    from charm_megatron.executor import AttentionRuntime


def core_attention_class(runtime: "AttentionRuntime") -> type[Any]:
    """Makes the module class that computes with `runtime`.

    A factory, because the base class exists only where megatron-core is installed, and because Megatron
    builds the module itself, without a way to hand it the runtime.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class CharmDotProductAttention(DotProductAttention):
        """Attention over a sequence that is split over the context-parallel group.

        In a group of one rank it is Megatron's own `DotProductAttention`, unchanged.
        """

        def __init__(
            self,
            config: Any,
            layer_number: int,
            attn_mask_type: Any,
            attention_type: str,
            attention_dropout: float | None = None,
            softmax_scale: float | None = None,
            k_channels: int | None = None,
            v_channels: int | None = None,
            cp_comm_type: str | None = None,
            pg_collection: Any = None,
        ) -> None:
            if pg_collection is None:
                pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
            # The base class only counts the ranks of the model's configuration, and refuses more than one.
            one_rank = copy.copy(config)
            one_rank.context_parallel_size = 1
            super().__init__(
                config=one_rank,
                layer_number=layer_number,
                attn_mask_type=attn_mask_type,
                attention_type=attention_type,
                attention_dropout=attention_dropout,
                softmax_scale=softmax_scale,
                pg_collection=pg_collection,
            )
            self.config = config
            self.cp_group = pg_collection.cp
            self.cp_comm_type = cp_comm_type
            head_dim = config.kv_channels if k_channels is None else k_channels
            # Not the base class's own, which it shrinks for half precision and undoes after the product.
            self.charm_softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
            if self.cp_group.size() > 1:
                check_supported(config, layer_number, attention_type, attention_dropout, cp_comm_type)

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            attn_mask_type: Any = None,
            attention_bias: Tensor | None = None,
            packed_seq_params: Any = None,
        ) -> Tensor:
            """Query [s, b, h, d], key [s, b, hk, d], value [s, b, hk, dv] -> [s, b, h*dv], in query's dtype.

            The tokens of this rank are those that Megatron gives it: the first and the last of 2 * cp_size
            chunks, counted from both ends (zigzag).
            """
            if self.cp_group.size() == 1:
                out: Tensor = super().forward(
                    query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
                )
                return out
            _check_call(self.cp_comm_type, attention_mask, attention_bias, packed_seq_params)
            out = runtime.attention(
                query,
                key,
                value,
                group=self.cp_group,
                mask=_mask(attn_mask_type or self.attn_mask_type),
                softmax_scale=self.charm_softmax_scale,
            )
            return out.flatten(2)  # [s, b, h, dv] -> [s, b, h*dv]

    return CharmDotProductAttention


def check_supported(
    config: Any,
    layer_number: int,
    attention_type: str = "self",
    attention_dropout: float | None = None,
    cp_comm_type: str | None = None,
) -> None:
    """Raises `InvalidInput` for a layer that cannot be computed with its sequence split over ranks.

    `config` is Megatron's `TransformerConfig`. `cp_comm_type` may be None here: multi-latent attention builds
    its module twice, the first time without it, and throws that one away.
    """
    from megatron.core.transformer.utils import is_layer_window_attention

    if cp_comm_type not in (CP_COMM_TYPE, None):
        raise InvalidInput(
            f"layer {layer_number} has cp_comm_type {cp_comm_type!r}, which needs Transformer Engine; "
            f"without it every layer must have {CP_COMM_TYPE!r}"
        )
    dropout = config.attention_dropout if attention_dropout is None else attention_dropout
    window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
    unsupported = {
        f"attention_dropout {dropout}; set it to 0": dropout > 0,
        f"a sliding window {config.window_size}; leave window_size out": window,
        f"softmax_type {config.softmax_type!r}; only 'vanilla' is": config.softmax_type != "vanilla",
        f"attention of type {attention_type!r}; only 'self' is": attention_type != "self",
        "qk_clip; switch it off": getattr(config, "qk_clip", False),
        "log_max_attention_logit; switch it off": getattr(config, "log_max_attention_logit", False),
    }
    for what, present in unsupported.items():
        if present:
            raise InvalidInput(f"layer {layer_number}: context parallelism does not support {what}")


def _check_call(
    cp_comm_type: str | None,
    attention_mask: Tensor | None,
    attention_bias: Tensor | None,
    packed_seq_params: Any,
) -> None:
    if cp_comm_type is None:
        raise InvalidInput(
            f"context-parallel attention was built without a cp_comm_type; pass --cp-comm-type {CP_COMM_TYPE}"
        )
    if packed_seq_params is not None:
        raise InvalidInput("context parallelism does not support packed sequences (packed_seq_params) yet")
    if attention_bias is not None:
        raise InvalidInput("context parallelism does not support an attention_bias")
    if attention_mask is not None:
        # Megatron's own module would apply it, so to ignore it could change the result without a word.
        raise InvalidInput(
            "context parallelism does not support an explicit attention_mask, only the causal one and none; "
            "pass --no-create-attention-mask-in-dataloader"
        )


def _mask(attn_mask_type: Any) -> Mask:
    from megatron.core.transformer.enums import AttnMaskType

    if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask):
        raise InvalidInput(
            f"context parallelism does not support mask type {attn_mask_type.name!r}; 'causal' and 'no_mask' are"
        )
    return CAUSAL if attn_mask_type == AttnMaskType.causal else NO_MASK
