"""Runs a training script of one's own with the attention modules in place, and the script unchanged.

Megatron has no place to register a core attention. Layer specs take the class by its name from
`megatron.core.extensions.transformer_engine`, many of them when they are imported; so the name is bound to ours
after that module and before all others are imported.
"""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from charm_megatron.config import CharmConfig
from charm_megatron.errors import InvalidInput
from charm_megatron.log import Log
from charm_megatron.mcore.bridge import Notices, SplitAttention
from charm_megatron.mcore.compat import require_megatron, wheel_repairs


def run_script(script: Path, arguments: Sequence[str], config: CharmConfig, log: Log | None) -> None:
    """Runs `script` as Python would, `arguments` its command line; layers with cp_comm_type "charm" are ours.

    For one rank, in its own process: torchrun or srun starts as many. What the script raises comes through.
    `log` gets what was installed, the receipt, and what is left to Transformer Engine.
    """
    if not script.is_file():
        raise InvalidInput(
            f"{script} is not a file; give the training script to run, such as pretrain_gpt.py"
        )
    require_megatron()
    import megatron.core  # noqa: F401  # before everything else of Megatron

    from charm_megatron.executor import AttentionRuntime
    from charm_megatron.mcore.install import charm_attention_installed
    from charm_megatron.mcore.logger import numbers_in_megatron_logs

    attention = SplitAttention(AttentionRuntime(config), Notices(log))
    path = [str(script.parent.absolute()), *sys.path]
    with (
        charm_attention_installed(attention) as installed,
        wheel_repairs(),
        numbers_in_megatron_logs(attention),
        mock.patch.object(sys, "argv", [str(script), *arguments]),
        mock.patch.object(sys, "path", path),
    ):
        attention.notices.once("installed", lambda: [_installed_line(has_te=installed.te is not None)])
        runpy.run_path(str(script), run_name="__main__")


def _installed_line(has_te: bool) -> str:
    if has_te:
        return "--cp-comm-type charm is installed, in TEDotProductAttention"
    return (
        "--cp-comm-type charm is installed; there is no Transformer Engine, so pass --transformer-impl local"
    )
