"""Speed-up against CCR, as the paper's Figures 6 and 7."""

from collections.abc import Sequence
from pathlib import Path

from charm_megatron.bench.operator import PASSES, OperatorRow

# Okabe and Ito, "Color Universal Design": tells apart for all kinds of colour vision.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")


def draw_speed_up(rows: Sequence[OperatorRow], path: Path, title: str) -> None:
    """One panel a pass, one line a schedule; the bound of each schedule's critical path is dotted."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(PASSES), sharey=True)
    names = list(dict.fromkeys(row.schedule for row in rows))
    for axes, direction in zip(panels, PASSES, strict=True):
        for name, colour in zip(names, COLOURS, strict=False):
            line = sorted(
                (row for row in rows if (row.schedule, row.direction) == (name, direction)),
                key=lambda row: row.ccr,
            )
            ccr = [row.ccr for row in line]
            axes.plot(ccr, [row.ratio_to_first for row in line], "o-", color=colour, label=name, markersize=4)
            if all(row.bound_s for row in line):
                best = [row.ratio_to_first / (row.fraction_of_bound or 1.0) for row in line]
                axes.plot(ccr, best, ":", color=colour, linewidth=1)
        axes.set_title(direction, loc="left", fontsize=10, weight="bold")
        axes.set_xlabel("CCR: computation over the ring's communication")
        axes.grid(color="#dddddd", linewidth=0.6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    bounds = [row.ratio_to_first / row.fraction_of_bound for row in rows if row.fraction_of_bound]
    panels[0].set_ylim(0, 1.08 * max(*bounds, *(row.ratio_to_first for row in rows), 1.0))
    panels[0].set_ylabel(f"speed-up over {names[0]}")
    panels[-1].legend(
        frameon=False, fontsize=9, title="dotted: critical path" if bounds else None, title_fontsize=8
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=150)
