"""How long planning and checking take as groups grow: the plan must be ready before the first step of a job."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from charm_megatron.compile import compile_attention
from charm_megatron.config import CharmConfig
from charm_megatron.schedule.passes import DIRECTIONS
from charm_megatron.topology import even_domains
from charm_megatron.verify.programs import check_schedule
from charm_megatron.verify.tables import check_tables
from charm_megatron.workload import Workload

RANKS_PER_NODE = 8
HEADS, HEAD_DIM = 8, 64
LARGEST_PROGRAM_CHECK = 128
"""Groups up to this size are also checked by running all programs."""


@dataclass(frozen=True)
class PlanningTime:
    """Seconds for both passes of one schedule. `program_s`: one rank's actions; `check_s`: all programs, if run."""

    schedule: str
    cp_size: int
    num_hops: int
    plan_s: float
    program_s: float
    check_tables_s: float
    check_s: float | None

    @property
    def ready_s(self) -> float:
        """What one rank needs before its first step."""
        return self.plan_s + self.program_s


def measure_planning(names: Sequence[str], sizes: Sequence[int]) -> Iterator[PlanningTime]:
    """Causal zigzag, 8 ranks a domain, once each."""
    for name in names:
        for size in sizes:
            yield _measure(name, size)


def _measure(name: str, size: int) -> PlanningTime:
    domains = even_domains(size, max(1, size // RANKS_PER_NODE))
    workload = Workload(1, 8 * size, HEADS, HEADS, HEAD_DIM, HEAD_DIM)
    started = time.perf_counter()
    plan = compile_attention(CharmConfig(schedule=name), domains, workload, "zigzag")
    schedules = plan.schedules
    planned = time.perf_counter()
    for direction in DIRECTIONS:
        plan.rank_programs(direction, size // 2)
    programmed = time.perf_counter()
    for schedule in schedules:
        check_tables(schedule)
    proved = time.perf_counter()
    check_s = None
    if size <= LARGEST_PROGRAM_CHECK:
        for schedule in schedules:
            check_schedule(schedule)
        check_s = time.perf_counter() - proved
    return PlanningTime(
        name,
        size,
        sum(len(schedule.hops.comm_step) for schedule in schedules),
        planned - started,
        programmed - planned,
        proved - programmed,
        check_s,
    )
