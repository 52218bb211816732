"""`charm-megatron check`: proves a saved schedule, or shows its first fault."""

from pathlib import Path
from typing import Annotated

import typer

from charm_megatron.errors import InvalidInput


def check_command(
    file: Annotated[Path, typer.Argument(help="A schedule, as `charm-megatron plan --json` writes it.")],
    nodes: Annotated[int | None, typer.Option(help="Refuse a schedule for another number of nodes.")] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Refuse a schedule for another number of ranks on each node.")
    ] = None,
) -> None:
    """Check every pass of a saved schedule.

    Ends with code 0 when each is right; with 1 and the first fault of one that is not; with 2 for a file
    that is no schedule, or one for another group.
    """
    from rich.console import Console

    from charm_megatron.cli.tables import check_table
    from charm_megatron.schedule.json_form import load_schedule
    from charm_megatron.verify.programs import check_schedule

    loaded = load_schedule(file)
    members = loaded.problem.domains.members
    if nodes is not None and nodes != len(members):
        raise InvalidInput(f"{file} is for {len(members)} nodes, not {nodes}")
    sizes = sorted({len(ranks) for ranks in members})
    if ranks_per_node is not None and sizes != [ranks_per_node]:
        raise InvalidInput(
            f"{file} is for {' or '.join(map(str, sizes))} ranks on a node, not {ranks_per_node}"
        )
    reports = [check_schedule(schedule) for schedule in loaded.schedules]
    console = Console(highlight=False, emoji=False)
    problem = loaded.problem
    console.print(
        f"{loaded.name} is right: {problem.cp_size} ranks on {len(members)} nodes, "
        f"{problem.sharding.layout}, mask {problem.mask}, {problem.sharding.seq_len} tokens",
        markup=False,
    )
    console.print(check_table(loaded.schedules, reports))
