"""`charm-megatron` and its commands, all registered here.

Nothing heavy is imported before a command needs it, so that `--help` answers at once.
"""

from typing import Annotated

import typer

from charm_megatron.cli import testbed
from charm_megatron.cli.args import args_command
from charm_megatron.cli.bench.ablation import ablation_command
from charm_megatron.cli.bench.card import card_command
from charm_megatron.cli.bench.host import host_command
from charm_megatron.cli.bench.numerics import numerics_command
from charm_megatron.cli.bench.operator import operator_command
from charm_megatron.cli.bench.planning import planning_command
from charm_megatron.cli.bench.tables_6_7 import tables_6_7_command
from charm_megatron.cli.check import check_command
from charm_megatron.cli.compare import compare_command
from charm_megatron.cli.doctor import doctor_command
from charm_megatron.cli.errors import SentenceGroup
from charm_megatron.cli.launch import launch_command
from charm_megatron.cli.memory import memory_command
from charm_megatron.cli.plan import plan_command
from charm_megatron.cli.pretrain import pretrain_command
from charm_megatron.cli.rank_command import RankCommand
from charm_megatron.cli.version import version_lines

app = typer.Typer(
    name="charm-megatron",
    help="Context-parallel attention for Megatron-LM.",
    cls=SentenceGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("pretrain")(pretrain_command)
app.command("launch", context_settings={"allow_interspersed_args": False})(launch_command)
app.command("compare")(compare_command)
app.command("args")(args_command)
app.command("memory")(memory_command)
app.command("plan")(plan_command)
app.command("check")(check_command)
app.command("doctor", cls=RankCommand)(doctor_command)

bench = typer.Typer(help="Measurements.", no_args_is_help=True)
bench.command("operator", cls=RankCommand)(operator_command)
bench.command("ablation")(ablation_command)
bench.command("card")(card_command)
bench.command("host")(host_command)
bench.command("numerics")(numerics_command)
bench.command("planning")(planning_command)
bench.command("tables-6-7")(tables_6_7_command)
app.add_typer(bench, name="bench")

networks = typer.Typer(
    help="A network on this machine whose links have given rates; one namespace per rank. Needs root.",
    no_args_is_help=True,
)
networks.command("up")(testbed.up_command)
networks.command("down")(testbed.down_command)
networks.command("exec")(testbed.exec_command)
networks.command("status")(testbed.status_command)
networks.command("probe")(testbed.probe_command)
app.add_typer(networks, name="testbed")


def main() -> None:
    """Entry point of the command."""
    app()


@app.callback(invoke_without_command=True)
def _charm_megatron(
    version: Annotated[
        bool, typer.Option("--version", help="Print versions, of what this builds on too, and exit.")
    ] = False,
) -> None:
    if version:
        for line in version_lines():
            typer.echo(line)
        raise typer.Exit
