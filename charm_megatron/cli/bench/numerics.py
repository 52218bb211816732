"""`charm-megatron bench numerics`: the shape of the paper's Table 8."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from charm_megatron.cli import options
from charm_megatron.cli.options import ATTENTION, GROUP, MEASUREMENT, SCHEDULE, between, option
from charm_megatron.errors import ConfigError
from charm_megatron.limits import MOST_HEADS, MOST_RANKS, MOST_REPETITIONS, MOST_TOKENS

if TYPE_CHECKING:
    from rich.table import Table

    from charm_megatron.bench.numerics import NumericsRow


def numerics_command(
    schedules: Annotated[str, option(f"{options.SCHEDULES_HELP}.", SCHEDULE)] = "ring,charm",
    nodes: Annotated[
        int, option("Domains that the ranks fall into.", GROUP, callback=between(1, MOST_RANKS))
    ] = 2,
    ranks_per_node: Annotated[
        int, option("Ranks of each domain.", GROUP, callback=between(1, MOST_RANKS))
    ] = 4,
    mask: Annotated[str, option("causal or none.", ATTENTION)] = "none",
    tokens: Annotated[
        int, option("Tokens of the whole sequence.", ATTENTION, callback=between(1, MOST_TOKENS))
    ] = 1024,
    heads: Annotated[int, option("Heads.", ATTENTION, callback=between(1, MOST_HEADS))] = 2,
    head_dim: options.HeadDim = 128,
    dtype: options.Dtype = "bfloat16",
    draws: Annotated[
        int, option("Draws of random tensors.", MEASUREMENT, callback=between(1, MOST_REPETITIONS))
    ] = 100,
    json_file: options.JsonRows = None,
) -> None:
    """Subtract unsharded attention from what the ranks compute, as the CHARM+ paper's Table 8; on loopback."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else each rank warns that its peers have no names
    from charm_megatron.bench.cluster import Cluster
    from charm_megatron.bench.numerics import NumericsCase, measure_numerics, variants_of
    from charm_megatron.cli.bench.races import require_own_ranks, wide_console, write_json
    from charm_megatron.workload import CAUSAL, NO_MASK, Workload, parse_mask

    require_own_ranks(json_file)
    seen = parse_mask(mask)
    if seen not in (CAUSAL, NO_MASK):
        raise ConfigError(
            f"--mask {mask!r} is neither causal nor none, which torch's unsharded operator takes"
        )
    workload = Workload(1, tokens, heads, heads, head_dim, head_dim, dtype, seen)
    layout = "zigzag" if seen == CAUSAL else "contiguous"
    cluster = Cluster(nodes, ranks_per_node)
    cluster.require_fits(workload)
    case = NumericsCase(workload, variants_of(options.schedule_names(schedules)), draws, layout)
    console = wide_console()
    with console.status("starting ranks") as status:
        rows = measure_numerics(case, cluster, status.update)
    console.print(_table(rows, f"{draws} draws, {cluster}, {tokens} tokens, {dtype}, mask {seen}"))
    console.print(
        "differences: of each draw the largest and the mean, then the average over the draws; "
        "paper: Table 8, 8 L20, 8K tokens, to FlashAttention"
    )
    write_json([asdict(row) for row in rows], json_file)


def _table(rows: Sequence["NumericsRow"], title: str) -> "Table":
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
                values = [*(row.to_flash or (None, None)), *row.to_float64]
                cells = ("-" if value is None else f"{value:.2e}" for value in values)
                table.add_row(row.tensor, row.implementation, *cells)
        for name, largest, mean in (
            ("ring", paper.ring_max, paper.ring_mean),
            ("charm", paper.charm_max, paper.charm_mean),
        ):
            table.add_row(paper.tensor, f"paper: {name}", f"{largest:.2e}", f"{mean:.2e}", "-", "-")
        table.add_section()
    return table
