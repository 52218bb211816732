"""`charm-megatron bench ablation`: the shape of the paper's Table 4."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from charm_megatron.cli import options
from charm_megatron.cli.options import ATTENTION, MEASUREMENT, between, option
from charm_megatron.limits import MOST_REPETITIONS, MOST_TOKENS
from charm_megatron.schedule.passes import DIRECTIONS

if TYPE_CHECKING:
    from rich.table import Table

    from charm_megatron.bench.ablation import AblationRow

COLUMNS = ("network", "ranks", "CCR", "schedule", *DIRECTIONS, "paper", "paper's GPUs, tokens")
WORDS = ("network", "schedule")


def ablation_command(
    tokens_per_rank: Annotated[
        int, option("Tokens of each rank.", ATTENTION, callback=between(1, MOST_TOKENS))
    ] = 256,
    repetitions: Annotated[
        int, option("Timed repetitions, interleaved.", MEASUREMENT, callback=between(1, MOST_REPETITIONS))
    ] = 3,
    json_file: options.JsonRows = None,
) -> None:
    """Race ring, rm_plus and charm_keep_kv on networks like those of CHARM+'s Table 4; needs root to shape them."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else each rank warns that its peers have no names
    from charm_megatron.bench.ablation import compare, paper_networks, race
    from charm_megatron.cli.bench.races import Runner, as_rows, require_own_ranks, wide_console, write_json

    require_own_ranks(json_file)
    console = wide_console()
    networks = paper_networks()
    races = [race(network, tokens_per_rank=tokens_per_rank, repetitions=repetitions) for network in networks]
    results = Runner(console, None, None, None).run(races, shows_tables=False)
    compared = [
        line for network, (_, rows) in zip(networks, results, strict=True) for line in compare(network, rows)
    ]
    console.print(_table(compared))
    console.print(
        "computation modelled; paper: forward pass on GPUs, at the shorter and the longer of its sequences"
    )
    write_json(as_rows(results), json_file)


def _table(rows: Sequence["AblationRow"]) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, title="Speed-up over the ring", title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in WORDS else "right", no_wrap=True)
    for row in rows:
        network = row.network
        table.add_row(
            network.title,
            str(network.profile.num_ranks),
            f"{row.ccr:g}",
            row.schedule,
            f"{row.forward:.2f}",
            f"{row.backward:.2f}",
            "-" if row.paper is None else f"{row.paper:.2f}",
            f"{network.num_gpus} {network.gpu}, {row.seq_len}",
        )
    return table
