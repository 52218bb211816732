"""What a patched Megatron asks for its core attention (see `patches/`).

Settings come from `--charm-config FILE`, or from the file that CHARM_CONFIG names where Megatron's own arguments are
not in use; FILE has the keys of section `charm`.
"""

import functools
import os
from pathlib import Path
from typing import Any

from charm_megatron.config import CharmConfig, load_charm_config
from charm_megatron.mcore import CP_COMM_TYPE
from charm_megatron.mcore.attention import core_attention_class
from charm_megatron.mcore.bridge import Notices, SplitAttention
from charm_megatron.mcore.compat import megatron_te, training_arguments
from charm_megatron.mcore.install import Installed
from charm_megatron.mcore.spec import CONFIG_VARIABLE
from charm_megatron.mcore.te_attention import te_core_attention_class


def core_attention(stock: type[Any]) -> type[Any]:
    """The class that layers are built with in place of `stock`; `stock` itself unless the run asks for ours.

    A run asks with `--cp-comm-type charm`, for all layers or some, with `--charm-config`, or with CHARM_CONFIG.
    """
    args = training_arguments()
    path = getattr(args, "charm_config", None) or os.environ.get(CONFIG_VARIABLE)
    if path is None and CP_COMM_TYPE not in (getattr(args, "cp_comm_type", None) or ()):
        return stock
    classes = _module_classes(path)
    return classes.te if classes.te is not None and issubclass(classes.te, stock) else classes.local


@functools.cache
def _module_classes(path: str | None) -> Installed:
    """The classes for all layers of the process, so that they share groups, plans and buffers."""
    from charm_megatron.executor import AttentionRuntime

    config = CharmConfig() if path is None else load_charm_config(Path(path))
    attention = SplitAttention(AttentionRuntime(config), Notices())
    te = te_core_attention_class(attention, config.strict) if megatron_te() is not None else None
    return Installed(core_attention_class(attention), te)
