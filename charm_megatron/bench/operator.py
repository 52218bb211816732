"""Times schedules of attention against each other on the same ranks, network and tensors.

Repetitions are interleaved (A B C A B C ..), so that what disturbs the machine disturbs all. A time is that of the
slowest rank, from a common barrier to its result. Each pass has two bounds beside it: the busiest link or the
computation, whichever is larger; and the critical path of the schedule with every link at full rate and nothing else
to pay.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from charm_megatron.bench.ranks import run_on_ranks
from charm_megatron.config import CharmConfig
from charm_megatron.executor.runtime import Schedules, plan_schedules
from charm_megatron.schedule.passes import Direction
from charm_megatron.schedule.report import report
from charm_megatron.schedule.schedule import Schedule
from charm_megatron.schedule.wire import WireFormat, make_wire_format, traffic
from charm_megatron.simulator import CostModel, Link, evaluate
from charm_megatron.topology import even_domains
from charm_megatron.workload import Workload

PASSES: tuple[Direction, Direction] = ("forward", "backward")


@dataclass(frozen=True)
class Network:
    """The ranks' network: where each rank runs, and its rates as configured, one way and for each rank.

    `namespaces` are the ranks' network namespaces, or None for this machine's loopback, whose rates are not
    known.
    """

    num_domains: int
    ranks_per_domain: int
    inside_bytes_per_s: float | None = None
    across_bytes_per_s: float | None = None
    namespaces: tuple[str, ...] | None = None
    interface: str = "lo"
    master_addr: str = "127.0.0.1"

    @property
    def num_ranks(self) -> int:
        return self.num_domains * self.ranks_per_domain

    def cost_model(self, flops_per_s: float) -> CostModel | None:
        """The network as the simulator's links; None for loopback."""
        if self.inside_bytes_per_s is None or self.across_bytes_per_s is None:
            return None
        return CostModel(flops_per_s, Link(self.inside_bytes_per_s), Link(self.across_bytes_per_s))


@dataclass(frozen=True)
class OperatorCase:
    """One workload and the schedules to run it with. `ccr` is the target of modelled computation; None: real."""

    workload: Workload
    schedules: tuple[str, ...]
    layout: str = "zigzag"
    settings: CharmConfig = field(default_factory=CharmConfig)
    ccr: float | None = None
    repetitions: int = 5
    warm_up: int = 1

    @property
    def is_modelled(self) -> bool:
        return self.ccr is not None


@dataclass(frozen=True)
class OperatorRow:
    """One pass of one schedule. Times in seconds; bytes are those of the busiest sender."""

    schedule: str
    direction: str
    median_s: float
    min_s: float
    max_s: float
    ratio_to_first: float
    ccr: float
    is_modelled: bool
    bytes_planned: int
    bytes_wire: int | None
    busiest_s: float | None
    bound_s: float | None

    @property
    def fraction_of_bound(self) -> float | None:
        """How much of the critical path's speed is reached."""
        return None if self.bound_s is None else self.bound_s / self.median_s


@dataclass(frozen=True)
class RankTimes:
    """What one rank measured: seconds by (schedule, direction), and bytes that left its interface by the same."""

    seconds: Mapping[tuple[str, str], list[float]]
    wire_bytes: Mapping[tuple[str, str], list[int]]
    communication_s: Mapping[str, float]
    computation_s: Mapping[str, float]


def run_case(
    case: OperatorCase, network: Network, progress: Callable[[str], None] = lambda stage: None
) -> list[OperatorRow]:
    """Runs all schedules of a case; the ratio is to the first of them."""
    from charm_megatron.bench.operator_rank import measure_rank

    progress("starting ranks")
    flops = {direction: _flops(case, network, direction) for direction in PASSES}
    measured: list[RankTimes] = run_on_ranks(measure_rank, network, case, network.num_domains, flops)
    rows = [_row(case, network, measured, name, direction) for name in case.schedules for direction in PASSES]
    first = {row.direction: row.median_s for row in rows if row.schedule == case.schedules[0]}
    return [replace(row, ratio_to_first=first[row.direction] / row.median_s) for row in rows]


def _row(
    case: OperatorCase, network: Network, measured: Sequence[RankTimes], name: str, direction: Direction
) -> OperatorRow:
    times = [
        max(repetition) for repetition in zip(*(m.seconds[name, direction] for m in measured), strict=True)
    ]
    phases, wire = planned(case, network, name)
    schedules = phases[direction]
    sent = traffic(*schedules, wire=wire)
    computation_s = max(m.computation_s[direction] for m in measured)
    communication_s = max(m.communication_s[direction] for m in measured)
    on_wire = [
        max(repetition) for repetition in zip(*(m.wire_bytes[name, direction] for m in measured), strict=True)
    ]
    cost = network.cost_model(_flops(case, network, direction) / computation_s) if computation_s else None
    return OperatorRow(
        schedule=name,
        direction=direction,
        median_s=statistics.median(times),
        min_s=min(times),
        max_s=max(times),
        ratio_to_first=1.0,
        ccr=computation_s / communication_s if communication_s else float("inf"),
        is_modelled=case.is_modelled,
        bytes_planned=int(sent.total_bytes.max()),
        bytes_wire=int(statistics.median(on_wire)) if network.namespaces else None,
        busiest_s=_busiest_s(schedules, wire, cost, computation_s),
        bound_s=sum(evaluate(schedule, wire, cost).makespan_s for schedule in schedules) if cost else None,
    )


def planned(case: OperatorCase, network: Network, name: str) -> tuple[Schedules, WireFormat]:
    """The schedules and wire format that the ranks agree on for one name."""
    settings = settings_for(case, network.num_domains, name)
    domains = even_domains(network.num_ranks, network.num_domains)
    schedules, _ = plan_schedules(settings, domains, case.workload, case.layout)
    problem = schedules["forward"][0].problem
    wire = make_wire_format(
        case.workload, problem, out_return=settings.return_dtype, grad_return=settings.grad_return_dtype
    )
    return schedules, wire


def settings_for(case: OperatorCase, num_domains: int, name: str) -> CharmConfig:
    """The case's settings for one schedule."""
    return case.settings.model_copy(update={"schedule": name, "domains": num_domains})


def _flops(case: OperatorCase, network: Network, direction: Direction) -> float:
    """Work of the busiest rank of the first schedule, by which computation was measured."""
    schedules, wire = planned(case, network, case.schedules[0])
    return float(report(schedules[direction], wire).flops.max())


def _busiest_s(
    schedules: Sequence[Schedule], wire: WireFormat, cost: CostModel | None, computation_s: float
) -> float | None:
    if cost is None:
        return None
    out = traffic(*schedules, wire=wire)
    times = [
        out.inside_bytes.max() / cost.inside.bytes_per_s,
        out.across_bytes.max() / cost.across.bytes_per_s,
    ]
    return max(computation_s, *(float(x) for x in times))


def as_json(row: OperatorRow) -> dict[str, Any]:
    """A row for other programs."""
    return {
        "schedule": row.schedule,
        "pass": row.direction,
        "median_s": row.median_s,
        "min_s": row.min_s,
        "max_s": row.max_s,
        "ratio_to_first": row.ratio_to_first,
        "ccr": row.ccr,
        "compute": "modelled" if row.is_modelled else "real",
        "bytes_planned": row.bytes_planned,
        "bytes_wire": row.bytes_wire,
        "busiest_s": row.busiest_s,
        "bound_s": row.bound_s,
        "fraction_of_bound": row.fraction_of_bound,
    }
