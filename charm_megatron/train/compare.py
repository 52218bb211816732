"""Runs side by side: what they were, how their losses differ, how long their iterations took."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeGuard

from charm_megatron.config import RunConfig, load_run_config
from charm_megatron.errors import InvalidInput
from charm_megatron.train.run_folder import RunFolder, read_rows

WARM_UP_ITERATIONS = 1
"""Of each run, that count for no time: the first makes plans and connections."""


@dataclass(frozen=True)
class ComparedRun:
    """One run: its rows by iteration, the last validation loss, and its figures beside the first run's.

    Differences are the largest over the iterations that both have; None: of the first run, or where none is shared.
    """

    name: str
    config: RunConfig
    rows: Mapping[int, Mapping[str, Any]]
    validation_loss: float | None
    num_shared: int | None
    loss_difference: float | None
    grad_norm_difference: float | None
    step_time_s: float | None
    tokens_per_s: float | None
    speed: float | None

    @property
    def iterations(self) -> Sequence[int]:
        return sorted(self.rows)

    def losses(self) -> tuple[Sequence[int], Sequence[float]]:
        """Iterations and losses, for drawing."""
        return self.iterations, [self.rows[iteration]["loss"] for iteration in self.iterations]

    def step_times_s(self) -> tuple[Sequence[int], Sequence[float]]:
        """Iterations and their times, for drawing; without those that count for no time."""
        timed = self.iterations[WARM_UP_ITERATIONS:] or self.iterations
        return timed, [self.rows[iteration]["step_time_s"] for iteration in timed]


def compare_runs(paths: Sequence[Path]) -> list[ComparedRun]:
    """The runs in these folders, the first being what others are held against.

    Raises `InvalidInput` for a folder that holds no run, or a run without an iteration.
    """
    runs = [_read(path) for path in paths]
    first_rows = runs[0][2]
    first_s = _step_time_s(first_rows)
    compared = []
    for i, (name, config, rows, validation_loss) in enumerate(runs):
        shared = None if i == 0 else sorted(rows.keys() & first_rows.keys())
        time_s = _step_time_s(rows)
        compared.append(
            ComparedRun(
                name=name,
                config=config,
                rows=rows,
                validation_loss=validation_loss,
                num_shared=None if shared is None else len(shared),
                loss_difference=_largest_difference(rows, first_rows, shared, "loss"),
                grad_norm_difference=_largest_difference(rows, first_rows, shared, "grad_norm"),
                step_time_s=time_s,
                tokens_per_s=_tokens_per_s(rows, time_s),
                speed=first_s / time_s if first_s and time_s else None,
            )
        )
    return compared


def _read(path: Path) -> tuple[str, RunConfig, dict[int, dict[str, Any]], float | None]:
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise InvalidInput(f"{path} is no run folder: it has no {folder.config.name}")
    rows = {row["iteration"]: row for row in read_rows(folder.metrics) if _is_number(row.get("loss"))}
    if not rows:
        raise InvalidInput(f"{path} has no iteration with a loss in {folder.metrics.name}")
    validation = [
        row["loss"]
        for row in read_rows(folder.evaluation)
        if row.get("part") == "validation" and _is_number(row.get("loss"))
    ]
    return str(path), load_run_config(folder.config), rows, validation[-1] if validation else None


def _largest_difference(
    rows: Mapping[int, Mapping[str, Any]],
    others: Mapping[int, Mapping[str, Any]],
    shared: Sequence[int] | None,
    key: str,
) -> float | None:
    """NaN where one of two values is NaN: such a difference must not be lost in a maximum."""
    pairs = [(rows[i].get(key), others[i].get(key)) for i in shared or ()]
    differences = [abs(a - b) for a, b in pairs if _is_number(a) and _is_number(b)]
    if any(map(math.isnan, differences)):
        return math.nan
    return max(differences, default=None)


def _step_time_s(rows: Mapping[int, Mapping[str, Any]]) -> float | None:
    """The median, the first iterations left out where there are more."""
    times_s = [rows[i]["step_time_s"] for i in sorted(rows) if _is_number(rows[i].get("step_time_s"))]
    timed = times_s[WARM_UP_ITERATIONS:] or times_s
    return median(timed) if timed else None


def _tokens_per_s(rows: Mapping[int, Mapping[str, Any]], step_time_s: float | None) -> float | None:
    """Rows count the tokens of all iterations so far."""
    last = max(rows)
    tokens = rows[last].get("tokens")
    return tokens / last / step_time_s if _is_number(tokens) and step_time_s and last else None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
