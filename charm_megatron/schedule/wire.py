"""How many bytes a piece is, and so a schedule: the one place where the plan's bytes are computed."""

from dataclasses import dataclass

import numpy as np

from charm_megatron.errors import WorkloadError
from charm_megatron.schedule.decisions import IntArray, Problem
from charm_megatron.schedule.passes import Cargo
from charm_megatron.schedule.schedule import Schedule
from charm_megatron.workload import ITEMSIZE_BYTES, Workload


@dataclass(frozen=True)
class WireFormat:
    """Sizes of pieces as they travel.

    A piece of s tokens is s * batch * heads rows. Each row has the wide numbers of its cargo in the dtype of
    the cargo's role, and its scalars (lse, delta) in the accumulate dtype.
    """

    workload: Workload
    problem: Problem
    out_return_dtype: str
    grad_return_dtype: str

    def __post_init__(self) -> None:
        workload, problem = self.workload, self.problem
        problem.sharding.chunk_len(workload.seq_len)
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

    @property
    def chunk_len(self) -> int:
        """Tokens of a piece."""
        return self.problem.sharding.chunk_len(self.workload.seq_len)

    def heads(self, cargo: Cargo) -> int:
        """Heads of one piece."""
        if cargo.side == "q":
            return self.workload.num_heads // self.problem.q_head_groups
        return self.workload.num_kv_heads // self.problem.kv_head_groups

    def width(self, cargo: Cargo) -> int:
        """Wide numbers of one row."""
        widths = {"head_dim": self.workload.head_dim, "head_dim_v": self.workload.head_dim_v}
        return sum(widths[name] for name in cargo.widths)

    def wide_dtype(self, cargo: Cargo) -> str:
        """Dtype of the wide numbers."""
        roles = {
            "model": self.workload.dtype,
            "out_return": self.out_return_dtype,
            "grad_return": self.grad_return_dtype,
        }
        return roles[cargo.dtype_role]

    def piece_bytes(self, cargo: Cargo) -> int:
        """Bytes of one piece on the wire."""
        rows = self.chunk_len * self.workload.batch * self.heads(cargo)
        wide = self.width(cargo) * ITEMSIZE_BYTES[self.wide_dtype(cargo)]
        return rows * (wide + cargo.num_scalars * ITEMSIZE_BYTES[self.workload.accumulate_dtype])


def make_wire_format(
    workload: Workload, problem: Problem, *, out_return: str = "model", grad_return: str = "float32"
) -> WireFormat:
    """`out_return` and `grad_return` are "model" or "float32"; a float64 model always returns float64."""
    wide = workload.accumulate_dtype
    out_dtype = workload.dtype if out_return == "model" else wide
    grad_dtype = workload.dtype if grad_return == "model" else wide
    return WireFormat(workload, problem, out_dtype, grad_dtype)


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes that each rank sends, by link class, [cp_size]."""

    inside_bytes: IntArray
    across_bytes: IntArray

    @property
    def total_bytes(self) -> IntArray:
        return self.inside_bytes + self.across_bytes


def traffic(schedule: Schedule, wire: WireFormat) -> Traffic:
    """Counts every hop of a schedule once, at its sender."""
    hops, n = schedule.hops, schedule.cp_size
    sizes = np.asarray([wire.piece_bytes(cargo) for cargo in schedule.pass_.cargos], dtype=np.int64)
    domain = np.asarray(schedule.problem.domains.domain_of)
    crosses = domain[hops.src] != domain[hops.dst]
    sent = sizes[hops.cargo]

    def per_rank(rows: np.ndarray) -> IntArray:
        return np.bincount(hops.src[rows], weights=sent[rows], minlength=n).astype(np.int64)

    return Traffic(per_rank(~crosses), per_rank(crosses))
