"""Pictures of timelines: schedules one above the other on the same clock, or one rank with all its links apart.

Sizes are chosen for a page 21 cm wide, on which the smallest letters are still 6 points.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from charm_megatron.cost.spans import AttendSpan, Timeline, TransferSpan
from charm_megatron.schedule.actions import Attend
from charm_megatron.schedule.payload import PAYLOADS
from charm_megatron.schedule.piece import Piece
from charm_megatron.schedule.schedule import Schedule
from charm_megatron.topology import Domains

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

PICTURE_FORMATS = (".svg", ".png", ".pdf")
WIDTH_INCHES = 8.4
LABEL_POINTS = 6.3

# Blue, green and vermilion of Okabe and Ito's palette, which people with any kind of colour vision tell apart.
# What a rank does for others is a lighter blue; results on their way home are lighter than operands.
COLOURS = {
    "own": "#005B94",
    "both": "#3A8CC1",
    "visiting": "#A9D9F5",
    "idle": "#E6E6E6",
    "inside": "#009E73",
    "inside result": "#8CD0BC",
    "across": "#D55E00",
    "across result": "#ECB28A",
}
LEGEND_COLUMNS = (
    {"own": "computes for own queries", "visiting": "computes for visiting ones"},
    {"idle": "waits", "both": "computes for both"},
    {"inside": "sends inside its domain", "inside result": "sends results home"},
    {"across": "sends across domains", "across result": "sends results home"},
)
LABEL_NOTE = "on blocks: query chunks, KV chunks"
COMPUTES = ("own", "both", "visiting")
WHITE_ON = ("own", "both", "inside", "across")


@dataclass(frozen=True)
class _Bar:
    """One bar in row `row`, at `bottom` within it; `labels` from long to short: the first that fits is written."""

    kind: str
    row: float
    height: float
    start_s: float
    end_s: float
    labels: tuple[str, ...] = ()


def one_after_another(timelines: Sequence[Timeline]) -> Timeline:
    """Phases that all ranks begin together, each when the one before has ended everywhere."""
    spans: list[AttendSpan | TransferSpan] = []
    begin_s = 0.0
    for timeline in timelines:
        spans += [
            replace(span, start_s=span.start_s + begin_s, end_s=span.end_s + begin_s)
            for span in timeline.spans
        ]
        begin_s += timeline.makespan_s
    busy_s = zip(*(timeline.busy_s for timeline in timelines), strict=True)
    return Timeline(tuple(spans), begin_s, tuple(map(sum, busy_s)))


def draw_timelines(
    timelines: Sequence[tuple[str, Timeline]],
    domains: Domains,
    path: Path,
    *,
    title: str = "",
    phases: Sequence[Sequence[Schedule]] = (),
) -> None:
    """Writes one panel a timeline to `path`, of one of `PICTURE_FORMATS`.

    `phases[i]` are the schedules behind timeline i; with them blocks for visiting queries get their own colour.
    """
    rows = domains.cp_size
    row_inches = 0.36 if rows <= 8 else 0.24 if rows <= 16 else 0.15 if rows <= 40 else 6.0 / rows
    panels = [
        _group_bars(timeline, rows, domains.num_domains > 1, of)
        for (_, timeline), of in _with_phases(timelines, phases)
    ]
    figure, axes = _figure(len(panels), [rows * row_inches] * len(panels), title, panels)
    for ax, (name, timeline), bars in zip(axes, timelines, panels, strict=True):
        _draw_bars(ax, bars)
        _finish_panel(ax, name, timeline, timelines[0])
        every = 1 if row_inches > 0.2 else 4
        ax.set_yticks(
            [rank + 0.42 for rank in range(0, rows, every)], [str(r) for r in range(0, rows, every)]
        )
        ax.set_ylim(rows - 0.05, -0.1)
        ax.set_ylabel("rank")
        for rank in range(1, rows):
            if domains.domain_of[rank] != domains.domain_of[rank - 1]:
                ax.axhline(rank - 0.05, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
    _save(figure, axes, panels, path)


def draw_rank(
    timelines: Sequence[tuple[str, Timeline]],
    rank: int,
    path: Path,
    *,
    title: str = "",
    phases: Sequence[Sequence[Schedule]] = (),
) -> None:
    """Writes what one rank computes, and below what it receives and sends, each payload and link class by itself."""
    panels, names = [], []
    for (_, timeline), of in _with_phases(timelines, phases):
        bars, labels = _rank_bars(timeline, rank, of)
        panels.append(bars)
        names.append(labels)
    figure, axes = _figure(len(panels), [0.26 * len(labels) + 0.1 for labels in names], title, panels)
    for ax, (name, timeline), bars, labels in zip(axes, timelines, panels, names, strict=True):
        _draw_bars(ax, bars)
        _finish_panel(ax, f"{name}, rank {rank}", timeline, timelines[0])
        ax.set_yticks([row + 0.43 for row in range(len(labels))], labels)
        ax.set_ylim(len(labels), -0.15)
        for row in range(1, len(labels), 2):
            ax.axhline(row - 0.07, color="#999999", linewidth=0.5)
    _save(figure, axes, panels, path)


def _with_phases(
    timelines: Sequence[tuple[str, Timeline]], phases: Sequence[Sequence[Schedule]]
) -> Iterable[tuple[tuple[str, Timeline], Sequence[Schedule]]]:
    return zip(timelines, phases or [()] * len(timelines), strict=True)


# ---------------------------------------------------------------------- bars


def _group_bars(
    timeline: Timeline, num_ranks: int, has_across: bool, phases: Sequence[Schedule]
) -> list[_Bar]:
    """All ranks: a lane for computing, and one for sending over each class of links."""
    heights = (
        {"attend": 0.46, "inside": 0.19, "across": 0.19} if has_across else {"attend": 0.54, "inside": 0.3}
    )
    offsets = {"attend": 0.0, "inside": heights["attend"] + 0.02, "across": heights["attend"] + 0.23}
    bars = []
    for rank in range(num_ranks):
        bars += _computing(timeline, rank, heights["attend"], phases)
    for span in timeline.transfers:
        row = span.rank + offsets[span.kind]
        bars.append(_Bar(_colour(span), row, heights[span.kind], span.start_s, span.end_s))
    return _stacked(bars)


def _rank_bars(timeline: Timeline, rank: int, phases: Sequence[Schedule]) -> tuple[list[_Bar], list[str]]:
    """One rank: the rows' bars, and their names."""
    order = list(PAYLOADS)
    lanes: dict[tuple[str, str], list[TransferSpan]] = defaultdict(list)
    for span in timeline.transfers:
        if rank in (span.rank, span.peer):
            lanes[span.kind, span.payload.name].append(span)
    has_across = any(kind == "across" for kind, _ in lanes)
    bars = _computing(timeline, rank, 0.82, phases, row=0)
    names = ["computes"]
    by_payload = sorted(
        lanes.items(), key=lambda lane: (lane[0][0], lane[1][0].payload.is_result, order.index(lane[0][1]))
    )
    for (kind, payload), spans in by_payload:
        for sends, word in ((False, "in"), (True, "out")):
            for span in spans:
                if (span.rank == rank) == sends:
                    peer = span.peer if sends else span.rank
                    labels = (f"{span.label} {'to' if sends else 'from'} {peer}", span.label)
                    bars.append(_Bar(_colour(span), len(names), 0.82, span.start_s, span.end_s, labels))
            names.append(f"{payload} {kind + ', ' if has_across else ''}{word}")
    return _stacked(bars), names


def _colour(span: TransferSpan) -> str:
    return span.kind + (" result" if span.payload.is_result else "")


def _stacked(bars: Iterable[_Bar]) -> list[_Bar]:
    """Bars of a row that overlap in time share its height."""
    rows: dict[float, list[_Bar]] = defaultdict(list)
    for bar in bars:
        rows[bar.row].append(bar)
    out = []
    for group in rows.values():
        ends_s: list[float] = []  # of each level
        levels = []
        for bar in sorted(group, key=lambda bar: (bar.start_s, bar.end_s)):
            free = [i for i, end_s in enumerate(ends_s) if end_s <= bar.start_s * (1 + 1e-9)]
            levels.append((bar, free[0] if free else len(ends_s)))
            ends_s[levels[-1][1] : levels[-1][1] + 1] = [bar.end_s]
        for bar, level in levels:
            height = bar.height / len(ends_s)
            out.append(replace(bar, row=bar.row + level * height, height=height))
    return out


def _computing(
    timeline: Timeline, rank: int, height: float, phases: Sequence[Schedule], row: int | None = None
) -> list[_Bar]:
    """The blocks of a rank, and its waits up to the end of the whole schedule."""
    at = rank if row is None else row
    spans = sorted(
        (span for span in timeline.spans if isinstance(span, AttendSpan) and span.rank == rank),
        key=lambda span: span.start_s,
    )
    actions = [a for schedule in phases for a in schedule.program(rank) if isinstance(a, Attend)]
    bars = []
    labels: tuple[str, ...]
    for i, span in enumerate(spans):
        kind, labels = "own", (span.label,)
        if actions:
            homes = {phases[0].problem.sharding.home[name.chunk] == rank for name in actions[i].q}
            kind = "both" if len(homes) == 2 else "own" if True in homes else "visiting"
            labels = _block_labels(actions[i])
        bars.append(_Bar(kind, at, height, span.start_s, span.end_s, labels))
    edges = [0.0, *(x for span in spans for x in (span.start_s, span.end_s)), timeline.makespan_s]
    waits = [(a, b) for a, b in list(pairwise(edges))[::2] if b - a > 1e-6 * timeline.makespan_s]
    return bars + [_Bar("idle", at, height, a, b) for a, b in waits]


def _block_labels(action: Attend) -> tuple[str, ...]:
    """As in "q3,7 kv1"; short, chunks with themselves are "self"."""
    q, kv = _numbers(action.q), _numbers(action.kv)
    short = "self" if q == kv else f"{q}\N{MIDDLE DOT}{kv}"
    return f"{action.q[0].payload}{q} {action.kv[0].payload}{kv}", short


def _numbers(names: Sequence[Piece]) -> str:
    """Chunks, runs of three or more as first-last."""
    runs: list[list[int]] = []
    for name in names:
        if runs and name.chunk == runs[-1][-1] + 1:
            runs[-1].append(name.chunk)
        else:
            runs.append([name.chunk])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


# ---------------------------------------------------------------------- drawing


def _figure(
    num_panels: int, inches: Sequence[float], title: str, panels: Sequence[Sequence[_Bar]]
) -> tuple["Figure", Sequence["Axes"]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = sum(inches) + 0.34 * num_panels + 0.75 + 0.16 * (1 + title.count("\n"))
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(num_panels, 1, sharex=True, squeeze=False, height_ratios=list(inches))[:, 0]
    handles = _legend({bar.kind for bars in panels for bar in bars})
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles) // 2,
        frameon=False,
        fontsize=7.5,
        columnspacing=1.5,
    )
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=7.5, color="#444444")
    return figure, list(axes)


def _legend(present: set[str]) -> list["Patch"]:
    """Two entries a column, of which one may be blank."""
    from matplotlib.patches import Patch

    blank = Patch(facecolor="none", label=" ")
    return [
        Patch(facecolor=COLOURS[kind], label=label) if kind in present else blank
        for column in LEGEND_COLUMNS
        if present & column.keys()
        for kind, label in column.items()
    ]


def _draw_bars(ax: "Axes", bars: Iterable[_Bar]) -> None:
    by_kind: dict[str, list[_Bar]] = defaultdict(list)
    for bar in bars:
        by_kind[bar.kind].append(bar)
    for kind, group in by_kind.items():
        ax.barh(
            [bar.row for bar in group],
            [(bar.end_s - bar.start_s) * 1e3 for bar in group],
            [bar.height for bar in group],
            left=[bar.start_s * 1e3 for bar in group],
            align="edge",
            color=COLOURS[kind],
            edgecolor="white",
            linewidth=0.5,
        )


def _finish_panel(ax: "Axes", name: str, timeline: Timeline, first: tuple[str, Timeline]) -> None:
    end_ms = timeline.makespan_s * 1e3
    ax.axvline(end_ms, color="black", linewidth=1)
    ratio = "" if timeline is first[1] else f", {timeline.makespan_s / first[1].makespan_s:.2f} of {first[0]}"
    ax.set_title(name, loc="left", fontsize=9, weight="bold", pad=4)
    digits = 0 if end_ms >= 100 else 1 if end_ms >= 10 else 2
    ax.set_title(f"{end_ms:.{digits}f} ms{ratio}", loc="right", fontsize=9, pad=4)
    ax.set_xlim(0, max(end_ms * 1.01, ax.get_xlim()[1] if ratio else 0))
    ax.tick_params(axis="both", labelsize=7.5)
    ax.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)


def _save(figure: "Figure", axes: Sequence["Axes"], panels: Sequence[Sequence[_Bar]], path: Path) -> None:
    import matplotlib as mpl

    axes[-1].set_xlabel(f"time, ms ({LABEL_NOTE})", fontsize=7.5)
    with mpl.rc_context({"svg.hashsalt": "charm_megatron"}):  # equal pictures are equal files
        figure.draw_without_rendering()
        has_labels = [_write_labels(ax, bars, figure.dpi) for ax, bars in zip(axes, panels, strict=True)]
        if not any(has_labels):
            axes[-1].set_xlabel("time, ms", fontsize=7.5)
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix, {})
        figure.savefig(path, dpi=200, metadata=metadata)


def _write_labels(ax: "Axes", bars: Iterable[_Bar], dots_per_inch: float) -> bool:
    """Labels all blocks, and each row of transfers, in one form; bars too narrow for it stay blank.

    The form is the longest that fits into most of them.
    """
    box = ax.get_window_extent()
    wide = box.width / dots_per_inch * 72 / (ax.get_xlim()[1] - ax.get_xlim()[0])  # points a ms
    high = box.height / dots_per_inch * 72 / abs(ax.get_ylim()[1] - ax.get_ylim()[0])  # points a row
    alike: dict[object, list[_Bar]] = defaultdict(list)
    for bar in bars:
        if bar.labels and bar.height * high > LABEL_POINTS + 1:
            alike["blocks" if bar.kind in COMPUTES else int(bar.row)].append(bar)
    has_labels = False
    for group in alike.values():
        for form in range(len(group[0].labels)):
            fitting = [
                bar
                for bar in group
                if _label_width(bar.labels[form]) + 2 <= (bar.end_s - bar.start_s) * 1e3 * wide
            ]
            if len(fitting) > 0.7 * len(group):
                for bar in fitting:
                    _write_label(ax, bar, bar.labels[form])
                has_labels = True
                break
    return has_labels


def _write_label(ax: "Axes", bar: _Bar, label: str) -> None:
    ax.text(
        (bar.start_s + bar.end_s) / 2 * 1e3,
        bar.row + bar.height / 2,
        label,
        color="white" if bar.kind in WHITE_ON else "black",
        fontsize=LABEL_POINTS,
        ha="center",
        va="center_baseline",
    )


@lru_cache(maxsize=4096)
def _label_width(label: str) -> float:
    """Points."""
    from matplotlib.textpath import TextPath

    width: float = TextPath((0, 0), label, size=LABEL_POINTS).get_extents().width
    return width
