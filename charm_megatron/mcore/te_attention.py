"""Megatron's Transformer Engine attention, with our schedules behind `--cp-comm-type charm`.

The class derives from `megatron.core`'s `TEDotProductAttention` and keeps its constructor, its `forward` and
its state. A layer acts on its own only where its cp_comm_type is "charm" and its group has more than one rank;
everything else, and what is not done here (`limits.py`), is the base class's, whose ring ("p2p") then splits the
sequence. Shapes as in `attention.py`.

Read in megatron-core 0.16.1 and 0.19.2: the base class passes an unknown cp_comm_type on to Transformer Engine,
which refuses it in its first forward only; hence "p2p" is what the base class is given.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from charm_megatron.errors import InvalidInput
from charm_megatron.mcore import CP_COMM_TYPE
from charm_megatron.mcore.bridge import SplitAttention
from charm_megatron.mcore.compat import megatron_te, require_te
from charm_megatron.mcore.limits import Layer, Limit, call_limit, check_group, layer_limit, sink_limit

RING = "p2p"
"""The cp_comm_type of Transformer Engine that does everything we leave to it."""


def te_core_attention_class(attention: SplitAttention, strict: bool = False) -> type[Any]:
    """Makes the subclass of `TEDotProductAttention` that computes with `attention`.

    A factory, because without Transformer Engine the name of the base class is a mock object, from which a class
    statement silently makes another mock. Raises `InvalidInput` there. `strict`: what would be left to
    Transformer Engine is refused.
    """
    require_te()
    te = megatron_te()
    assert te is not None, "require_te has found it"
    base: Any = te.TEDotProductAttention

    class CharmTEDotProductAttention(base):
        """`TEDotProductAttention` that knows the cp_comm_type "charm"."""

        charm_is_on = False
        """Whether this layer computes by itself: its cp_comm_type is "charm", and its sequence is split."""

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
            num_splits: int | None = None,
            cp_comm_type: str | None = "p2p",
            pg_collection: Any = None,
        ) -> None:
            _check_hierarchical(te, config, layer_number, cp_comm_type)
            layer = Layer(config, layer_number, attention_type, attention_dropout, num_splits)
            is_on = cp_comm_type == CP_COMM_TYPE and config.context_parallel_size > 1
            limit = (sink_limit(layer) or layer_limit(layer)) if is_on else None
            if strict and limit is not None:
                raise _refusal(layer, limit)
            super().__init__(
                config=config,
                layer_number=layer_number,
                attn_mask_type=attn_mask_type,
                attention_type=attention_type,
                attention_dropout=attention_dropout,
                softmax_scale=softmax_scale,
                k_channels=k_channels,
                v_channels=v_channels,
                num_splits=num_splits,
                cp_comm_type=RING if cp_comm_type == CP_COMM_TYPE else cp_comm_type,
                pg_collection=pg_collection,
            )
            self.charm_is_on, self.charm_layer, self.charm_limit = is_on, layer, limit
            self.charm_group = self.cp_group
            # As the base class: only both together count.
            head_dim = config.kv_channels if k_channels is None or v_channels is None else k_channels
            self.charm_softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
            if is_on:
                check_group(layer, self.charm_group)
                left_to = f"left to Transformer Engine's {RING} ring, for {limit.what}" if limit else ""
                attention.add_layer(layer, left_to)

        def set_context_parallel_group(
            self,
            cp_group: Any,
            cp_global_ranks: list[int],
            cp_stream: Any,
            cp_comm_type: str = "p2p",
            **others: Any,
        ) -> None:
            """As in Transformer Engine: what sets up groups late, or other ones, calls it."""
            if self.charm_is_on:
                _check_layout(self.charm_layer, **others)
                _check_one_group(self.charm_layer, cp_group)
                self.charm_group, cp_comm_type = cp_group, RING
            super().set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type, **others)

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            attn_mask_type: Any,
            attention_bias: Tensor | None = None,
            packed_seq_params: Any = None,
            num_splits: int | None = None,
        ) -> Tensor:
            """Query [s, b, h, d], key [s, b, hk, d], value [s, b, hk, dv] -> [s, b, h*dv], in query's dtype.

            `attention_mask` does not count for the mask types that are done here, as in Transformer Engine.
            """
            group = self._group_of_split_call(packed_seq_params)
            if group is not None:
                layer = self.charm_layer
                limit = self.charm_limit or call_limit(
                    layer, query, key, attn_mask_type, attention_bias, packed_seq_params, num_splits
                )
                if limit is None:
                    scale = self.charm_softmax_scale
                    return attention(
                        layer, query, key, value, attn_mask_type, group=group, softmax_scale=scale
                    )
                self._leave_to_te(limit, packed_seq_params)
            out: Tensor = super().forward(
                query,
                key,
                value,
                attention_mask,
                attn_mask_type,
                attention_bias=attention_bias,
                packed_seq_params=packed_seq_params,
                num_splits=num_splits,
            )
            return out

        def _group_of_split_call(self, packed_seq_params: Any) -> Any:
            """The group over which a call's sequence is split and we are to compute; else None."""
            if not self.charm_is_on:
                return None
            group = _group_of_call(self.charm_layer, self.charm_group, packed_seq_params)
            return group if group is not None and group.size() > 1 else None

        def _leave_to_te(self, limit: Limit, packed_seq_params: Any) -> None:
            """Logs why the base class computes a call, and hands it the group that it may have lost."""
            if strict:
                raise _refusal(self.charm_layer, limit)
            attention.notices.once(
                limit.what,
                lambda: [
                    f"{limit.what}: left to Transformer Engine's {RING} ring (layer {self.charm_layer.number})"
                ],
            )
            if not _has_own_group(packed_seq_params) and self.cp_group is not self.charm_group:
                # A call with a group of its own changes the base class's for all later ones.
                ranks = dist.get_process_group_ranks(self.charm_group)
                super().set_context_parallel_group(self.charm_group, ranks, self.cp_stream, RING)

    return CharmTEDotProductAttention


def _has_own_group(packed_seq_params: Any) -> bool:
    return packed_seq_params is not None and (
        packed_seq_params.cp_group is not None or packed_seq_params.local_cp_size is not None
    )


def _group_of_call(layer: Layer, group: Any, packed_seq_params: Any) -> Any:
    """The group of one call: its own where it brings one; None where it switches context parallelism off.

    Raises `InvalidInput` where there should be a group and is none: Transformer Engine would take each rank's
    part of the sequence for a sequence of its own.
    """
    if packed_seq_params is not None and packed_seq_params.cp_group is not None:
        return packed_seq_params.cp_group
    if _has_own_group(packed_seq_params):
        return None  # local_cp_size 1, as the base class asserts
    if group is None:
        raise InvalidInput(
            f"layer {layer.number} has no context-parallel group, but context_parallel_size is "
            f"{layer.config.context_parallel_size}; call parallel_state.initialize_model_parallel() before the "
            f"model is built, or set_context_parallel_group() after"
        )
    return group


def _check_layout(layer: Layer, load_balancing_strategy: Any = None, **_: Any) -> None:
    """Refuses a split of the sequence other than the zigzag. Transformer Engine has another since 2.20."""
    name = getattr(load_balancing_strategy, "value", "dual_chunk_swap")
    if name != "dual_chunk_swap":
        raise InvalidInput(
            f"layer {layer.number}: charm does not do load_balancing_strategy {name!r}; leave it at "
            f"'dual_chunk_swap', Megatron's own"
        )


def _check_one_group(layer: Layer, cp_group: Any) -> None:
    """Refuses the two levels of groups that Transformer Engine's "a2a+p2p" takes."""
    if isinstance(cp_group, list | tuple):
        raise InvalidInput(
            f"layer {layer.number}: charm takes one context-parallel group, but is given {len(cp_group)}; its levels "
            f"are domains of that group, set by charm.domains"
        )


def _check_hierarchical(te: Any, config: Any, layer_number: int, cp_comm_type: str | None) -> None:
    """Refuses "a2a+p2p" without its groups: upstream then computes as if there were one rank, without a word."""
    if cp_comm_type != "a2a+p2p" or config.context_parallel_size == 1:
        return
    if not te.get_hierarchical_context_parallel_groups(check_initialized=False):
        raise InvalidInput(
            f"layer {layer_number} has cp_comm_type 'a2a+p2p', but there are no hierarchical context-parallel "
            f"groups, and Transformer Engine would not split the sequence at all; pass "
            f"--hierarchical-context-parallel-sizes"
        )


def _refusal(layer: Layer, limit: Limit) -> InvalidInput:
    return InvalidInput(
        f"layer {layer.number}: charm does not do {limit}; or set charm.strict to false, which leaves it to "
        f"Transformer Engine"
    )
