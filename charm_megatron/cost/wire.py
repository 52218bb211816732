"""How many bytes a piece is, and so a schedule: the one place where the plan's bytes are computed."""

from dataclasses import dataclass

import numpy as np

from charm_megatron.errors import WorkloadError
from charm_megatron.schedule.passes import Pass
from charm_megatron.schedule.payload import Payload
from charm_megatron.schedule.piece import IntArray
from charm_megatron.schedule.problem import Problem
from charm_megatron.schedule.schedule import Schedule
from charm_megatron.workload import ITEMSIZE_BYTES, Workload

BY_LINK = "by_link"


@dataclass(frozen=True)
class WireFormat:
    """Sizes of pieces as they travel.

    A piece of s tokens is s * batch * heads rows. Each row has the values of its payload in the dtype of the payload's
    role, and its statistics (lse, delta) in the accumulate dtype.
    """

    workload: Workload
    problem: Problem
    out_return_dtype: str
    grad_return_dtype: str
    grad_return_dtype_across: str

    def __post_init__(self) -> None:
        workload, problem = self.workload, self.problem
        if workload.seq_len != problem.sharding.seq_len or workload.mask != problem.mask:
            raise WorkloadError(
                f"the schedule is for {problem.sharding.seq_len} tokens with mask {problem.mask}, "
                f"the workload has {workload.seq_len} with mask {workload.mask}"
            )
        for heads, groups, what in (
            (workload.num_heads, problem.q_head_groups, "query"),
            (workload.num_kv_heads, problem.kv_head_groups, "KV"),
        ):
            if heads % groups:
                raise WorkloadError(f"{heads} {what} heads do not split into {groups} equal groups")
        widths = (workload.head_dim, workload.head_dim_v)
        if any(width * workload.itemsize_bytes % 4 for width in widths):
            raise WorkloadError(
                f"head widths {widths[0]} and {widths[1]} must be even in {workload.dtype}, so that float32 "
                f"rows behind them are aligned"
            )

    def heads(self, payload: Payload) -> int:
        """Heads of one piece."""
        if payload.side == "q":
            return self.workload.num_heads // self.problem.q_head_groups
        return self.workload.num_kv_heads // self.problem.kv_head_groups

    def width(self, payload: Payload) -> int:
        """Values of one row."""
        return sum(self.workload.width(name) for name in payload.widths)

    def value_dtype(self, payload: Payload, *, crosses: bool) -> str:
        """Dtype of the values on the wire, inside a domain or across domains."""
        roles = {
            "model": self.workload.dtype,
            "out_return": self.out_return_dtype,
            "grad_return": self.grad_return_dtype_across if crosses else self.grad_return_dtype,
        }
        return roles[payload.dtype_role]

    def wide(self, pass_: Pass) -> frozenset[tuple[str, bool]]:
        """The results of a pass, (payload, whether across domains), that travel in the accumulate dtype."""
        dtype = self.workload.accumulate_dtype
        return frozenset(
            (payload.name, crosses)
            for payload in pass_.results
            for crosses in (False, True)
            if self.value_dtype(payload, crosses=crosses) == dtype
        )

    def token_bytes(self, payload: Payload, *, crosses: bool) -> int:
        """Bytes of one token of a piece on the wire."""
        return self._token_bytes(payload, self.value_dtype(payload, crosses=crosses))

    def accumulator_token_bytes(self, payload: Payload) -> int:
        """Bytes of one token of a result while it is added up."""
        return self._token_bytes(payload, self.workload.accumulate_dtype)

    def _token_bytes(self, payload: Payload, value_dtype: str) -> int:
        values = self.width(payload) * ITEMSIZE_BYTES[value_dtype]
        stats = payload.num_stats * ITEMSIZE_BYTES[self.workload.accumulate_dtype]
        return self.workload.batch * self.heads(payload) * (values + stats)

    def piece_bytes(self, payload: Payload, chunk: int, *, crosses: bool) -> int:
        """Bytes of one piece on the wire."""
        return self.problem.sharding.chunks[chunk].length * self.token_bytes(payload, crosses=crosses)


def make_wire_format(
    workload: Workload,
    problem: Problem,
    *,
    out_return_dtype: str = "model",
    grad_return_dtype: str = BY_LINK,
) -> WireFormat:
    """`out_return_dtype` is "model" or "float32", `grad_return_dtype` may also be "by_link".

    That is float32 inside a domain and the model's dtype across. A float64 model always returns float64.
    """
    accumulate = workload.accumulate_dtype
    out_dtype = workload.dtype if out_return_dtype == "model" else accumulate
    inside = workload.dtype if grad_return_dtype == "model" else accumulate
    across = accumulate if grad_return_dtype == "float32" else workload.dtype
    return WireFormat(workload, problem, out_dtype, inside, across)


@dataclass(frozen=True, eq=False)
class Traffic:
    """What each rank sends, by link class, [cp_size]."""

    inside_bytes: IntArray
    across_bytes: IntArray
    inside_messages: IntArray
    across_messages: IntArray

    @property
    def total_bytes(self) -> IntArray:
        return self.inside_bytes + self.across_bytes

    @property
    def total_messages(self) -> IntArray:
        return self.inside_messages + self.across_messages


def hop_bytes(schedule: Schedule, wire: WireFormat) -> IntArray:
    """Bytes of each hop."""
    hops, problem, payloads = schedule.hops, schedule.problem, schedule.pass_.payloads
    sizes = np.zeros(len(hops.piece), dtype=np.int64)
    domain = np.asarray(problem.domains.domain_of)
    for number, payload in enumerate(payloads):
        for crosses in (False, True):
            rows = (hops.payload == number) & ((domain[hops.src] != domain[hops.dst]) == crosses)
            chunks = problem.numbering(payload.side).chunk(hops.piece[rows])
            sizes[rows] = problem.lengths[chunks] * wire.token_bytes(payload, crosses=crosses)
    return sizes


def traffic(*schedules: Schedule, wire: WireFormat) -> Traffic:
    """Counts every hop of one or several phases once, at its sender."""
    n = wire.problem.cp_size
    totals = [np.zeros(n, dtype=np.int64) for _ in range(4)]
    domain = np.asarray(wire.problem.domains.domain_of)
    for schedule in schedules:
        hops = schedule.hops
        sizes = hop_bytes(schedule, wire)
        columns = (hops.comm_step, hops.payload, hops.src, hops.dst)
        messages = (
            np.unique(np.stack(columns), axis=1) if len(hops.comm_step) else np.zeros((4, 0), dtype=np.int64)
        )
        for i, crosses in enumerate((False, True)):
            rows = (domain[hops.src] != domain[hops.dst]) == crosses
            totals[i] += np.bincount(hops.src[rows], weights=sizes[rows], minlength=n).astype(np.int64)
            of_class = (domain[messages[2]] != domain[messages[3]]) == crosses
            totals[2 + i] += np.bincount(messages[2][of_class], minlength=n)
    return Traffic(*totals)
