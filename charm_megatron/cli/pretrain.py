"""`charm-megatron pretrain`: a run of Megatron's training loop."""

import os
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from charm_megatron.cli import options
from charm_megatron.errors import InvalidInput


def pretrain_command(
    config: options.ConfigFile,
    out: Annotated[
        Path | None, typer.Option(help="Run folder. By default runs/<name of the file>-<time>.")
    ] = None,
    settings: options.Overrides = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the newest checkpoint in --out, also at another CP size."),
    ] = False,
) -> None:
    """Pretrain a GPT with Megatron's training loop on text, byte by byte.

    Starts its ranks itself, unless RANK and WORLD_SIZE say that it is one of torchrun's or srun's.
    """
    from rich.console import Console

    from charm_megatron.config import load_run_config
    from charm_megatron.processes.environment import is_rank
    from charm_megatron.train.external import run_as_rank
    from charm_megatron.train.pretrain import run_pretrain
    from charm_megatron.train.progress import TerminalView, print_summary
    from charm_megatron.train.run_folder import default_path

    run_config = load_run_config(config, settings)
    console = Console()
    if is_rank(os.environ):
        summary = run_as_rank(run_config, out, resume, os.environ)
    else:
        if resume and out is None:
            raise InvalidInput("--resume needs --out, the folder of the run to continue")
        path = out or default_path(config, datetime.now())
        summary = run_pretrain(run_config, path, resume, TerminalView(console))
    if summary is not None:
        print_summary(console, summary)
