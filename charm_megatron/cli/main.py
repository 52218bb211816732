"""`charm-megatron` and its subcommands.

Nothing heavy is imported before a subcommand needs it, so that `--help` answers at once.
"""

import os
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from charm_megatron import __version__
from charm_megatron.cli import bench, testbed
from charm_megatron.cli.ablation import ablation_command, numerics_command
from charm_megatron.cli.check import check_command
from charm_megatron.cli.errors import ends_in_sentences, errors_as_sentences
from charm_megatron.cli.job import args_command
from charm_megatron.cli.memory import memory_command
from charm_megatron.cli.operator import operator_command
from charm_megatron.cli.plan import plan_command
from charm_megatron.cli.rank_command import RankCommand, after_rank_0
from charm_megatron.errors import InvalidInput

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
    with errors_as_sentences():
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


@app.command(context_settings={"allow_interspersed_args": False})
def launch(
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
    with errors_as_sentences():
        from charm_megatron.config import CharmConfig, load_charm_config
        from charm_megatron.mcore.launcher import run_script

        config = load_charm_config(charm_config) if charm_config else CharmConfig()
        is_first = os.environ.get("RANK", "0") == "0"
        run_script(script, arguments or [], config, typer.echo if is_first else None)


app.command("args")(ends_in_sentences(args_command))
app.command("memory")(ends_in_sentences(memory_command))
app.command("plan")(ends_in_sentences(plan_command))
app.command("check")(ends_in_sentences(check_command))
bench.app.command("operator", cls=RankCommand)(ends_in_sentences(after_rank_0(operator_command)))
bench.app.command("ablation")(ends_in_sentences(ablation_command))
bench.app.command("numerics")(ends_in_sentences(numerics_command))
app.add_typer(bench.app, name="bench")
app.add_typer(testbed.app, name="testbed")
