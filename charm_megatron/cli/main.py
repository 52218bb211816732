"""`charm-megatron` and its subcommands.

Nothing heavy is imported before a subcommand needs it, so that `--help` answers at once.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from charm_megatron import __version__
from charm_megatron.errors import CharmError, InvalidInput

EXIT_FAILURE, EXIT_INVALID_INPUT, EXIT_INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="charm-megatron",
    help="Context-parallel attention for Megatron-LM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the command."""
    app()


@app.callback(invoke_without_command=True)
def _charm_megatron(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"charm-megatron {__version__}")
        raise typer.Exit


@app.command()
def pretrain(
    config: Annotated[Path, typer.Argument(help="YAML file: sections launch, charm, data and megatron.")],
    out: Annotated[
        Path | None, typer.Option(help="Run folder. By default runs/<name of the file>-<time>.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a value of the file; repeatable."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the newest checkpoint in --out, also at another CP size."),
    ] = False,
) -> None:
    """Pretrain a GPT with Megatron's training loop on text, byte by byte.

    Starts its ranks itself, unless RANK and WORLD_SIZE say that it is one of torchrun's or srun's.
    """
    with _errors_as_sentences():
        from rich.console import Console

        from charm_megatron.config import load_run_config
        from charm_megatron.train.external import is_rank, run_as_rank
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


@contextmanager
def _errors_as_sentences() -> Iterator[None]:
    """Ends the command with a sentence on stderr and an exit code, never with a traceback."""
    try:
        yield
    except InvalidInput as error:
        _complain(f"error: {' '.join(str(error).split())}")
        raise typer.Exit(EXIT_INVALID_INPUT) from error
    except CharmError as error:
        _complain(f"error: {error}")
        raise typer.Exit(EXIT_FAILURE) from error
    except KeyboardInterrupt as error:
        _complain("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from error


def _complain(sentence: str) -> None:
    print(sentence, file=sys.stderr)
