"""Ways in for programs that choose their layer specs themselves.

* Megatron-LM: `--spec charm_megatron.mcore.spec layer_spec`, or `GPTModelConfig(transformer_layer_spec=layer_spec)`.
* Megatron-Bridge: `provider.transformer_layer_spec = with_charm(provider.transformer_layer_spec)`.

Each installs the attention modules for the rest of the process when the spec is asked for, and returns Megatron's
own spec; so layers for multi-token prediction, whose spec Megatron makes by itself, have them too. Settings come
from the YAML file that CHARM_CONFIG names, where it is set.
"""

import functools
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from charm_megatron.config import CharmConfig, load_charm_config
from charm_megatron.mcore.bridge import Notices, SplitAttention

CONFIG_VARIABLE = "CHARM_CONFIG"


@functools.cache
def install_for_good() -> ExitStack:
    """Installs the attention modules until the process ends; the second call does nothing.

    What it returns must be kept, as the cache does: the modules go with it.
    """
    from charm_megatron.executor import AttentionRuntime
    from charm_megatron.mcore.install import charm_attention_installed

    path = os.environ.get(CONFIG_VARIABLE)
    config = load_charm_config(Path(path)) if path else CharmConfig()
    stack = ExitStack()
    stack.enter_context(charm_attention_installed(SplitAttention(AttentionRuntime(config), Notices())))
    return stack


def with_charm[**P, Spec](make_spec: Callable[P, Spec]) -> Callable[P, Spec]:
    """`make_spec`, called with the attention modules in place. Its signature stays because callers look at it."""

    @functools.wraps(make_spec)
    def installed_first(*args: P.args, **kwargs: P.kwargs) -> Spec:
        install_for_good()
        return make_spec(*args, **kwargs)

    return installed_first


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """The spec that Megatron itself would choose for `config`, a `GPTModelConfig`, with our attention in it."""
    install_for_good()
    from megatron.training.models.gpt import default_layer_spec

    return default_layer_spec(config, vp_stage)
