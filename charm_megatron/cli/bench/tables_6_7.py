"""`charm-megatron bench tables-6-7`: times of training iterations beside the paper's."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from charm_megatron.bench.end_to_end import ComparedIteration

COLUMNS = ("table", "model", "batch", "tokens", "GPU", "ring", "charm", "speed-up")
HERE = ("ring here", "charm here", "speed-up")


def tables_6_7_command(
    runs: Annotated[
        Path, typer.Argument(help="Folder of run folders, as scripts/reproduce_tables_6_7.sh makes.")
    ],
) -> None:
    """Show the times of training iterations beside Tables 6 and 7 of the CHARM+ paper (16 GPUs)."""
    from rich.console import Console

    from charm_megatron.bench.end_to_end import compare_iterations

    compared = compare_iterations(runs)
    console = Console(highlight=False, emoji=False)
    console.print(
        "milliseconds per iteration; the GPU is the paper's, runs here are those of one kind of GPU"
    )
    console.print(_table(compared))


def _table(compared: Sequence["ComparedIteration"]) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in (*COLUMNS, *HERE):
        table.add_column(column, justify="right")
    for row in compared:
        paper = row.paper
        table.add_row(
            *map(str, (paper.table, paper.config, paper.batch, paper.seq_len, paper.gpu)),
            *_cells(paper.ring_ms, paper.charm_ms),
            *_cells(row.ring_ms, row.charm_ms),
        )
    return table


def _cells(ring_ms: float | None, charm_ms: float | None) -> list[str]:
    speed_up = f"{ring_ms / charm_ms:.2f}x" if ring_ms and charm_ms else "-"
    return [*("-" if time_ms is None else f"{time_ms:.1f}" for time_ms in (ring_ms, charm_ms)), speed_up]
