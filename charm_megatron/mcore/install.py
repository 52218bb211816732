"""Puts the attention modules into the models that Megatron builds."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from charm_megatron.errors import CharmError, InvalidInput
from charm_megatron.mcore import CP_COMM_TYPE
from charm_megatron.mcore.attention import core_attention_class
from charm_megatron.mcore.bridge import SplitAttention
from charm_megatron.mcore.compat import TE_EXTENSION, megatron_te, require_megatron
from charm_megatron.mcore.monkeypatch import swapped, wrapped
from charm_megatron.mcore.references import find_holders
from charm_megatron.mcore.te_attention import te_core_attention_class

LOCAL_CORE_ATTENTION = "megatron.core.models.backends:LocalSpecProvider.core_attention"
TE_CLASS_INIT = f"{TE_EXTENSION}:TEDotProductAttention.__init__"


class Installed(NamedTuple):
    """The module classes that are in place; `te` is None without Transformer Engine."""

    local: type[Any]
    te: type[Any] | None


@contextmanager
def charm_attention_installed(attention: SplitAttention) -> Iterator[Installed]:
    """Models that Megatron builds inside the block attend through `attention`, whatever was imported before.

    Local specs ask one method for their core attention, in decoder layers and in the layers for multi-token
    prediction (which Megatron builds from a spec of their own, so that a changed decoder spec would miss them).
    Specs of Transformer Engine take a class by its name, or were made with it at import: it is replaced in
    every loaded module and ready-made spec.
    """
    require_megatron()
    te = megatron_te()
    local = core_attention_class(attention)

    def core_attention(self: Any) -> type[Any]:
        return local

    with ExitStack() as stack:
        stack.enter_context(swapped(LOCAL_CORE_ATTENTION, core_attention))
        ours = None
        if te is not None:
            stock = te.TEDotProductAttention
            ours = te_core_attention_class(attention, attention.runtime.config.strict)
            stack.enter_context(wrapped(TE_CLASS_INIT, functools.partial(_refuse_charm, ours)))
            stack.enter_context(_in_place_of(stock, ours))
        yield Installed(local, ours)


@contextmanager
def _in_place_of(stock: type[Any], ours: type[Any]) -> Iterator[None]:
    """Replaces `stock` by `ours` wherever it is held inside the block."""
    _replace_everywhere(stock, ours)
    try:
        yield
    finally:
        _replace_everywhere(ours, stock)


def _replace_everywhere(old: type[Any], new: type[Any]) -> None:
    for holder in find_holders(old):
        if holder.replace is not None:
            holder.replace(new)
    left = [holder.where for holder in find_holders(old)]
    if left:
        raise CharmError(
            f"{old.__name__} cannot be replaced in {', '.join(left)}; import that module after "
            f"charm_megatron has been installed, or build its spec in a function"
        )


def _refuse_charm(ours: type[Any], init: Callable[..., None]) -> Callable[..., None]:
    """Lets no layer with cp_comm_type "charm" be built from a class that does not know it."""

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("cp_comm_type") == CP_COMM_TYPE and not isinstance(self, ours):
            cls = type(self)
            raise InvalidInput(
                f"a layer with cp_comm_type {CP_COMM_TYPE!r} is built from {cls.__module__}.{cls.__qualname__}, "
                f"not from charm_megatron's class; give its spec megatron.core.extensions.transformer_engine's "
                f"TEDotProductAttention, looked up when the spec is built"
            )
        init(self, *args, **kwargs)

    return checked
