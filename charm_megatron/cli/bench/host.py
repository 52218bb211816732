"""`charm-megatron bench host`: what attention costs beside its blocks, counted without a GPU."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from charm_megatron.cli import options
from charm_megatron.cli.options import GROUP, MODEL, SCHEDULE, between, option
from charm_megatron.errors import ConfigError, nearest, quoted
from charm_megatron.limits import MOST_OWN_RANKS
from charm_megatron.units import bytes_text

if TYPE_CHECKING:
    from rich.table import Table

    from charm_megatron.bench.host import HostRow


def host_command(
    models: Annotated[
        str | None, option("Which of them, separated by commas.", MODEL, show_default="all")
    ] = None,
    schedules: Annotated[
        str, option(f"{options.SCHEDULES_HELP}.", SCHEDULE)
    ] = "charm,charm_keep_kv,ring,double_ring",
    nodes: Annotated[
        int, option("Domains that the ranks fall into.", GROUP, callback=between(1, MOST_OWN_RANKS))
    ] = 2,
    ranks_per_node: Annotated[
        int, option("Ranks of each domain.", GROUP, callback=between(1, MOST_OWN_RANKS))
    ] = 8,
    json_file: options.JsonRows = None,
) -> None:
    """Count launches, bytes, host time and memory of one layer's attention on a GPU, without one."""
    from charm_megatron.bench.host import MODELS, measure_host
    from charm_megatron.cli.bench.races import wide_console, write_json
    from charm_megatron.files import require_writable
    from charm_megatron.topology import even_domains

    require_writable(json_file)
    wanted = tuple(MODELS) if models is None else options.listed(models)
    for name in wanted:
        if name not in MODELS:
            raise ConfigError(f"--models {quoted(name)} is unknown{nearest(name, MODELS)}")
    if nodes * ranks_per_node > MOST_OWN_RANKS:
        raise ConfigError(f"{nodes * ranks_per_node} ranks are more than the {MOST_OWN_RANKS} that run here")
    domains = even_domains(nodes * ranks_per_node, nodes)
    console = wide_console()
    with console.status("counting"):
        rows = list(measure_host(wanted, options.schedule_names(schedules), domains))
    console.print(_table(rows, f"one layer on rank 0 of {nodes} x {ranks_per_node}, posts lane by lane"))
    console.print(
        "launches: of the most expensive Attend with its merge, and of all; bytes: elementwise work; us/action, host "
        "ms: median of\nan action and sum of all, with nothing to compute; nccl ms: modelled on two communicators; "
        "buffers: of the rank that needs\nmost, in shards of q in float32"
    )
    write_json([as_json(row) for row in rows], json_file)


def as_json(row: "HostRow") -> dict[str, Any]:
    """A row for other programs."""
    return {name.rstrip("_"): value for name, value in asdict(row).items()}


def _table(rows: Iterable["HostRow"], title: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for name in ("model", "schedule", "pass"):
        table.add_column(name)
    for name in ("launches", "bytes", "us/action", "host ms", "nccl ms", "buffers"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.model,
            row.schedule,
            row.pass_,
            f"{row.launches_per_attend} / {row.launches}",
            bytes_text(row.elementwise_bytes),
            f"{row.host_us_per_action:.1f}",
            f"{row.host_us / 1e3:.2f}",
            f"{row.nccl_ms:.2f}",
            f"{row.buffers_fp32_units:.2f}",
        )
    return table
