"""Ranks are killed and stopped, links cut and stalled, in the middle of a job: it ends in time and says who it was.

`--faults N` runs N of them, of all kinds in all jobs at random moments, instead of the few that there are otherwise.
"""

import itertools
import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from charm_megatron.testbed.namespaces import is_available, marked
from charm_megatron.train.lock import require_unlocked
from charm_megatron.train.run_folder import read_rows
from tests.faults.faults import KINDS, Fault, all_links, inject, shape_link
from tests.faults.jobs import DEADLINE_S, NUM_RANKS, Job, make_job

pytestmark = [pytest.mark.net, pytest.mark.megatron]

JOBS = ("pretrain", "torchrun", "operator")
LATER_S = 15.0
"""After the deadline, at most."""
LEFT_S = 5.0
"""Helpers of multiprocessing end a moment after the command."""
SHARE_NAMED = 0.975
MAY_MISS = 1
"""Of few faults, which come at random moments: one would be more than that share."""
SAVE_INTERVAL = 2

FEW = [
    ("pretrain", "stop"),
    ("pretrain", "cut"),
    ("torchrun", "kill"),
    ("torchrun", "stall"),
    *(("operator", kind) for kind in KINDS),
]
"""Of each kind two, of each job at least two."""


@dataclass(frozen=True)
class Outcome:
    """What came of one fault."""

    job: str
    fault: Fault
    moment_s: float
    exit_code: int | None
    ended_s: float
    is_named: bool
    left: str
    said: str

    @property
    def is_in_time(self) -> bool:
        return self.exit_code not in (None, 0) and self.ended_s < DEADLINE_S + LATER_S


def run_with_fault(kind: str, fault: Fault, moment_s: float, folder: Path) -> Outcome:
    settings = {} if kind == "operator" else {"save_interval": SAVE_INTERVAL}
    job = make_job(kind, folder, **settings)
    job.start()
    try:
        job.wait_until(job.is_training)
        time.sleep(moment_s)
        inject(fault, job)
        started_s = time.monotonic()
        code = job.wait(DEADLINE_S + 2 * LATER_S)
        ended_s = time.monotonic() - started_s
        said = job.said()
        return Outcome(kind, fault, moment_s, code, ended_s, fault.is_named_in(said), left_by(job), said)
    finally:
        job.clean_up()


def left_by(job: Job) -> str:
    """What is there after a job that should not be."""
    deadline_s = time.monotonic() + LEFT_S
    while job.processes() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    names = [f"process {pid}" for pid in job.processes()]
    names += [name for name in marked() if "faults_2x2" in name]
    names += [str(path) for path in job.run.glob("**/*.tmp")]
    if job.run.exists():
        require_unlocked(job.run)  # the file may stay where SIGTERM has ended rank 0; the lock may not
    return ", ".join(names)


def fault_of(kind: str, job: str, chance: random.Random) -> Fault:
    is_link = kind in ("cut", "stall") and job != "operator"
    ranks = chance.choice(all_links()) if is_link else (chance.randrange(NUM_RANKS),)
    return Fault(kind, ranks)


def table_of(outcomes: list[Outcome]) -> Table:
    table = Table("job", "fault", "ranks", "at s", "exit", "ended s", "named", "left")
    for one in outcomes:
        table.add_row(
            one.job,
            one.fault.kind,
            " ".join(map(str, one.fault.ranks)),
            f"{one.moment_s:.2f}",
            str(one.exit_code),
            f"{one.ended_s:.1f}",
            "yes" if one.is_named else "NO",
            one.left or "-",
        )
    return table


@pytest.fixture(autouse=True)
def network() -> None:
    assert is_available(), "faults of links need root and network namespaces"


@pytest.mark.timeout(36_000)
def test_a_job_with_a_fault_ends_in_time_and_names_the_rank_or_the_link(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    wanted = request.config.getoption("--faults")
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    pairs = list(itertools.islice(itertools.cycle(itertools.product(JOBS, KINDS)), wanted)) if wanted else FEW
    outcomes = []
    for number, (job, kind) in enumerate(pairs):
        fault = fault_of(kind, job, chance)
        outcomes.append(run_with_fault(job, fault, chance.uniform(0, 1.5), tmp_path / str(number)))
        print(
            f"{number + 1} of {len(pairs)}: {job} {kind}: ended after {outcomes[-1].ended_s:.1f} s",
            flush=True,
        )
    Console(width=110).print(f"seed {seed}", table_of(outcomes))
    wrong = [one for one in outcomes if not one.is_named]
    for one in wrong:
        print(f"--- {one.job} {one.fault}:\n{one.said[-3000:]}")
    assert all(one.is_in_time for one in outcomes)
    assert not any(one.left for one in outcomes)
    assert len(wrong) <= max(MAY_MISS, (1 - SHARE_NAMED) * len(outcomes))


def run_to_end(folder: Path, iterations: int, *words: str, kind: str = "pretrain", **settings: object) -> Job:
    job = make_job(kind, folder, save_interval=SAVE_INTERVAL, exit_interval=iterations, **settings)
    job.argv = [*job.argv, *words]
    job.start()
    try:
        assert job.wait(300) == 0, job.said()
    finally:
        job.clean_up()
    return job


def losses(job: Job) -> list[float]:
    return [row["loss"] for row in read_rows(job.run / "metrics.jsonl")]


@pytest.mark.timeout(3600)
def test_a_run_is_resumed_after_a_fault_with_the_same_losses(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """At another context-parallel size, then at the first one again, with the distributed optimizer.

    With `--faults`, after each kind of fault in each kind of run.
    """
    iterations = 8
    settings = {"use_distributed_optimizer": True}
    whole = losses(run_to_end(tmp_path / "whole", iterations, **settings))
    every = [(kind, fault) for kind in ("pretrain", "torchrun") for fault in KINDS]
    for kind, fault in every if request.config.getoption("--faults") else [("pretrain", "stop")]:
        folder = tmp_path / f"{kind}-{fault}"
        broken = make_job(kind, folder, save_interval=SAVE_INTERVAL, **settings)
        broken.start()
        try:
            broken.wait_until(lambda: len(losses(broken)) > 2 * SAVE_INTERVAL)  # noqa: B023
            inject(Fault(fault, (0, 1) if fault in ("cut", "stall") else (1,)), broken)
            assert broken.wait(DEADLINE_S + LATER_S), broken.said()
        finally:
            broken.clean_up()
        done = int((broken.run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
        assert done > 0
        last = max(iterations, done + 2)
        if last > len(whole):
            whole = losses(run_to_end(tmp_path / f"whole-{last}", last, **settings))
        smaller = ("--resume", "--set", "megatron.context_parallel_size=2", "--set", "launch.ranks=2")
        between = run_to_end(folder, done + 1, *smaller, **settings)
        assert losses(between)[: done + 1] == pytest.approx(whole[: done + 1], rel=1e-5)
        again = run_to_end(folder, last, "--resume", **settings)
        assert losses(again) == pytest.approx(whole[:last], rel=1e-5)


def test_a_slow_link_changes_no_bit(tmp_path: Path) -> None:
    """Slower than the computation, but within the deadline."""
    iterations = 6
    undisturbed = losses(run_to_end(tmp_path / "fast", iterations))
    job = make_job("pretrain", tmp_path / "slow", exit_interval=iterations)
    job.start()
    try:
        job.wait_until(lambda: len(losses(job)) >= 1)
        shape_link(job, (1, 2), "tbf rate 8mbit burst 100000 limit 100000000")
        assert job.wait(300) == 0, job.said()
    finally:
        job.clean_up()
    assert losses(job) == undisturbed
