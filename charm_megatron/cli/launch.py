"""`charm-megatron launch`: one rank of somebody's own Megatron script."""

import os
from pathlib import Path
from typing import Annotated

import typer


def launch_command(
    script: Annotated[Path, typer.Argument(help="Training script, such as Megatron-LM's pretrain_gpt.py.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own command line.")] = None,
    charm_config: Annotated[
        Path | None,
        typer.Option(
            "--charm-config",
            envvar="CHARM_CONFIG",
            help="YAML file with settings of the attention, before SCRIPT.",
        ),
    ] = None,
) -> None:
    """Run a Megatron training script, unchanged, with `--cp-comm-type charm`.

    For one rank; torchrun and srun start many: torchrun --nproc-per-node 8 -m charm_megatron.launch SCRIPT ...
    """
    from charm_megatron.config import CharmConfig, load_charm_config
    from charm_megatron.mcore.launcher import run_script

    config = load_charm_config(charm_config) if charm_config else CharmConfig()
    is_first = os.environ.get("RANK", "0") == "0"
    run_script(script, arguments or [], config, typer.echo if is_first else None)
