"""Times of training iterations from run folders, for the rows of the CHARM+ paper's Tables 6 and 7."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from charm_megatron.errors import InvalidInput
from charm_megatron.paper.tables_6_7 import ITERATIONS, Iteration
from charm_megatron.train.run_folder import RunFolder, read_rows

RING, CHARM = "ring", "charm"
STEP_TIME = "step_time_s"
NUM_WARM_UP = 10
"""Iterations left out at the start: allocation, connections, choice of kernels."""


@dataclass(frozen=True)
class ComparedIteration:
    """A row of the paper, and what runs here took; None where there is no run, or one that is too short."""

    paper: Iteration
    ring_ms: float | None
    charm_ms: float | None


def compare_iterations(runs: Path) -> list[ComparedIteration]:
    """Every row, with the run folders `runs/<config>-<variant>-<schedule>`.

    Raises `InvalidInput` where there is no such folder, or a file of one is not what a run writes.
    """
    if not runs.is_dir():
        raise InvalidInput(
            f"{runs} is not a folder; it must hold run folders such as {_run_name(ITERATIONS[0], RING)}"
        )
    compared = [
        ComparedIteration(row, *(iteration_ms(runs / _run_name(row, schedule)) for schedule in (RING, CHARM)))
        for row in ITERATIONS
    ]
    if not any(
        (runs / _run_name(row, schedule)).is_dir() for row in ITERATIONS for schedule in (RING, CHARM)
    ):
        raise InvalidInput(f"{runs} holds no run folder such as {_run_name(ITERATIONS[0], RING)}")
    return compared


def _run_name(row: Iteration, schedule: str) -> str:
    return f"{row.config}-{row.variant}-{schedule}"


def iteration_ms(run: Path) -> float | None:
    """The median of a run's iterations after the first ones. Raises `InvalidInput` for a row without its time."""
    path = RunFolder(run).metrics
    try:
        rows = read_rows(path)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"cannot read {path}: {error}") from error
    if not rows and path.exists() and path.stat().st_size:
        raise InvalidInput(f"{path} holds no row of an iteration")
    times_s = [_step_time_s(row, path, number) for number, row in enumerate(rows, 1)][NUM_WARM_UP:]
    return 1000 * median(times_s) if times_s else None


def _step_time_s(row: Any, path: Path, number: int) -> float:
    time_s = row.get(STEP_TIME) if isinstance(row, dict) else None
    if not isinstance(time_s, int | float) or not 0 < time_s < math.inf:
        raise InvalidInput(f"{path}: row {number} must have {STEP_TIME}, a positive number of seconds")
    return time_s
