"""The most memory that attention needs on a rank at one time: forward and backward of one layer.

Counted are the rank's own tensors, the accumulators of its own results, and the buffers that its program takes
(`report.peak_buffers`). Not counted: what a kernel takes for itself, what other layers and the rest of the model
hold, tensors that live only before or after the program (delta is made from two wide copies), memory that
an allocator keeps, and buffers of the transport. So the difference of two schedules is predicted, not what a whole
program holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from charm_megatron.cost.report import Buffers, peak_buffers
from charm_megatron.cost.wire import WireFormat
from charm_megatron.schedule.schedule import Schedule
from charm_megatron.workload import ITEMSIZE_BYTES, Workload

PAPER_BUFFERS = {"ring": 20, "charm": 24}
"""Buffers of b * s * h float32 numbers, s tokens of a rank, h the hidden width: CHARM+ paper, equations 11 and 12."""


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes of the rank and the pass, forward or backward, that need most.

    `pool_bytes` is what the executor's pool holds after both passes; it is more than `buffer_bytes`, which are
    in use at one time, where slots of one size lie idle while another size is needed.
    """

    own_bytes: int
    buffer_bytes: int
    pool_bytes: int

    @property
    def peak_bytes(self) -> int:
        """What one layer's attention holds at its worst moment."""
        return self.own_bytes + self.buffer_bytes


def attention_memory(
    forward: Sequence[Schedule], backward: Sequence[Schedule], wire: WireFormat, ranks: Sequence[int]
) -> AttentionMemory:
    """The memory of the worst of `ranks`, over the phases of both passes."""
    workload, cp_size = wire.workload, wire.problem.cp_size
    own = {
        "forward": own_bytes(workload, cp_size, "forward"),
        "backward": own_bytes(workload, cp_size, "backward"),
    }
    worst, pools = (0, 0, 0), []
    for rank in ranks:
        both = Buffers()
        for phase in (*forward, *backward):
            buffers = peak_buffers(phase.program(rank), phase.pass_, wire, rank)
            both |= buffers
            mine = own[phase.pass_.direction]
            worst = max(worst, (mine + buffers.peak_bytes, mine, buffers.peak_bytes))
        pools.append(both.pool_bytes)
    return AttentionMemory(worst[1], worst[2], max(pools))


def own_bytes(workload: Workload, cp_size: int, direction: str) -> int:
    """A rank's operands and results of one pass, results both in the accumulate dtype and in the model's.

    Forward: q, k, v, out, lse. Backward: q, k, v, out, dout, lse, delta, dq, dk, dv.
    """
    rows = workload.batch * workload.seq_len // cp_size
    q, out = rows * workload.num_heads * workload.head_dim, rows * workload.num_heads * workload.head_dim_v
    kv = rows * workload.num_kv_heads * (workload.head_dim + workload.head_dim_v)
    scalars = rows * workload.num_heads
    operands, results, num_stats = (
        (q + kv, out, 1) if direction == "forward" else (q + kv + 2 * out, q + kv, 2)
    )
    wide = ITEMSIZE_BYTES[workload.accumulate_dtype]
    copies = results if workload.dtype != workload.accumulate_dtype else 0
    return (operands + copies) * workload.itemsize_bytes + (results + num_stats * scalars) * wide


def paper_bytes(name: str, workload: Workload, cp_size: int) -> int:
    """Equation 11 (ring) or 12 (charm)."""
    hidden = workload.num_heads * workload.head_dim
    return PAPER_BUFFERS[name] * 4 * workload.batch * (workload.seq_len // cp_size) * hidden
