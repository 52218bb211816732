"""What Megatron can ask of a core attention, and which of it the context-parallel attention does not do.

Every answer here follows from settings and sizes that are equal on all ranks of a group, so that the ranks of
a group always take the same way.
"""

from typing import Any, NamedTuple

from torch import Tensor

from charm_megatron.errors import InvalidInput
from charm_megatron.mcore import CP_COMM_TYPE
from charm_megatron.workload import Mask


class Limit(NamedTuple):
    """Something asked for that is not done, and how to do without it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


class Layer(NamedTuple):
    """What the constructor of a core attention is told."""

    config: Any
    number: int
    attention_type: str = "self"
    dropout: float | None = None
    num_splits: int | None = None

    @property
    def window(self) -> tuple[int, int] | None:
        """Tokens to the left and to the right that a query sees, -1 without bound; None: no window here."""
        from megatron.core.transformer.utils import is_layer_window_attention

        config = self.config
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.number):
            left, right = config.window_size
            return left, right
        return None


def sink_limit(layer: Layer) -> Limit | None:
    """Whether a layer's softmax has a sink, which is left to Transformer Engine where its classes are used."""
    kind = layer.config.softmax_type
    return (
        None if kind == "vanilla" else Limit(f"softmax_type {kind!r}", "Transformer Engine's 'a2a' does it")
    )


def layer_limit(layer: Layer) -> Limit | None:
    """The first thing about a layer that keeps it from being computed with its sequence split."""
    config = layer.config
    dropout = config.attention_dropout if layer.dropout is None else layer.dropout
    found = {
        Limit(f"attention_dropout {dropout}", "set it to 0"): dropout > 0,
        Limit(f"attention of type {layer.attention_type!r}", "only 'self' is done"): (
            layer.attention_type != "self"
        ),
        Limit("qk_clip", "switch it off"): getattr(config, "qk_clip", False),
        Limit("log_max_attention_logit", "switch it off"): getattr(config, "log_max_attention_logit", False),
        Limit("fp8_dot_product_attention", "switch it off"): config.fp8_dot_product_attention,
        Limit("fp8_multi_head_attention", "switch it off"): config.fp8_multi_head_attention,
        Limit(f"num_splits {layer.num_splits}", "leave it out"): layer.num_splits is not None,
        Limit("batch_invariant_mode", "switch it off"): getattr(config, "batch_invariant_mode", False),
        Limit("attention inside a CUDA graph", "capture other modules only, such as mlp"): (
            _is_captured(config)
        ),
    }
    return next((limit for limit, is_present in found.items() if is_present), None)


def _is_captured(config: Any) -> bool:
    """Whether attention is recorded into a CUDA graph; an empty list of modules means all of a layer."""
    if getattr(config, "cuda_graph_impl", "none") == "none":
        return False
    # megatron-core 0.16 has the list under its older name.
    modules = getattr(config, "cuda_graph_modules", getattr(config, "cuda_graph_scope", None)) or []
    names = {
        getattr(module, "name", module) for module in ([modules] if isinstance(modules, str) else modules)
    }
    return not names or bool(names & {"attn", "full", "full_iteration"})


def call_limit(
    layer: Layer,
    query: Tensor,
    key: Tensor,
    attn_mask_type: Any,
    attention_bias: Tensor | None = None,
    packed_seq_params: Any = None,
    num_splits: int | None = None,
) -> Limit | None:
    """The first thing about a call that keeps it from being computed with its sequence split.

    query [s, b, h, d] and key [s, b, hk, d]; of packed documents [t, h, d] and [t, hk, d].
    """
    window, mask = layer.window, attn_mask_type.name
    qkv_format = getattr(packed_seq_params, "qkv_format", None) or "sbhd"
    found = {
        Limit(f"packed sequences (packed_seq_params with qkv_format {qkv_format!r})", "do not pack"): (
            qkv_format != "sbhd" or query.dim() != 4
        ),
        Limit("an attention_bias", "leave it out"): attention_bias is not None,
        Limit(f"mask type {mask!r}", "'causal' and 'no_mask' are done"): mask not in ("causal", "no_mask"),
        Limit(f"a causal window that reaches into the future, {window}", "make its second number 0"): (
            window is not None and mask == "causal" and window[1] > 0
        ),
        Limit(
            "a key whose length differs from the query's, as with a KV cache",
            "use context parallelism to train",
        ): (query.shape[0] != key.shape[0]),
        Limit(f"num_splits {num_splits}", "leave it out"): num_splits is not None,
    }
    return next((limit for limit, is_present in found.items() if is_present), None)


def loss_notices(config: Any, args: Any) -> tuple[str, ...]:
    """What to say where the loss counts other numbers of tokens on each rank of a group, and Megatron divides by them.

    `config` is the model's; `args` Megatron's arguments, or None: then nothing is known of the data.
    """
    reasons = [name for name in ("sft", "eod_mask_loss") if getattr(args, name, False)]
    if not reasons or config.calculate_per_token_loss:
        return ()
    return (
        f"warning: the loss mask differs between context-parallel ranks ({reasons[0]}), and Megatron divides by each "
        f"rank's own count of tokens: gradients differ from those of one rank; --calculate-per-token-loss makes them "
        f"equal",
    )


def mask_of(layer: Layer, attn_mask_type: Any) -> Mask:
    """The mask of a call that has no `call_limit`."""
    left, right = layer.window or (-1, -1)
    if attn_mask_type.name == "causal":
        right = 0
    return Mask(None if left < 0 else left, None if right < 0 else right)


def check_group(layer: Layer, group: Any) -> None:
    """Raises `InvalidInput` for a context-parallel group of another size than the model's configuration says.

    No group is no fault here: it may be set later.
    """
    wanted = layer.config.context_parallel_size
    if group is not None and group.size() != wanted:
        raise InvalidInput(
            f"layer {layer.number}: the context-parallel group has {group.size()} ranks, but "
            f"context_parallel_size is {wanted}; initialize_model_parallel(context_parallel_size={wanted}) makes "
            f"groups that fit"
        )


def check_supported(layer: Layer, cp_comm_type: str | None = None) -> None:
    """Raises `InvalidInput` for a layer that torch alone cannot compute with its sequence split over ranks.

    `cp_comm_type` may be None here: multi-latent attention builds its module twice, the first time without
    it, and throws that one away.
    """
    if cp_comm_type not in (CP_COMM_TYPE, None):
        raise InvalidInput(
            f"layer {layer.number} has cp_comm_type {cp_comm_type!r}, which needs Transformer Engine; "
            f"without it every layer must have {CP_COMM_TYPE!r}"
        )
    limit = layer_limit(layer)
    if limit is not None:
        raise unsupported(layer, limit)


def unsupported(layer: Layer, limit: Limit) -> InvalidInput:
    """The refusal where nothing else computes what was asked for."""
    return InvalidInput(f"layer {layer.number}: context parallelism does not support {limit}")
