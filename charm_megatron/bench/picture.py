"""Speed-up against CCR, as the paper's Figures 6 and 7, and bars where there is one CCR only."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from charm_megatron.bench.case import OperatorRow
from charm_megatron.schedule.passes import DIRECTIONS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito, "Color Universal Design": tells apart for all kinds of colour vision.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
DASHES = ("-", "--", "-.")
OURS, THEIRS = "#0072B2", "#8A8A8A"

TitledRows = tuple[str, Sequence[OperatorRow]]
"""A title, and the rows that were measured together or at other CCRs."""


def draw_speed_up(races: Sequence[TitledRows], path: Path) -> None:
    """One row of panels per race, one panel per direction; what was not timed is left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = [(title, [row for row in rows if row.ratio_to_first]) for title, rows in races]
    timed = [(title, rows) for title, rows in timed if rows]
    heights = [4.0 if _is_curve(rows) else 0.8 + 0.26 * len(_names(rows)) for _, rows in timed]
    figure = Figure(figsize=(11, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(
        len(timed), len(DIRECTIONS), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for (title, rows), line in zip(timed, panels, strict=True):
        for axes, direction in zip(line, DIRECTIONS, strict=True):
            of_pass = [row for row in rows if row.direction == direction]
            if not of_pass:
                axes.set_axis_off()
                continue
            (_draw_curves if _is_curve(rows) else _draw_bars)(axes, of_pass)
            name = f"{title}; {direction}" if direction == DIRECTIONS[0] else direction
            axes.set_title(name, loc="left", fontsize=9, weight="bold")
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=130)


def _is_curve(rows: Sequence[OperatorRow]) -> bool:
    first = (rows[0].schedule, rows[0].direction)
    return len({row.ccr for row in rows if (row.schedule, row.direction) == first}) > 1


def _names(rows: Sequence[OperatorRow]) -> list[str]:
    return list(dict.fromkeys(row.schedule for row in rows))


def _draw_curves(axes: "Axes", rows: Sequence[OperatorRow]) -> None:
    """Speed-up by CCR; dotted, what links at full rate and nothing else to pay would give."""
    names, has_bound = _names(rows), False
    styles = ((colour, dashes) for dashes in DASHES for colour in COLOURS)
    for name, (colour, dashes) in zip(names, styles, strict=False):
        line = sorted((row for row in rows if row.schedule == name), key=lambda row: row.ccr or 0.0)
        ccr = [row.ccr or 0.0 for row in line]
        ratios = [row.ratio_to_first or 0.0 for row in line]
        axes.plot(ccr, ratios, f"o{dashes}", color=colour, label=name, markersize=4)
        bounds = [bound for row in line if (bound := _bound(row))]
        if len(bounds) == len(line):
            has_bound = True
            axes.plot(ccr, bounds, ":", color=colour, linewidth=1)
    axes.set_xscale("log")
    ticks = sorted({row.ccr for row in rows if row.ccr})
    axes.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks], fontsize=8)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_xlabel(f"CCR: computation over the communication of {names[0]}", fontsize=8)
    axes.set_ylabel(f"speed-up over {names[0]}", fontsize=8)
    title = "dotted: links at full rate" if has_bound else None
    axes.legend(frameon=False, fontsize=8, title=title, title_fontsize=8)


def _bound(row: OperatorRow) -> float | None:
    """The speed-up at which a schedule takes its critical path or its busiest link's time, whichever is longer."""
    fractions = (row.fraction_of_bound, row.fraction_of_busiest)
    if row.ratio_to_first is None or fractions[0] is None or fractions[1] is None:
        return None
    return row.ratio_to_first / max(fractions[0], fractions[1])


def _draw_bars(axes: "Axes", rows: Sequence[OperatorRow]) -> None:
    """Speed-up of each implementation, the fastest on top; peers are grey."""
    order = sorted(rows, key=lambda row: row.ratio_to_first or 0.0)
    values = [row.ratio_to_first or 0.0 for row in order]
    places = range(len(order))
    axes.barh(places, values, color=[THEIRS if row.is_peer else OURS for row in order], height=0.7)
    for place, row, value in zip(places, order, values, strict=True):
        axes.text(0, place, f" {value:.2f}", va="center", fontsize=8, color="#ffffff", weight="bold")
        bound = _bound(row)
        if bound:
            axes.plot([bound, bound], [place - 0.35, place + 0.35], ":", color="#000000", linewidth=1)
    axes.set_yticks(places, [row.schedule for row in order], fontsize=8)
    axes.set_xlim(0, 1.12 * max(*values, *(_bound(row) or 0.0 for row in order), 1.0))
    names = _names(rows)
    label = f"speed-up over {names[0]}; CCR {rows[0].ccr or 0.0:.2f}; grey: other libraries; dotted: links at full rate"
    axes.set_xlabel(label, fontsize=8)
