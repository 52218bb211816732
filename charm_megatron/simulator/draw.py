"""Pictures of timelines: schedules one above the other on the same clock."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from charm_megatron.simulator.timeline import Span, Timeline
from charm_megatron.topology import Domains

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"attend": "#4C78A8", "inside": "#59A14F", "across": "#E4572E"}
LABELS = {
    "attend": "computes a block",
    "inside": "sends inside its domain",
    "across": "sends across domains",
}
LANES = ("attend", "inside", "across")
LANE_HEIGHT = {"attend": 0.44, "inside": 0.2, "across": 0.2}
LANE_OFFSET = {"attend": 0.0, "inside": 0.46, "across": 0.67}


def draw_timelines(
    timelines: Sequence[tuple[str, Timeline]], domains: Domains, path: Path, *, title: str = ""
) -> None:
    """Writes one panel a timeline to `path` (by its suffix: png, svg, pdf), times relative to the first makespan."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    unit_s = timelines[0][1].makespan_s
    height = 0.55 + sum(0.5 + 0.36 * domains.cp_size for _ in timelines)
    figure = Figure(figsize=(11, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, timeline) in zip(panels, timelines, strict=True):
        _draw_panel(axes, name, timeline, domains, unit_s)
    panels[-1].set_xlabel(f"time, in units of the {timelines[0][0]}")
    figure.legend(
        handles=[Patch(color=COLOURS[lane], label=LABELS[lane]) for lane in LANES],
        loc="outside upper right",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=150)


def _draw_panel(axes: "Axes", name: str, timeline: Timeline, domains: Domains, unit_s: float) -> None:
    for span in timeline.spans:
        _draw_span(axes, span, unit_s)
    end = timeline.makespan_s / unit_s
    axes.axvline(end, color="black", linewidth=1)
    axes.annotate(
        f" {end:.2f}", (end, 1), xycoords=("data", "axes fraction"), va="top", fontsize=10, weight="bold"
    )
    order = [rank for ranks in domains.members for rank in ranks]
    for ranks in domains.members[1:]:
        axes.axhline(ranks[0] - 0.05, color="black", linewidth=0.6, linestyle=(0, (4, 3)))
    axes.set_yticks([rank + 0.4 for rank in order], [f"rank {rank}" for rank in order], fontsize=8)
    axes.set_ylim(domains.cp_size, -0.1)
    axes.set_xlim(0, max(1.06, axes.get_xlim()[1]))
    axes.set_title(name, loc="left", fontsize=10, weight="bold")
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_span(axes: "Axes", span: Span, unit_s: float) -> None:
    start, width = span.start_s / unit_s, (span.end_s - span.start_s) / unit_s
    bottom = span.rank + LANE_OFFSET[span.kind]
    axes.barh(
        bottom,
        width,
        LANE_HEIGHT[span.kind],
        left=start,
        align="edge",
        color=COLOURS[span.kind],
        alpha=0.55 if span.is_result else 1.0,
        edgecolor="white",
        linewidth=0.6,
    )
    if span.kind == "attend" and width > 0.011 * len(span.label):
        axes.text(
            start + width / 2,
            bottom + LANE_HEIGHT["attend"] / 2,
            span.label,
            color="white",
            fontsize=6,
            ha="center",
            va="center",
        )
