"""`charm-megatron bench operator`: schedules against each other on this machine."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from charm_megatron.errors import ConfigError, InvalidInput

if TYPE_CHECKING:
    from rich.table import Table

    from charm_megatron.bench.operator import OperatorRow


def operator_command(
    schedules: Annotated[
        str, typer.Option(help="Schedules, separated by commas; ratios are to the first.")
    ] = "ring,rm_plus,charm",
    nodes: Annotated[int, typer.Option(help="Domains that the ranks fall into.")] = 2,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks of each domain.")] = 2,
    mask: Annotated[str, typer.Option(help="causal, none, window:LEFT,RIGHT ..")] = "none",
    layout: Annotated[str, typer.Option(help="zigzag, contiguous or striped.")] = "contiguous",
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    kv_heads: Annotated[
        int | None, typer.Option(help="KV heads; as many as query heads if not given.")
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Width of a head.")] = 64,
    tokens_per_rank: Annotated[int, typer.Option(help="Tokens of each rank.")] = 512,
    dtype: Annotated[str, typer.Option(help="Dtype of q, k, v and out.")] = "float32",
    ccr: Annotated[
        str | None,
        typer.Option(
            help="Model computation: replace blocks by waits that give these ratios of computation to the "
            "first schedule's communication, separated by commas. Real computation if not given."
        ),
    ] = None,
    separate_lanes: Annotated[
        bool, typer.Option("--separate-lanes", help="Post each kind of cargo and link by itself.")
    ] = False,
    repetitions: Annotated[int, typer.Option(help="Timed repetitions, interleaved.", min=1)] = 5,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write rows as JSON.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw speed-up against CCR; needs --ccr.")
    ] = None,
) -> None:
    """Time schedules over gloo on this machine's loopback, both passes, on the slowest rank."""
    from rich.console import Console

    from charm_megatron.bench.operator import Network, OperatorCase, as_json, run_case
    from charm_megatron.bench.picture import draw_speed_up
    from charm_megatron.config import CharmConfig
    from charm_megatron.workload import Workload, parse_mask

    ratios = _ratios(ccr)
    if picture and ratios == [None]:
        raise InvalidInput("--picture shows speed-up against CCR, so it needs --ccr, such as 0.1,0.5,1,2")
    network = Network(nodes, ranks_per_node)
    workload = Workload(
        1,
        tokens_per_rank * network.num_ranks,
        heads,
        kv_heads or heads,
        head_dim,
        head_dim,
        dtype,
        parse_mask(mask),
    )
    settings = CharmConfig(fuse=not separate_lanes)
    console, rows = Console(), []
    console.print("network: loopback of this machine; links are not shaped, all ranks share its cores")
    for ratio in ratios:
        case = OperatorCase(
            workload, tuple(schedules.split(",")), layout, settings, ratio, repetitions=repetitions
        )
        with console.status("starting ranks") as status:
            measured = run_case(case, network, status.update)
        rows += measured
        console.print(_table(measured))
    if json_file:
        json_file.write_text(json.dumps([as_json(row) for row in rows], indent=1) + "\n", "utf-8")
    if picture:
        draw_speed_up(rows, picture, f"{nodes} x {ranks_per_node} ranks on loopback, computation modelled")
        console.print(f"picture: {picture}", highlight=False)


def _ratios(text: str | None) -> list[float | None]:
    if text is None:
        return [None]
    try:
        ratios = [float(ratio) for ratio in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--ccr {text!r} is not a list of numbers, such as 0.1,0.5,1,2") from error
    if min(ratios) <= 0:
        raise ConfigError(f"--ccr {text!r} must be positive")
    return list(ratios)


def _table(rows: list["OperatorRow"]) -> "Table":
    from rich import box
    from rich.table import Table

    how = "modelled" if rows[0].is_modelled else "real"
    title = f"computation {how}; times in ms; sent: MiB of the busiest sender"
    table = Table(box=box.SIMPLE, title=title, title_justify="left", padding=(0, 1, 0, 0))
    for name in ("schedule", "pass"):
        table.add_column(name, no_wrap=True)
    for name in ("CCR", "median", "min", "max", "speed-up", "sent"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.schedule,
            row.direction,
            f"{row.ccr:.2f}",
            *(f"{seconds * 1e3:.1f}" for seconds in (row.median_s, row.min_s, row.max_s)),
            f"{row.ratio_to_first:.2f}",
            f"{row.bytes_planned / 2**20:.2f}",
        )
    return table
