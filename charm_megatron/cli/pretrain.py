"""`charm-megatron pretrain`: a run of Megatron's training loop."""

import os
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from charm_megatron.cli import options
from charm_megatron.cli.errors import EXIT_INTERRUPTED
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
    trust_folder: Annotated[
        bool,
        typer.Option(
            "--trust-folder",
            help="Resume although others may write to --out; loading runs code that is in it.",
        ),
    ] = False,
) -> None:
    """Pretrain a GPT with Megatron's training loop on text, byte by byte.

    Starts its ranks itself, unless RANK and WORLD_SIZE say that it is one of torchrun's. Under srun: one torchrun a
    node, as scripts/slurm/pretrain.sbatch does.
    """
    from rich.console import Console

    from charm_megatron.config import load_run_config
    from charm_megatron.processes.environment import is_rank, require_single_task
    from charm_megatron.train.external import run_as_rank
    from charm_megatron.train.pretrain import run_pretrain
    from charm_megatron.train.progress import TerminalView, print_summary
    from charm_megatron.train.run_folder import RunFolder, default_path

    run_config = load_run_config(config, settings)
    console = Console()
    if is_rank(os.environ):
        summary = run_as_rank(run_config, out, resume, os.environ, typer.echo, trust_folder)
    else:
        require_single_task(os.environ)
        if resume and out is None:
            raise InvalidInput("--resume needs --out, the folder of the run to continue")
        path = out or default_path(config, datetime.now())
        try:
            summary = run_pretrain(run_config, path, resume, TerminalView(console), trust_folder)
        except KeyboardInterrupt as error:
            typer.echo(f"interrupted; {RunFolder(path.absolute()).standing()}", err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from error
    if summary is not None:
        print_summary(console, summary)
