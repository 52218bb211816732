"""What a schedule costs a rank, in numbers: work, traffic, and waits that no overlap can hide.

Links come in two classes, inside a domain and across domains, because domains have one level today. Deeper levels
(NUMA inside a node) would add a class to `wire.Traffic`, and a column each here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from charm_megatron.cost.wire import Traffic, WireFormat, hop_bytes, traffic
from charm_megatron.schedule.payload import SIDES, Payload
from charm_megatron.schedule.piece import IntArray
from charm_megatron.schedule.problem import Problem
from charm_megatron.schedule.schedule import Schedule
from charm_megatron.workload import Band


@dataclass(frozen=True, eq=False)
class Report:
    """The numbers of all phases of one direction. Arrays are [cp_size]."""

    num_blocks: IntArray
    flops: npt.NDArray[np.float64]
    traffic: Traffic
    num_comm_steps: int
    num_compute_steps: int
    longest_chain: int
    exposed_steps: int
    exposed_bytes: IntArray

    @property
    def flops_share(self) -> npt.NDArray[np.float64]:
        """Each rank's part of all work."""
        return self.flops / max(float(self.flops.sum()), 1.0)

    @property
    def imbalance(self) -> float:
        """What the busiest rank computes, over the mean."""
        return float(self.flops.max() / max(float(self.flops.mean()), 1.0))


def report(schedules: Sequence[Schedule], wire: WireFormat) -> Report:
    """Adds up phases that run one after the other."""
    exposed = [exposed_hops(schedule) for schedule in schedules]
    sizes = [np.where(rows, hop_bytes(s, wire), 0) for s, rows in zip(schedules, exposed, strict=True)]
    sent = [
        np.bincount(s.hops.src, weights=x, minlength=s.cp_size) for s, x in zip(schedules, sizes, strict=True)
    ]
    return Report(
        num_blocks=sum_arrays(np.bincount(s.blocks.rank, minlength=s.cp_size) for s in schedules),
        flops=np.sum([block_flops(schedule, wire) for schedule in schedules], axis=0),
        traffic=traffic(*schedules, wire=wire),
        num_comm_steps=sum(schedule.num_comm_steps for schedule in schedules),
        num_compute_steps=sum(schedule.num_compute_steps for schedule in schedules),
        longest_chain=sum(longest_chain(schedule) for schedule in schedules),
        exposed_steps=sum(
            max(0, schedule.num_comm_steps - schedule.num_compute_steps) for schedule in schedules
        ),
        exposed_bytes=sum_arrays(x.astype(np.int64) for x in sent),
    )


def sum_arrays(arrays: Iterable[IntArray]) -> IntArray:
    """Element by element."""
    total: IntArray = np.sum(list(arrays), axis=0)
    return total


def exposed_hops(schedule: Schedule) -> npt.NDArray[np.bool_]:
    """Which hops are in flight in steps after the last compute step: nothing is left to compute beside them."""
    rows: npt.NDArray[np.bool_] = schedule.hops.comm_step >= schedule.num_compute_steps
    return rows


def block_flops(schedule: Schedule, wire: WireFormat) -> npt.NDArray[np.float64]:
    """What each rank computes, [cp_size]; only unmasked elements count."""
    problem, blocks = schedule.problem, schedule.blocks
    pairs = num_pairs(problem, blocks.q, blocks.kv)
    pass_ = schedule.pass_
    per_pair = wire.workload.block_flops(1, wire.heads(pass_.q_down), pass_.products)
    totals = np.bincount(blocks.rank, weights=pairs.astype(np.float64), minlength=problem.cp_size)
    return np.asarray(totals * per_pair, dtype=np.float64)


def num_pairs(problem: Problem, q: IntArray, kv: IntArray) -> IntArray:
    """Unmasked elements of each block (q[i], kv[i]). Most blocks are full; of the others, equal ones count once."""
    lo, hi, rows, columns = (
        *(bound[q, kv] for bound in problem.bands),
        problem.lengths[q],
        problem.lengths[kv],
    )
    pairs = rows * columns
    cut = np.nonzero((lo > 1 - columns) | (hi < rows - 1))[0]
    if len(cut):
        kinds = np.stack([column[cut] for column in (lo, hi, rows, columns)])
        distinct, of_block = np.unique(kinds, axis=1, return_inverse=True)
        counts = [Band(low, high).num_pairs(a, b) for low, high, a, b in distinct.T.tolist()]
        pairs[cut] = np.asarray(counts, dtype=np.int64)[of_block.reshape(-1)]
    return pairs


# ---------------------------------------------------------------------- chains of transfers


def longest_chain(schedule: Schedule) -> int:
    """Transfers in the longest chain of which each needs the one before.

    An operand's hop needs the hop that brought the piece to where it leaves from. A result's hop needs whatever
    brought the operands of the blocks in it, and every partial result that was added to it there. Links
    and the order in which a rank posts are left out: this is the chain that no bandwidth shortens.
    """
    hops, payloads = schedule.hops, schedule.pass_.payloads
    arrived = {payload.name: _zeros(schedule, payload) for payload in payloads}
    is_result = np.asarray([int(payload.is_result) for payload in payloads], dtype=np.int64)[hops.payload]
    _lengthen(schedule, arrived, np.nonzero(is_result == 0)[0])
    pass_, rank = schedule.pass_, schedule.blocks.rank
    read = {side: schedule.operand_pieces(side) * schedule.cp_size + rank for side in SIDES}
    of_block = np.maximum.reduce([arrived[pass_.down(side).name][read[side]] for side in SIDES])
    for result in pass_.results:
        np.maximum.at(arrived[result.name], read[result.side], of_block)
    _lengthen(schedule, arrived, np.nonzero(is_result == 1)[0])
    return max(int(state.max(initial=0)) for state in arrived.values()) if len(hops.comm_step) else 0


def _zeros(schedule: Schedule, payload: Payload) -> IntArray:
    """A number for each (piece, rank) of a payload."""
    read = schedule.operand_pieces(payload.side)
    num_pieces = 1 + max(int(pieces.max(initial=0)) for pieces in (read, schedule.hops.piece))
    return np.zeros(num_pieces * schedule.cp_size, dtype=np.int64)


def _lengthen(schedule: Schedule, arrived: dict[str, IntArray], rows: IntArray) -> None:
    """Takes the hops of `rows` step by step: each arrives with one more than what it left with."""
    hops, size = schedule.hops, schedule.cp_size
    rows = rows[np.argsort(hops.comm_step[rows], kind="stable")]
    starts = np.nonzero(np.diff(hops.comm_step[rows], prepend=-1))[0]
    for now in np.split(rows, starts[1:]) if len(rows) else []:
        lengths = [
            (payload.name, of, arrived[payload.name][hops.piece[of] * size + hops.src[of]] + 1)
            for number, payload in enumerate(schedule.pass_.payloads)
            if len(of := now[hops.payload[now] == number])
        ]
        for name, of, length in lengths:
            np.maximum.at(arrived[name], hops.piece[of] * size + hops.dst[of], length)
