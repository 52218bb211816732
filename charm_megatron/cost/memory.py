"""The most memory that attention needs on a rank at one time: forward and backward of one layer.

Counted are the rank's own tensors, the accumulators of its own results, and the buffers that its program takes
(`report.peak_buffers`). Not counted: what a kernel takes for itself, what other layers and the rest of the model
hold, tensors that live only before or after the program (delta is made from two wide copies), memory that
an allocator keeps, and buffers of the transport. So the difference of two schedules is predicted, not what a whole
program holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from charm_megatron.cost.buffers import Buffers, peak_buffers
from charm_megatron.cost.wire import WireFormat
from charm_megatron.schedule.passes import Pass
from charm_megatron.schedule.payload import PAYLOADS, Payload
from charm_megatron.schedule.schedule import Schedule
from charm_megatron.workload import ITEMSIZE_BYTES, Workload


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes of the rank and the pass, forward or backward, that need most.

    `pool_bytes` is the memory that a run takes for its buffers; it is more than `buffer_bytes`, which are in use at one
    time, where their places do not fit.
    """

    own_bytes: int
    buffer_bytes: int
    pool_bytes: int

    @property
    def peak_bytes(self) -> int:
        """What one layer's attention holds at its worst moment."""
        return self.own_bytes + self.buffer_bytes


def attention_memory(phases: Sequence[Schedule], wire: WireFormat, ranks: Sequence[int]) -> AttentionMemory:
    """The memory of the worst of `ranks`, over all phases of both directions."""
    own = [own_bytes(wire.workload, wire.problem.cp_size, phase.pass_) for phase in phases]
    worst, pools = (0, 0, 0), []
    for rank in ranks:
        both = Buffers()
        for phase, mine in zip(phases, own, strict=True):
            buffers = peak_buffers(phase, wire, rank)
            both |= buffers
            worst = max(worst, (mine + buffers.peak_bytes, mine, buffers.peak_bytes))
        pools.append(both.pool_bytes)
    return AttentionMemory(worst[1], worst[2], max(pools))


def own_bytes(workload: Workload, cp_size: int, pass_: Pass) -> int:
    """A rank's tensors during one pass; what the pass adds up, both in the accumulate dtype and in the model's."""
    rows = workload.batch * workload.seq_len // cp_size
    heads = {"q": workload.num_heads, "kv": workload.num_kv_heads}
    accumulate = ITEMSIZE_BYTES[workload.accumulate_dtype]
    added_up = {name for payload in pass_.results for name in payload.values}
    num_bytes = 0
    for name in pass_.held:
        payload = _payload_with(name)
        if name in payload.stats:
            num_bytes += rows * heads[payload.side] * accumulate
            continue
        width = workload.width(payload.widths[payload.values.index(name)])
        itemsize = workload.itemsize_bytes
        if name in added_up:
            itemsize = accumulate + (itemsize if workload.dtype != workload.accumulate_dtype else 0)
        num_bytes += rows * heads[payload.side] * width * itemsize
    return num_bytes


def _payload_with(name: str) -> Payload:
    """A payload that has the tensor among its values or statistics."""
    return next(payload for payload in PAYLOADS.values() if name in (*payload.values, *payload.stats))
