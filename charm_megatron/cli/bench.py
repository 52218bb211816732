"""`charm-megatron bench`: measurements."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Measurements.", no_args_is_help=True)


@app.command("planning")
def bench_planning(
    schedules: Annotated[str, typer.Option(help="Planners, separated by commas.")] = "ring,charm",
    sizes: Annotated[
        str, typer.Option(help="Numbers of ranks, separated by commas.")
    ] = "16,32,64,128,256,512,1024",
) -> None:
    """Time planning and checking as groups grow (8 ranks a domain, causal zigzag, both passes)."""
    from rich.console import Console

    from charm_megatron.bench.planning import measure_planning
    from charm_megatron.cli.errors import errors_as_sentences
    from charm_megatron.errors import ConfigError

    with errors_as_sentences():
        try:
            numbers = [int(size) for size in sizes.split(",")]
        except ValueError as error:
            raise ConfigError(f"--sizes {sizes!r} is not a list of numbers, such as 16,128") from error
        console = Console()
        console.print(
            f"{'schedule':<22}{'ranks':>6}{'hops':>10}{'plan':>10}{'program':>10}{'tables':>10}{'programs':>10}"
        )
        for row in measure_planning(schedules.split(","), numbers):
            whole = "-" if row.check_s is None else f"{row.check_s:.2f} s"
            console.print(
                f"{row.schedule:<22}{row.cp_size:>6}{row.num_hops:>10,}{row.plan_s:>8.2f} s{row.program_s:>8.2f} s"
                f"{row.check_tables_s:>8.2f} s{whole:>10}",
                highlight=False,
            )
        console.print(
            "plan: all tables; program: one rank's actions; tables, programs: the two checks", style="dim"
        )


@app.command("tables-6-7")
def bench_tables_6_7(
    runs: Annotated[
        Path, typer.Argument(help="Folder of run folders, as scripts/reproduce_tables_6_7.sh makes.")
    ],
) -> None:
    """Show the times of training iterations beside Tables 6 and 7 of the CHARM+ paper (16 GPUs)."""
    from rich.console import Console
    from rich.table import Table

    from charm_megatron.bench.end_to_end import compare_iterations

    def speedup(ring_ms: float | None, charm_ms: float | None) -> str:
        return f"{ring_ms / charm_ms:.2f}x" if ring_ms and charm_ms else "-"

    table = Table(box=None, pad_edge=False)
    for column in (
        "table",
        "model",
        "batch",
        "tokens",
        "GPU",
        "ring",
        "charm",
        "speedup",
        "ring here",
        "charm here",
    ):
        table.add_column(column, justify="right")
    table.add_column("speedup", justify="right")
    for row in compare_iterations(runs):
        paper = row.paper
        here = ["-" if time_ms is None else f"{time_ms:.1f}" for time_ms in (row.ring_ms, row.charm_ms)]
        table.add_row(
            *map(str, (paper.table, paper.config, paper.batch, paper.seq_len, paper.gpu)),
            *(f"{time_ms:.1f}" for time_ms in (paper.ring_ms, paper.charm_ms)),
            speedup(paper.ring_ms, paper.charm_ms),
            *here,
            speedup(row.ring_ms, row.charm_ms),
        )
    console = Console(highlight=False, emoji=False)
    console.print("milliseconds of an iteration; GPU is the paper's, runs here are those of one kind of GPU")
    console.print(table)
