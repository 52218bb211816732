"""Times schedules of attention, and other libraries' attention, against each other on the same ranks and tensors.

Repetitions are interleaved (A B C A B C ..), so that what disturbs the machine disturbs all. A time is that of the
slowest rank, from a common barrier to its result. Each pass has two times beside it: the bound of the busiest link or
the computation, whichever is larger; and the critical path of the schedule's programs, transfers of a rank's link one
after the other at full rate, and nothing else to pay.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from charm_megatron.bench.cluster import Cluster
from charm_megatron.bench.ranks import Tell, job_backend, run_on_ranks
from charm_megatron.compile import Plan, compile_attention
from charm_megatron.config import CharmConfig
from charm_megatron.cost.model import CostModel
from charm_megatron.cost.timeline import evaluate
from charm_megatron.cost.wire import hop_bytes
from charm_megatron.errors import InvalidInput
from charm_megatron.kernels.unsharded import (
    RESULTS,
    Shard,
    assembled,
    draw_shard,
    relative_error,
    unsharded_attention,
)
from charm_megatron.peers.registry import PEERS, peer_named, tokens_of
from charm_megatron.schedule.passes import DIRECTIONS, Direction
from charm_megatron.schedule.piece import IntArray
from charm_megatron.sharding import make_sharding
from charm_megatron.workload import Workload

MOST_LOGITS = 2**27
"""Of one KV head, in float64: with more, unsharded attention would take longer than the benchmark, and the memory."""


@dataclass(frozen=True)
class OperatorCase:
    """One workload and the contestants: schedules of ours by name, and peers.

    `ccr` is the target of modelled computation; None: real.
    """

    workload: Workload
    schedules: tuple[str, ...]
    layout: str = "zigzag"
    settings: CharmConfig = field(default_factory=lambda: CharmConfig(fuse=False))
    ccr: float | None = None
    repetitions: int = 5
    warm_up: int = 1
    peers: tuple[str, ...] = ()
    passes: tuple[Direction, ...] = DIRECTIONS

    def __post_init__(self) -> None:
        if not self.schedules:
            raise InvalidInput("there is no schedule to time; name one, such as --schedules ring,charm")
        if len(set(self.schedules)) != len(self.schedules):
            raise InvalidInput(f"a schedule is named twice: {','.join(self.schedules)}")
        if len(set(self.peers)) != len(self.peers):
            raise InvalidInput(f"a peer is named twice: {','.join(self.peers)}")
        for name in self.peers:
            peer_named(name)

    @property
    def is_modelled(self) -> bool:
        return self.ccr is not None

    @property
    def can_be_checked(self) -> bool:
        """Whether its results can be compared with unsharded attention."""
        workload = self.workload
        rows = workload.batch * workload.num_heads // workload.num_kv_heads * workload.seq_len
        return rows * workload.seq_len <= MOST_LOGITS

    @property
    def num_stages(self) -> int:
        """How many lines of progress a run tells."""
        return 3 + (self.warm_up + self.repetitions) * len(self.contestants)

    @property
    def contestants(self) -> tuple[str, ...]:
        return (*self.schedules, *self.peers)


@dataclass(frozen=True)
class OperatorRow:
    """One pass of one contestant. Times in seconds; bytes are those of the busiest sender.

    `note` says why a contestant was not timed, its numbers being None, or what is wrong with its results. Also None:
    what is planned or bounded, for peers; what came over the wire, on loopback; bounds, where the rates of the links
    are not known; `error`, the largest difference to unsharded attention over the largest entry, where nothing was
    computed.
    """

    schedule: str
    direction: Direction
    network: str
    is_modelled: bool
    is_peer: bool = False
    median_s: float | None = None
    min_s: float | None = None
    max_s: float | None = None
    ratio_to_first: float | None = None
    ccr: float | None = None
    bytes_planned: int | None = None
    bytes_wire: int | None = None
    busiest_s: float | None = None
    bound_s: float | None = None
    error: float | None = None
    note: str = ""

    @property
    def fraction_of_bound(self) -> float | None:
        """How much of the critical path's speed is reached."""
        return None if self.bound_s is None or self.median_s is None else self.bound_s / self.median_s

    @property
    def fraction_of_busiest(self) -> float | None:
        """How much of the busiest link's, or the computation's, speed is reached."""
        return None if self.busiest_s is None or self.median_s is None else self.busiest_s / self.median_s


Key = tuple[str, Direction]
"""A contestant, and a direction."""

TokensByRank = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RankTimes:
    """What one rank measured: seconds and bytes that left its interface, by repetition.

    `computation_s`, `communication_s`: of the first schedule, by direction. `outputs`: out, dq, dk, dv of this rank,
    where they were computed. `notes` says why a contestant did not take part, or that its results are wrong.
    """

    seconds: Mapping[Key, Sequence[float]]
    wire_bytes: Mapping[Key, Sequence[int]]
    communication_s: Mapping[Direction, float]
    computation_s: Mapping[Direction, float]
    outputs: Mapping[str, Sequence[NDArray[np.float64]]]
    notes: Mapping[str, str]


def run_case(case: OperatorCase, cluster: Cluster, progress: Tell = lambda line: None) -> list[OperatorRow]:
    """Runs all contestants of a case; ratios are to the first. Empty on the later ranks of a launched job."""
    from charm_megatron.bench.rank import measure_rank

    progress("starting ranks")
    if cluster.is_launched and job_backend() == "nccl":
        _require_for_nccl(case)
    plans = {name: planned(case, cluster, name) for name in case.schedules}
    for name, plan in plans.items():
        if case.is_modelled and not plan.has_block_results:
            raise InvalidInput(
                f"{name} computes whole rows of logits, not blocks that waits can replace; leave it out, or "
                f"--compute modelled and --ccr"
            )
    # Of the first schedule, by which computation is measured.
    flops = {direction: _busiest_flops(plans[case.schedules[0]], direction) for direction in DIRECTIONS}
    measured: list[RankTimes] | None = run_on_ranks(
        measure_rank, cluster, case, cluster.num_domains, flops, progress=progress
    )
    if measured is None:
        return []
    errors = _errors(case, measured)
    rows = [
        _row(case, cluster, measured, errors, name, direction, plans.get(name), flops[direction])
        for name in case.contestants
        for direction in case.passes
    ]
    first = {row.direction: row.median_s for row in rows if row.schedule == case.schedules[0]}
    return [replace(row, ratio_to_first=_ratio(first[row.direction], row.median_s)) for row in rows]


def _require_for_nccl(case: OperatorCase) -> None:
    if case.is_modelled:
        raise InvalidInput(
            "modelled computation (--compute modelled, --ccr) waits on the CPU, for which no GPU waits; leave it out, "
            "or set CUDA_VISIBLE_DEVICES= for gloo on CPUs"
        )
    if not case.settings.fuse:
        raise InvalidInput(
            "over NCCL, transfers of a step that are posted apart may wait for each other forever; add --fuse"
        )
    if case.peers:
        raise InvalidInput(
            "peers run on CPUs only, on torch's CPU operators; leave --peers out, or set CUDA_VISIBLE_DEVICES="
        )


def _ratio(first_s: float | None, this_s: float | None) -> float | None:
    return first_s / this_s if first_s and this_s else None


def _row(
    case: OperatorCase,
    cluster: Cluster,
    measured: Sequence[RankTimes],
    errors: Mapping[Key, float],
    name: str,
    direction: Direction,
    plan: Plan | None,
    first_flops: float,
) -> OperatorRow:
    """`plan` is None for peers; `first_flops` is the work that `computation_s` was measured for."""
    computation_s = max(one.computation_s[direction] for one in measured)
    communication_s = max(one.communication_s[direction] for one in measured)
    row = OperatorRow(
        schedule=name,
        direction=direction,
        network=str(cluster),
        is_modelled=case.is_modelled,
        is_peer=name in case.peers,
        ccr=computation_s / communication_s if communication_s else float("inf"),
    )
    row = replace(row, note=measured[0].notes.get(name, ""))
    if (name, direction) not in measured[0].seconds:
        return row
    times = _slowest([one.seconds[name, direction] for one in measured])
    row = replace(row, median_s=statistics.median(times), min_s=min(times), max_s=max(times))
    row = replace(row, error=errors.get((name, direction)))
    if cluster.namespaces:
        wire_bytes = [statistics.median(one.wire_bytes[name, direction]) for one in measured]
        row = replace(row, bytes_wire=int(max(wire_bytes)))
    if plan is None:
        return row
    cost = cluster.cost_model(first_flops / computation_s) if computation_s else None
    return replace(row, **_of_plan(plan, direction, cluster, cost))


def _slowest(times: Sequence[Sequence[float]]) -> list[float]:
    """By repetition, the time of the slowest rank."""
    return [max(repetition) for repetition in zip(*times, strict=True)]


def _of_plan(plan: Plan, direction: Direction, cluster: Cluster, cost: CostModel | None) -> dict[str, Any]:
    """What the plan says of a row: bytes, and bounds where the rates of the links are known."""
    schedules = plan.phases(direction)
    pair_bytes = pairwise_bytes(plan, direction)
    values: dict[str, Any] = {"bytes_planned": int(pair_bytes.sum(axis=1).max())}
    link_s = cluster.busiest_link_s(pair_bytes)
    if link_s is not None and cost is not None:
        values["bound_s"] = sum(evaluate(schedule, plan.wire, cost).makespan_s for schedule in schedules)
        values["busiest_s"] = max(link_s, _busiest_flops(plan, direction) / cost.flops_per_s)
    return values


def planned(case: OperatorCase, cluster: Cluster, name: str) -> Plan:
    """The plan that the ranks agree on for one name."""
    settings = settings_for(case, cluster.num_domains, name)
    return compile_attention(settings, cluster.domains, case.workload, case.layout)


def settings_for(case: OperatorCase, num_domains: int, name: str) -> CharmConfig:
    """The case's settings for one schedule."""
    return case.settings.model_copy(update={"schedule": name, "domains": num_domains})


def pairwise_bytes(plan: Plan, direction: Direction) -> IntArray:
    """Bytes that each rank sends to each other, [from, to]."""
    total: IntArray = np.zeros((plan.problem.cp_size,) * 2, dtype=np.int64)
    for schedule in plan.phases(direction):
        np.add.at(total, (schedule.hops.src, schedule.hops.dst), hop_bytes(schedule, plan.wire))
    return total


def _busiest_flops(plan: Plan, direction: Direction) -> float:
    """Work of the busiest rank."""
    return float(plan.report(direction).flops.max())


# ---------------------------------------------------------------------- errors


def _errors(case: OperatorCase, measured: Sequence[RankTimes]) -> dict[Key, float]:
    """The larger of the relative errors of out (forward), or dq, dk, dv (backward), by contestant."""
    errors = {}
    references: dict[TokensByRank, dict[str, Tensor]] = {}
    for name in measured[0].outputs:
        tokens = tokens_by_rank(case, name, len(measured))
        if tokens not in references:
            shards = [shard_of(case.workload, rank, len(measured)) for rank in range(len(measured))]
            q, k, v, dout = (assembled(tensors, tokens) for tensors in zip(*shards, strict=True))
            references[tokens] = unsharded_attention(q, k, v, dout, case.workload.mask)
        found = [
            relative_error(assembled([*map(torch.from_numpy, parts)], tokens), references[tokens][tensor])
            for parts, tensor in zip(
                zip(*(one.outputs[name] for one in measured), strict=True), RESULTS, strict=True
            )
        ]
        errors[name, Direction.FORWARD] = found[0]
        errors[name, Direction.BACKWARD] = max(found[1:], default=0.0)
    return errors


def tokens_by_rank(case: OperatorCase, name: str, num_ranks: int) -> TokensByRank:
    """Which tokens each rank holds for one contestant."""
    if name in case.peers:
        return tuple(tokens_of(PEERS[name], case.workload, num_ranks, rank) for rank in range(num_ranks))
    workload = case.workload
    return make_sharding(case.layout, num_ranks, workload.seq_len, workload.mask.documents).tokens_by_rank


def shard_of(workload: Workload, rank: int, num_ranks: int) -> Shard:
    """q, k, v, dout of one rank."""
    return draw_shard(rank, workload.seq_len // num_ranks, workload)


def as_json(row: OperatorRow) -> dict[str, Any]:
    """A row for other programs."""
    return {
        "network": row.network,
        "schedule": row.schedule,
        "peer": row.is_peer,
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
        "error": row.error,
        "note": row.note,
    }
