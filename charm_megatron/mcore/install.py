"""Puts the attention module into the models that Megatron builds."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from charm_megatron.mcore.attention import core_attention_class
from charm_megatron.mcore.compat import require_megatron
from charm_megatron.mcore.swap import swapped

if TYPE_CHECKING:
    from charm_megatron.executor import AttentionRuntime

LOCAL_CORE_ATTENTION = "megatron.core.models.backends:LocalSpecProvider.core_attention"


@contextmanager
def charm_attention_installed(runtime: "AttentionRuntime") -> Iterator[type[Any]]:
    """Models that Megatron builds inside the block from local layer specs attend through `runtime`.

    Yields the module class. The replaced method is what every local spec asks for its core attention, in
    decoder layers and in the layers for multi-token prediction (which Megatron builds from a spec of their
    own, so that a changed decoder spec would miss them), whatever was imported before.
    """
    require_megatron()
    module_class = core_attention_class(runtime)

    def core_attention(self: Any) -> type[Any]:
        return module_class

    with swapped(LOCAL_CORE_ATTENTION, core_attention):
        yield module_class
