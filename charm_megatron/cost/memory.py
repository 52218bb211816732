"""The most memory that attention needs on a rank at one time: forward and backward of one layer.

Counted are the rank's own tensors, the accumulators of its own results, and the buffers that its program takes
(`buffers.peak_buffers`). Not counted: what a kernel takes for itself, what other layers and the rest of the model
hold, tensors that live only before or after the program (delta is made from two wide copies), memory that
an allocator keeps, and buffers of the transport. So the difference of two schedules is predicted, not what a whole
program holds.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from charm_megatron.cost.buffers import Buffers, peak_buffers
from charm_megatron.cost.wire import WireFormat
from charm_megatron.schedule.passes import FORWARD, Direction, Pass
from charm_megatron.schedule.payload import PAYLOADS, Payload
from charm_megatron.schedule.schedule import Schedule
from charm_megatron.workload import ITEMSIZE_BYTES, Workload

MOST_RANKS = 64
"""Of larger groups, this many ranks are worked out, evenly spread."""


@dataclass(frozen=True, order=True)
class PassMemory:
    """Bytes of the rank and the phase of one direction that need most, which order compares.

    `own_bytes` are the rank's own tensors and results, `buffer_bytes` everything else.
    """

    peak_bytes: int = 0
    own_bytes: int = 0
    buffer_bytes: int = 0


@dataclass(frozen=True)
class AttentionMemory:
    """Both passes, and what is kept from the forward pass to the backward pass.

    `pool_bytes` is the memory that a run takes for its buffers; it is more than those in use at one time, where their
    places do not fit.
    """

    passes: dict[Direction, PassMemory]
    saved_bytes: int
    pool_bytes: int

    @property
    def worst(self) -> PassMemory:
        """The pass that needs more."""
        return max(self.passes.values())


def spread_ranks(cp_size: int, most: int = MOST_RANKS) -> range:
    """The ranks that stand for all: each, or `most` at most of a larger group."""
    return range(0, cp_size, -(-cp_size // most))


def attention_memory(
    phases: Sequence[Schedule], wire: WireFormat, most_ranks: int = MOST_RANKS
) -> AttentionMemory:
    """The memory of the worst rank, of `most_ranks` at most, over all phases of both directions."""
    cp_size = wire.problem.cp_size
    own = [own_bytes(wire.workload, cp_size, phase.pass_) for phase in phases]
    passes: dict[Direction, PassMemory] = defaultdict(PassMemory)
    pools = []
    for rank in spread_ranks(cp_size, most_ranks):
        both = Buffers()
        for phase, mine in zip(phases, own, strict=True):
            buffers, direction = peak_buffers(phase, wire, rank), phase.pass_.direction
            both |= buffers
            here = PassMemory(mine + buffers.peak_bytes, mine, buffers.peak_bytes)
            passes[direction] = max(passes[direction], here)
        pools.append(both.pool_bytes)
    return AttentionMemory(dict(passes), saved_bytes(wire.workload, cp_size), max(pools))


def saved_bytes(workload: Workload, cp_size: int) -> int:
    """The tensors of a rank that are kept for the backward pass: q, k, v, out and lse."""
    accumulated = sum(workload.width(name) for payload in FORWARD.results for name in payload.widths)
    rows = workload.batch * workload.seq_len // cp_size * workload.num_heads
    return own_bytes(workload, cp_size, FORWARD) - (
        rows * accumulated * ITEMSIZE_BYTES[workload.accumulate_dtype]
        if workload.dtype != workload.accumulate_dtype
        else 0
    )


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
