"""Megatron's core attention module for layers with `--cp-comm-type charm`, built on torch alone.

It takes the place of Megatron's `DotProductAttention`, which refuses context parallelism. Its constructor
and `forward` have the signatures of `megatron.core`'s `TEDotProductAttention`, so `Attention`,
`MultiLatentAttention` and multi-token prediction build and call it as they would that class. The subclass of
`TEDotProductAttention` for machines with Transformer Engine is beside it, in `te_attention.py`.

Shapes: s tokens of this rank, b sequences, h query heads and hk KV heads of this tensor-parallel rank, d the
width of a head of q and k, dv that of v.
"""

import copy
from typing import Any

from torch import Tensor

from charm_megatron.errors import InvalidInput
from charm_megatron.mcore import CP_COMM_TYPE
from charm_megatron.mcore.bridge import SplitAttention
from charm_megatron.mcore.limits import Layer, call_limit, check_group, check_supported, unsupported


def core_attention_class(attention: SplitAttention) -> type[Any]:
    """Makes the module class that computes with `attention`.

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
            self.charm_layer = Layer(config, layer_number, attention_type, attention_dropout)
            head_dim = config.kv_channels if k_channels is None else k_channels
            # Not the base class's own, which it shrinks for half precision and undoes after the product.
            self.charm_softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
            check_group(self.charm_layer, self.cp_group)
            if self.cp_group.size() > 1:
                check_supported(self.charm_layer, cp_comm_type)
                attention.add_layer(self.charm_layer)

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
            """Query [s, b, h, d], key [s, b, hk, d], value [s, b, hk, dv] -> [s, b, h*dv], in query's dtype."""
            if self.cp_group.size() == 1:
                out: Tensor = super().forward(
                    query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
                )
                return out
            attn_mask_type = attn_mask_type or self.attn_mask_type
            _check_call(self.cp_comm_type, attention_mask, packed_seq_params)
            limit = call_limit(self.charm_layer, query, key, attn_mask_type, attention_bias)
            if limit is not None:
                raise unsupported(self.charm_layer, limit)
            return attention(
                self.charm_layer,
                query,
                key,
                value,
                attn_mask_type,
                group=self.cp_group,
                softmax_scale=self.charm_softmax_scale,
                sink=getattr(self, "softmax_offset", None),  # megatron-core 0.16 may have none
            )

    return CharmDotProductAttention


def _check_call(cp_comm_type: str | None, attention_mask: Tensor | None, packed_seq_params: Any) -> None:
    if cp_comm_type is None:
        raise InvalidInput(
            f"context-parallel attention was built without a cp_comm_type; pass --cp-comm-type {CP_COMM_TYPE}"
        )
    if packed_seq_params is not None:
        raise InvalidInput("context parallelism does not support packed sequences (packed_seq_params) yet")
    if attention_mask is not None:
        # Megatron's own module would apply it, so to ignore it could change the result without a word.
        raise InvalidInput(
            "context parallelism does not support an explicit attention_mask, only the causal one and none; "
            "pass --no-create-attention-mask-in-dataloader"
        )
