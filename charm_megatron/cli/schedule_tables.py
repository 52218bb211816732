"""Schedules on the terminal: grids, and tables of their numbers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from charm_megatron.cost.buffers import Buffers
from charm_megatron.cost.report import Report
from charm_megatron.cost.spans import Timeline
from charm_megatron.schedule.schedule import Schedule
from charm_megatron.show.grid import VERBS, Cell, grid_column, num_rows
from charm_megatron.topology import Domains
from charm_megatron.units import bytes_text
from charm_megatron.verify.programs import CheckReport

LABEL_WIDTH = 14  # of a grid's first two columns, with what is between them
CELL_LINES = 12
STYLES = {"attend": "blue", "send": "green", "crossing": "dark_orange3"}


# ---------------------------------------------------------------------- grid


def grid_tables(
    schedule: Schedule, ranks: range, max_steps: int | None, width: int
) -> Iterator[Table | Text]:
    """The grid of some ranks, as many side by side as `width` characters hold, and what was left out."""
    steps = num_rows(schedule)
    shown = range(min(steps, max_steps or steps))
    columns = {rank: grid_column(schedule, rank) for rank in ranks}
    for part in _side_by_side(columns, width):
        yield _grid_table(schedule, {rank: columns[rank] for rank in part}, shown)
    if len(ranks) < schedule.cp_size or len(shown) < steps:
        yield Text(
            f"Shown: {len(ranks)} of {schedule.cp_size} ranks, {len(shown)} of {steps} steps. "
            f"--all-ranks shows all.\n",
            style="dim",
        )


def _side_by_side(columns: Mapping[int, dict[int, Cell]], width: int) -> Iterator[list[int]]:
    part: list[int] = []
    left = width - LABEL_WIDTH
    for rank, cells in columns.items():
        lines = [line for cell in cells.values() for verb in VERBS[:2] for line in cell.lines(verb)]
        needed = 3 + max(map(len, [f"rank {rank}", *lines]))
        if part and needed > left:
            yield part
            part, left = [], width - LABEL_WIDTH
        part.append(rank)
        left -= needed
    if part:
        yield part


def _grid_table(schedule: Schedule, columns: Mapping[int, dict[int, Cell]], steps: range) -> Table:
    domain_of = schedule.problem.domains.domain_of
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("step", justify="right")
    table.add_column("")
    for rank in columns:
        table.add_column(f"rank {rank}\n[dim]node {domain_of[rank]}[/]", no_wrap=True)
    for step in steps:
        label = str(step)
        for verb in VERBS[:2]:
            cells = [_styled(of.get(step, Cell()), verb) for of in columns.values()]
            if any(cells):
                table.add_row(label, Text(verb, style="dim"), *cells)
                label = ""
        table.add_section()
    return table


def _styled(cell: Cell, verb: str) -> Text:
    lines = cell.lines(verb)
    text = Text()
    style = STYLES[verb]
    for line in lines[:CELL_LINES]:
        if not line.startswith(" "):  # not the rest of the line before
            crosses = verb == "send" and any(sent.startswith(line) for sent in cell.crossing)
            style = STYLES["crossing" if crosses else verb]
        text.append(line + "\n", style=style)
    if len(lines) > CELL_LINES:
        text.append(f"and {len(lines) - CELL_LINES} more lines", style="dim")
    text.rstrip()
    return text


# ---------------------------------------------------------------------- numbers


def rank_table(
    numbers: Report, buffers: Mapping[int, Buffers], domains: Domains, shown: Sequence[int]
) -> Table:
    """Blocks, work, traffic and buffers of each rank shown; totals and extremes of all."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1), caption_justify="left")
    table.caption = "sent: bytes (messages); buffers: most bytes at one time (most buffers)"
    for heading in ("rank", "node", "blocks", "work", "sent inside", "sent across", "buffers"):
        table.add_column(heading, justify="right")
    sent = numbers.traffic
    blocks, share = numbers.num_blocks.tolist(), numbers.flops_share.tolist()
    inside, inside_messages = sent.inside_bytes.tolist(), sent.inside_messages.tolist()
    across, across_messages = sent.across_bytes.tolist(), sent.across_messages.tolist()
    for rank in shown:
        held = buffers[rank]
        table.add_row(
            str(rank),
            str(domains.domain_of[rank]),
            str(blocks[rank]),
            f"{share[rank]:.1%}",
            _counted(inside[rank], inside_messages[rank]),
            _counted(across[rank], across_messages[rank]),
            _counted(held.peak_bytes, held.peak_buffers),
        )
    table.add_section()
    peaks = [one.peak_bytes for one in buffers.values()], [one.peak_buffers for one in buffers.values()]
    for name, of in (("total", sum), ("most", max), ("least", min)):
        table.add_row(
            name,
            "",
            str(of(blocks)),
            f"{of(share):.1%}",
            _counted(of(inside), of(inside_messages)),
            _counted(of(across), of(across_messages)),
            "" if name == "total" else _counted(of(peaks[0]), of(peaks[1])),
        )
    return table


def _counted(num_bytes: int, number: int) -> str:
    """Such as "1.5 MiB (3)"."""
    return f"{bytes_text(num_bytes)} ({number})"


def facts(numbers: Report, buffers: Mapping[int, Buffers], cp_size: int) -> list[str]:
    """What holds for the whole schedule, one sentence per line."""
    pool = max(buffers.values(), key=lambda one: one.pool_bytes)
    measured = "" if len(buffers) == cp_size else f" (of {len(buffers)} ranks looked at)"
    exposed = int(numbers.exposed_bytes.max())
    steps = f"{numbers.exposed_steps} step{'s' if numbers.exposed_steps > 1 else ''}"
    after = f"{steps} more, in which a rank sends up to {bytes_text(exposed)}"
    return [
        f"steps with transfers: {numbers.num_comm_steps}; compute steps: {numbers.num_compute_steps}",
        f"longest chain of transfers that need each other: {numbers.longest_chain}",
        f"after the last block: {after if numbers.exposed_steps else 'nothing is sent'}",
        f"busiest rank computes {numbers.imbalance:.2f} times the mean",
        f"memory of a run for buffers: up to {bytes_text(pool.pool_bytes)} per rank{measured}",
    ]


# ---------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class ComparedSchedule:
    """One schedule of a comparison, timed with links that a rank's transfers share, and with one for each."""

    name: str
    report: Report
    buffers: Sequence[Buffers]
    shared: Timeline
    own: Timeline


def compare_table(rows: Sequence[ComparedSchedule]) -> Table:
    """Schedules side by side; the first is what the last line measures against."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("")
    for one in rows:
        table.add_column(one.name, justify="right")
    first = rows[0]

    def line(label: str, values: Sequence[str]) -> None:
        table.add_row(label, *values)

    line("steps", [str(one.report.num_comm_steps) for one in rows])
    line("compute steps", [str(one.report.num_compute_steps) for one in rows])
    line("longest chain of transfers", [str(one.report.longest_chain) for one in rows])
    line("steps after the last block", [str(one.report.exposed_steps) for one in rows])
    table.add_section()
    sent = [one.report.traffic for one in rows]
    line("most sent by a rank, inside", [_most_bytes(one.inside_bytes) for one in sent])
    line("most sent by a rank, across", [_most_bytes(one.across_bytes) for one in sent])
    line("most messages of a rank", [str(int(one.total_messages.max())) for one in sent])
    line("all ranks together, inside", [bytes_text(int(one.inside_bytes.sum())) for one in sent])
    line("all ranks together, across", [bytes_text(int(one.across_bytes.sum())) for one in sent])
    table.add_section()
    line("peak bytes of a rank", [_most_bytes(np.array([b.peak_bytes for b in one.buffers])) for one in rows])
    line("buffers of a rank", [_most_bytes(np.array([b.pool_bytes for b in one.buffers])) for one in rows])
    line("busiest rank's work / mean", [f"{one.report.imbalance:.2f}" for one in rows])
    table.add_section()
    line("computation alone", [_ms(max(one.shared.busy_s)) for one in rows])
    line("time, a link for each transfer", [_ms(one.own.makespan_s) for one in rows])
    line("time, shared links", [_ms(one.shared.makespan_s) for one in rows])
    line(f"speed, {first.name} = 1", [f"{first.shared.makespan_s / x.shared.makespan_s:.2f}" for x in rows])
    return table


def _most_bytes(array: np.ndarray) -> str:
    return bytes_text(int(array.max()))


def _ms(time_s: float) -> str:
    return f"{time_s * 1e3:.3f} ms"


# ---------------------------------------------------------------------- check


def check_table(schedules: Sequence[Schedule], reports: Sequence[CheckReport]) -> Table:
    """What was checked, one line per pass."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading in ("pass", "steps", "blocks", "messages", "pieces sent", "most foreign pieces on a rank"):
        table.add_column(heading, justify="left" if heading in ("pass", "pieces sent") else "right")
    for schedule, checked in zip(schedules, reports, strict=True):
        sent = ", ".join(f"{number} {payload}" for payload, number in sorted(checked.num_pieces_sent.items()))
        table.add_row(
            schedule.pass_.name,
            str(schedule.num_comm_steps),
            str(len(schedule.blocks.q)),
            str(checked.num_messages),
            sent or "none",
            str(checked.peak_pieces),
        )
    return table
