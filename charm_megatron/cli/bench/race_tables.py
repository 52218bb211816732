"""Rows of the operator benchmark on the terminal: a table per race, and notes below it."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from charm_megatron.bench.case import OperatorRow
from charm_megatron.bench.verdict import verdicts
from charm_megatron.peers.registry import PEERS


def race_table(title: str, rows: Sequence[OperatorRow]) -> Table:
    """One line per implementation and direction that was timed."""
    how = "modelled" if rows[0].is_modelled else "real"
    table = Table(
        box=box.SIMPLE,
        title=f"{title}; computation {how}; ms; MB of the busiest sender",
        title_justify="left",
        padding=(0, 1, 0, 0),
    )
    has_errors = any(row.error is not None for row in rows)
    for name in ("schedule", "pass"):
        table.add_column(name, no_wrap=True)
    columns = ["CCR", "median", "min", "max", "speed-up", "plan", "wire", "busiest", "bound"]
    for name in [*columns, *(["error"] if has_errors else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row.median_s is not None:
            cells = [
                _number(row.ccr, ".2f"),
                *(_number(value, ".1f", 1e3) for value in (row.median_s, row.min_s, row.max_s)),
                _number(row.ratio_to_first, ".2f"),
                *(_number(value, ".2f", 1e-6) for value in (row.bytes_planned, row.bytes_wire)),
                *(_number(value, ".0%") for value in (row.fraction_of_busiest, row.fraction_of_bound)),
                *([_number(row.error, ".1e")] if has_errors else []),
            ]
            table.add_row(row.schedule, row.direction, *cells)
    return table


def _number(value: float | None, style: str, factor: float = 1.0) -> str:
    return "-" if value is None else format(value * factor, style)


def race_notes(rows: Sequence[OperatorRow]) -> Iterator[str]:
    """What did not run, what a reader must know of what did, and how charm compares with the fastest peer."""
    for name in dict.fromkeys(row.schedule for row in rows if row.note):
        row = next(row for row in rows if row.schedule == name)
        yield f"{name} {'did not run: ' if row.median_s is None else ''}{row.note}"
    for name in dict.fromkeys(row.schedule for row in rows if row.is_peer and row.median_s):
        peer = PEERS[name]
        yield f"{name}: {peer.package} {peer.version}{peer.note and ', '}{peer.note}"
    yield from verdicts(rows)
