"""Times schedules of attention, and other libraries' attention, against each other on the same ranks and tensors.

Repetitions are interleaved (A B C A B C ..), so that what disturbs the machine disturbs all. A time is that of the
slowest rank, from a common barrier to its result. Each pass has two times beside it: the bound of the busiest link or
the computation, whichever is larger; and the critical path of the schedule's programs, transfers of a rank's link one
after the other at full rate, and nothing else to pay.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from charm_megatron.bench.case import OperatorCase, OperatorRow, RankTimes, TimingKey, TokensByRank, shard_of
from charm_megatron.bench.cluster import Cluster
from charm_megatron.bench.rank import measure_rank
from charm_megatron.bench.ranks import job_backend, run_on_ranks
from charm_megatron.compile import Plan
from charm_megatron.cost.model import CostModel
from charm_megatron.cost.timeline import evaluate
from charm_megatron.cost.wire import hop_bytes
from charm_megatron.errors import InvalidInput
from charm_megatron.kernels.unsharded import RESULTS, assembled, relative_error, unsharded_attention
from charm_megatron.log import Log, silent
from charm_megatron.schedule.passes import DIRECTIONS, Direction
from charm_megatron.schedule.piece import IntArray


def run_case(case: OperatorCase, cluster: Cluster, progress: Log = silent) -> list[OperatorRow]:
    """Runs all implementations of a case; ratios are to the first. Empty on the later ranks of a launched job."""
    progress("starting ranks")
    if cluster.is_launched and job_backend() == "nccl":
        _require_for_nccl(case)
    plans = {name: case.plan(name, cluster.domains) for name in case.schedules}
    for name, plan in plans.items():
        if case.is_modelled and not plan.has_block_results:
            raise InvalidInput(
                f"{name} computes whole rows of logits, not blocks that waits can replace; leave it out, or "
                f"--compute modelled and --ccr"
            )
    # Of the first schedule, by which computation is measured.
    flops = {direction: _busiest_flops(plans[case.schedules[0]], direction) for direction in DIRECTIONS}
    measured: list[RankTimes] | None = run_on_ranks(
        measure_rank,
        cluster,
        case,
        cluster.num_domains,
        flops,
        deadline_s=case.settings.deadline_s,
        progress=progress,
    )
    if measured is None:
        return []
    errors = _errors(case, measured)
    rows = [
        _row(case, cluster, measured, errors, name, direction, plans.get(name), flops[direction])
        for name in case.implementations
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
    errors: Mapping[TimingKey, float],
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


def _errors(case: OperatorCase, measured: Sequence[RankTimes]) -> dict[TimingKey, float]:
    """The larger of the relative errors of out (forward), or dq, dk, dv (backward), by implementation."""
    errors = {}
    references: dict[TokensByRank, dict[str, Tensor]] = {}
    for name in measured[0].outputs:
        tokens = case.tokens_by_rank(name, len(measured))
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
