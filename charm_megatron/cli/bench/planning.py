"""`charm-megatron bench planning`: how long planning and checking take as groups grow."""

from typing import Annotated

import typer

from charm_megatron.cli import options
from charm_megatron.errors import ConfigError, quoted
from charm_megatron.limits import MOST_RANKS


def planning_command(
    schedules: Annotated[str, typer.Option(help=f"{options.SCHEDULES_HELP}.")] = "ring,charm",
    sizes: Annotated[
        str, typer.Option(help="Numbers of ranks, separated by commas.")
    ] = "16,32,64,128,256,512,1024",
) -> None:
    """Time planning and checking as groups grow (8 ranks per domain, causal zigzag, both passes)."""
    from rich.console import Console

    from charm_megatron.bench.planning import measure_planning
    from charm_megatron.reading import whole_number

    names = options.schedule_names(schedules)
    numbers = [whole_number(size, MOST_RANKS) for size in options.listed(sizes)]
    counts = [number for number in numbers if number]
    if not counts or len(counts) < len(numbers):
        raise ConfigError(
            f"--sizes {quoted(sizes)} is not a list of numbers from 1 to {MOST_RANKS}, such as 16,128"
        )
    console = Console()
    console.print(
        f"{'schedule':<22}{'ranks':>6}{'hops':>10}{'plan':>10}{'program':>10}{'tables':>10}{'programs':>10}"
    )
    for row in measure_planning(names, counts):
        whole = "-" if row.check_s is None else f"{row.check_s:.2f} s"
        console.print(
            f"{row.schedule:<22}{row.cp_size:>6}{row.num_hops:>10,}{row.plan_s:>8.2f} s{row.program_s:>8.2f} s"
            f"{row.check_tables_s:>8.2f} s{whole:>10}",
            highlight=False,
        )
    console.print(
        "plan: all tables; program: one rank's actions; tables, programs: the two checks", style="dim"
    )
