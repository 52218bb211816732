"""Draws the losses of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes  # the backend is chosen first: no display is needed
from matplotlib.figure import Figure

from charm_megatron.train.compare import ComparedRun

Rows = Sequence[Mapping[str, Any]]

LOSS_COLOR, VALIDATION_COLOR, GRADIENT_COLOR = "#1f5fa8", "#d1495b", "#7a7a7a"


def draw_losses(path: Path, steps: Rows, evaluations: Rows, title: str) -> None:
    """Training loss as a line, evaluation losses as points, the gradient norm below; written as PNG."""
    figure = Figure(figsize=(8, 5.5), dpi=150, layout="constrained")
    loss_axes, norm_axes = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    _draw_loss(loss_axes, steps, evaluations)
    loss_axes.set_title(title, loc="left", fontsize=10)
    norm_axes.plot(*_points(steps, "grad_norm"), color=GRADIENT_COLOR, linewidth=1)
    norm_axes.set(ylabel="gradient norm", xlabel="iteration")
    for axes in (loss_axes, norm_axes):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _draw_loss(axes: Axes, steps: Rows, evaluations: Rows) -> None:
    axes.plot(*_points(steps, "loss"), color=LOSS_COLOR, linewidth=1.3, label="training")
    for part, marker in (("validation", "o"), ("test", "D")):
        rows = [row for row in evaluations if row["part"] == part]
        if rows:
            axes.plot(
                *_points(rows, "loss"), marker, color=VALIDATION_COLOR, markersize=5, label=part, zorder=3
            )
    axes.set_ylabel("loss (nats per byte)")
    axes.legend(frameon=False)


def draw_comparison(path: Path, runs: Sequence[ComparedRun]) -> None:
    """The losses of runs over each other, and below how long their iterations took; PNG, SVG or PDF."""
    figure = Figure(figsize=(8, 5.5), dpi=150, layout="constrained")
    loss_axes, time_axes = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for number, run in enumerate(runs):
        # Curves that lie on each other stay visible: later ones are thinner and dashed.
        style = {
            "linewidth": 2.6 - 0.8 * min(number, 2),
            "linestyle": "-" if number == 0 else (0, (4, 2 + number)),
        }
        (line,) = loss_axes.plot(*run.losses(), label=f"{run.name} ({run.config.charm.schedule})", **style)
        iterations, times_s = run.step_times_s()
        time_axes.plot(iterations, [1e3 * time_s for time_s in times_s], color=line.get_color(), linewidth=1)
    loss_axes.set_ylabel("loss (nats per byte)")
    loss_axes.legend(frameon=False)
    time_axes.set(ylabel="iteration, ms", xlabel="iteration", ylim=(0, None))
    for axes in (loss_axes, time_axes):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _points(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    """Iterations and values, without the rows that have none."""
    kept = [row for row in rows if row[key] is not None]
    return [row["iteration"] for row in kept], [row[key] for row in kept]
