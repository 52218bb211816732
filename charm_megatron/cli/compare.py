"""`charm-megatron compare`: runs side by side."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from charm_megatron.cli import options
from charm_megatron.cli.options import OUTPUT, option
from charm_megatron.errors import InvalidInput

if TYPE_CHECKING:
    from rich.table import Table

    from charm_megatron.train.compare import ComparedRun

PICTURES = (".png", ".svg", ".pdf")


def compare_command(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, two or more; the others are held against the first.")
    ],
    picture: Annotated[
        Path | None, option("Draw losses and times of iterations.", OUTPUT, metavar="FILE")
    ] = None,
    json_file: options.JsonRows = None,
) -> None:
    """Show losses, gradient norms and times of several runs side by side."""
    from rich.console import Console

    from charm_megatron.files import require_writable, write_atomically, write_text
    from charm_megatron.train.compare import compare_runs

    if len(runs) < 2:
        raise InvalidInput("compare takes two run folders or more")
    if picture is not None and picture.suffix not in PICTURES:
        raise InvalidInput(f"--picture {picture} does not end in {', '.join(PICTURES)}")
    require_writable(picture, json_file)
    compared = compare_runs(runs)
    if json_file is not None:
        write_text(json_file, json.dumps([_as_json(run) for run in compared], indent=1) + "\n")
    if picture is not None:
        from charm_megatron.train.plot import draw_comparison

        write_atomically(picture, lambda path: draw_comparison(path, compared))
    console = Console(highlight=False, emoji=False)
    console.print(_table(compared))
    if picture is not None:
        console.print(f"picture: {picture}", markup=False, soft_wrap=True)


def _table(runs: Sequence["ComparedRun"]) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right", overflow="fold")
    for label, cells in {
        "schedule": [run.config.charm.schedule for run in runs],
        "ranks": [str(run.config.launch.ranks) for run in runs],
        "context-parallel ranks": [str(run.config.megatron.get("context_parallel_size", 1)) for run in runs],
        "iterations": [f"{min(run.iterations)} to {max(run.iterations)}" for run in runs],
        "last loss": [f"{run.rows[max(run.iterations)]['loss']:.6f}" for run in runs],
        "validation loss": [_cell(run.validation_loss, ".6f") for run in runs],
        "iterations shared with the first": [_cell(run.num_shared, "d") for run in runs],
        "largest difference of loss": [_cell(run.loss_difference, ".2e") for run in runs],
        "largest difference of gradient norm": [_cell(run.grad_norm_difference, ".2e") for run in runs],
        "time of an iteration, median, ms": [_cell(run.step_time_s, ".1f", 1e3) for run in runs],
        "tokens/s": [_cell(run.tokens_per_s, ",.0f") for run in runs],
        f"speed, {runs[0].name} = 1": [_cell(run.speed, ".2f") for run in runs],
    }.items():
        table.add_row(label, *cells)
    return table


def _cell(value: float | None, form: str, factor: float = 1) -> str:
    return "-" if value is None else format(value * factor if factor != 1 else value, form)


def _as_json(run: "ComparedRun") -> dict[str, Any]:
    numbers = {
        "validation_loss": run.validation_loss,
        "num_shared": run.num_shared,
        "loss_difference": run.loss_difference,
        "grad_norm_difference": run.grad_norm_difference,
        "step_time_s": run.step_time_s,
        "tokens_per_s": run.tokens_per_s,
        "speed": run.speed,
    }
    finite = {key: x if x is None or math.isfinite(x) else str(x) for key, x in numbers.items()}
    return {"run": run.name, "schedule": run.config.charm.schedule, **finite}
