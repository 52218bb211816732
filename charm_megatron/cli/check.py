"""`charm-megatron check`: proves a schedule, planned or saved, or shows its first fault."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from charm_megatron.cli import options
from charm_megatron.errors import InvalidInput

if TYPE_CHECKING:
    from charm_megatron.cli.plan_request import PlanRequest
    from charm_megatron.schedule.json_form import ScheduleFile


def check_command(
    schedule: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE|-",
            help="A planner's name, or a file as `charm-megatron plan --json` writes it; - is standard input.",
        ),
    ],
    nodes: options.Nodes = None,
    ranks_per_node: options.RanksPerNode = None,
    mask: options.MaskText = None,
    layout: options.Layout = None,
    tokens_per_rank: options.TokensPerRank = None,
) -> None:
    """Check every pass of a schedule: planned for the group and attention given, or saved in a .json file.

    With - the file is read from standard input. A file that is for another group or attention than the options say is
    refused. Ends with code 0 when each pass is right; with 1 and the first fault of one that is not; with 2 for what
    cannot be planned or read.
    """
    from rich.console import Console

    from charm_megatron.cli.plan_request import PlanRequest
    from charm_megatron.cli.schedule_tables import check_table
    from charm_megatron.compile import is_schedule_file
    from charm_megatron.reading import STANDARD_INPUT
    from charm_megatron.schedule.json_form import load_schedule
    from charm_megatron.verify.programs import check_schedule

    request = PlanRequest(nodes, ranks_per_node, mask, layout, tokens_per_rank)
    if schedule == STANDARD_INPUT or is_schedule_file(schedule):
        loaded = load_schedule(Path(schedule))
        _require_as_asked("standard input" if schedule == STANDARD_INPUT else schedule, loaded, request)
        name, schedules = loaded.name, loaded.schedules
    else:
        plan = request.complete([schedule]).plan(schedule)
        name, schedules = plan.name, plan.schedules
    reports = [check_schedule(one) for one in schedules]
    problem = schedules[0].problem
    console = Console(highlight=False, emoji=False)
    console.print(
        f"{name} is right: {problem.cp_size} ranks on {problem.domains.num_domains} nodes, "
        f"{problem.sharding.layout}, mask {problem.mask}, {problem.sharding.seq_len} tokens",
        markup=False,
    )
    console.print(check_table(schedules, reports))


def _require_as_asked(file: str, loaded: "ScheduleFile", request: "PlanRequest") -> None:
    from charm_megatron.workload import parse_mask

    problem = loaded.problem
    members, sharding = problem.domains.members, problem.sharding
    sizes = " or ".join(map(str, sorted({len(ranks) for ranks in members})))
    mask = None if request.mask is None else str(parse_mask(request.mask))
    for what, saved, asked in (
        ("{} nodes", str(len(members)), request.nodes),
        ("{} ranks on a node", sizes, request.ranks_per_node),
        ("mask {}", str(problem.mask), mask),
        ("layout {}", sharding.layout, request.layout),
        ("{} tokens per rank", str(sharding.seq_len // problem.cp_size), request.tokens_per_rank),
    ):
        if asked is not None and str(asked) != saved:
            raise InvalidInput(f"{file} is for {what.format(saved)}, not {asked}")
