"""`charm-megatron bench ablation` and `bench numerics`: the shapes of the paper's Tables 4 and 8."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from charm_megatron.cli.races import Runner, as_rows, require_writable, wide_console, write_whole
from charm_megatron.errors import ConfigError, InvalidInput

if TYPE_CHECKING:
    from rich.table import Table

    from charm_megatron.bench.ablation import AblationRow
    from charm_megatron.bench.numerics import NumericsRow

JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write rows as JSON.")]


def _require_ready(json_file: Path | None) -> None:
    from charm_megatron.bench.cluster import launched_cluster

    require_writable(json_file)
    if launched_cluster() is not None:
        raise InvalidInput("this benchmark starts ranks of its own; start it without torchrun")


def ablation_command(
    tokens_per_rank: Annotated[int, typer.Option(help="Tokens of each rank.", min=1)] = 256,
    repetitions: Annotated[int, typer.Option(help="Timed repetitions, interleaved.", min=1)] = 3,
    json_file: JsonOption = None,
) -> None:
    """Race ring, rm_plus and charm on networks like those of the CHARM+ paper's Table 4; needs root to shape them."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from charm_megatron.bench.ablation import compare, race, settings

    _require_ready(json_file)
    console = wide_console()
    made = settings()
    races = [race(setting, tokens_per_rank=tokens_per_rank, repetitions=repetitions) for setting in made]
    results = Runner(console, None, None, None).run(races, shows_tables=False)
    compared = [
        line for setting, (_, rows) in zip(made, results, strict=True) for line in compare(setting, rows)
    ]
    console.print(_ablation_table(compared))
    console.print("computation modelled; paper: forward pass on GPUs, at the length of the same rank of CCR")
    if json_file:
        write_whole(json_file, json.dumps(as_rows(results), indent=1) + "\n")


def _ablation_table(rows: list["AblationRow"]) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, title="Speed-up over the ring", title_justify="left")
    for name in (
        "network",
        "ranks",
        "CCR",
        "schedule",
        "forward",
        "backward",
        "paper",
        "paper's GPUs, tokens",
    ):
        table.add_column(name, justify="left" if name in ("network", "schedule") else "right", no_wrap=True)
    for row in rows:
        setting = row.setting
        table.add_row(
            setting.title,
            str(setting.profile.num_ranks),
            f"{row.ccr:g}",
            row.schedule,
            f"{row.forward:.2f}",
            f"{row.backward:.2f}",
            "-" if row.paper is None else f"{row.paper:.2f}",
            f"{setting.num_gpus} {setting.gpu}, {row.seq_len}",
        )
    return table


def numerics_command(
    draws: Annotated[int, typer.Option(help="Draws of random tensors.", min=1)] = 100,
    schedules: Annotated[str, typer.Option(help="Schedules, separated by commas.")] = "ring,charm",
    nodes: Annotated[int, typer.Option(help="Domains that the ranks fall into.", min=1)] = 2,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks of each domain.", min=1)] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens of the whole sequence.", min=1)] = 1024,
    heads: Annotated[int, typer.Option(help="Heads.", min=1)] = 2,
    head_dim: Annotated[int, typer.Option(help="Width of a head.", min=1)] = 128,
    mask: Annotated[str, typer.Option(help="causal or none.")] = "none",
    dtype: Annotated[str, typer.Option(help="Dtype of q, k, v and out.")] = "bfloat16",
    json_file: JsonOption = None,
) -> None:
    """Subtract unsharded attention from what the ranks give, as the CHARM+ paper's Table 8; on loopback."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from charm_megatron.bench.cluster import Cluster
    from charm_megatron.bench.numerics import Contender, NumericsCase, measure_numerics
    from charm_megatron.bench.operator import OperatorCase, planned
    from charm_megatron.workload import CAUSAL, NO_MASK, Workload, parse_mask

    _require_ready(json_file)
    seen = parse_mask(mask)
    if seen not in (CAUSAL, NO_MASK):
        raise ConfigError(
            f"--mask {mask!r} is neither causal nor none, which torch's unsharded operator takes"
        )
    workload = Workload(1, tokens, heads, heads, head_dim, head_dim, dtype, seen)
    layout = "zigzag" if seen == CAUSAL else "contiguous"
    names = [name.strip() for name in schedules.split(",") if name.strip()]
    cluster = Cluster(nodes, ranks_per_node)
    for name in names:
        planned(OperatorCase(workload, (name,), layout), cluster, name)
    contenders = [
        Contender(name, out, grad)
        for name in names
        for out, grad in (("model", "model"), ("model", "float32"), ("float32", "float32"))
    ]
    console = wide_console()
    case = NumericsCase(workload, tuple(contenders), draws, layout)
    with console.status("starting ranks") as status:
        rows = measure_numerics(case, cluster, status.update)
    console.print(_numerics_table(rows, f"{draws} draws, {cluster}, {tokens} tokens, {dtype}, mask {seen}"))
    console.print(
        "differences: of each draw the largest and the mean, then the average over the draws; "
        "paper: Table 8, 8 L20, 8K tokens, to FlashAttention"
    )
    if json_file:
        write_whole(json_file, json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _numerics_table(rows: list["NumericsRow"], title: str) -> "Table":
    from rich import box
    from rich.table import Table

    from charm_megatron.paper.tables_4_8 import TABLE_8

    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    table.add_column("tensor")
    table.add_column("attention", no_wrap=True)
    for name in ("largest to flash", "mean", "largest to float64", "mean"):
        table.add_column(name, justify="right", no_wrap=True)
    for paper in TABLE_8:
        for row in rows:
            if row.tensor == paper.tensor:
                cells = [*(row.to_flash or (None, None)), *row.to_float64]
                table.add_row(
                    row.tensor, row.contender, *("-" if cell is None else f"{cell:.2e}" for cell in cells)
                )
        for name, pair in (
            ("ring", (paper.ring_max, paper.ring_mean)),
            ("charm", (paper.charm_max, paper.charm_mean)),
        ):
            table.add_row(paper.tensor, f"paper: {name}", *(f"{value:.2e}" for value in pair), "-", "-")
        table.add_section()
    return table
