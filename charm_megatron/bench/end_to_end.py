"""Times of training iterations from run folders, for the rows of the CHARM+ paper's Tables 6 and 7."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from charm_megatron.paper.tables_6_7 import ITERATIONS, Iteration
from charm_megatron.train.run_folder import RunFolder, read_rows

NUM_WARM_UP = 10
"""Iterations left out at the start: allocation, connections, kernels chosen."""


@dataclass(frozen=True)
class Compared:
    """A row of the paper and what runs here took; None where there is no run, or too short a one."""

    paper: Iteration
    ring_ms: float | None
    charm_ms: float | None


def compare_iterations(runs: Path) -> Iterator[Compared]:
    """Every row, with the run folders `runs/<config>-<variant>-<schedule>`."""
    for row in ITERATIONS:
        ring_ms, charm_ms = (
            iteration_ms(runs / f"{row.config}-{row.variant}-{schedule}") for schedule in ("ring", "charm")
        )
        yield Compared(row, ring_ms, charm_ms)


def iteration_ms(run: Path) -> float | None:
    """The median of a run's iterations after the first ones."""
    times = [row["step_time_s"] for row in read_rows(RunFolder(run).metrics)][NUM_WARM_UP:]
    return 1000 * median(times) if times else None
