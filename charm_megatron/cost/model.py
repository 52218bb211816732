"""What one action takes: a device's rate for blocks, latency and bandwidth for the links of each class."""

import math
from dataclasses import dataclass

from charm_megatron.cost.wire import WireFormat
from charm_megatron.errors import WorkloadError
from charm_megatron.schedule.actions import Attend, Message
from charm_megatron.schedule.passes import Pass
from charm_megatron.schedule.payload import PAYLOADS


@dataclass(frozen=True)
class Link:
    """One direction of a link: a transfer takes `latency_s` + bytes / `bytes_per_s`."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.bytes_per_s < math.inf and 0 <= self.latency_s < math.inf):
            raise WorkloadError(
                f"a link needs a positive rate and no negative latency, both finite, but is {self}"
            )


@dataclass(frozen=True)
class CostModel:
    """Rates of one device and its links.

    `is_shared`: transfers of a rank that use its link of one class in one direction go one after the other,
    each at the full rate; otherwise every transfer has a link of its own.
    """

    flops_per_s: float
    inside: Link
    across: Link
    is_shared: bool = True

    def attend_s(self, action: Attend, wire: WireFormat, pass_: Pass) -> float:
        """Time of a rectangle of blocks; only unmasked elements count."""
        problem = wire.problem
        pairs = sum(
            problem.band(q.chunk, kv.chunk).num_pairs(*problem.block_shape(q.chunk, kv.chunk))
            for q in action.q
            for kv in action.kv
            if not (action.causal and kv.chunk > q.chunk)
        )
        num_heads = wire.heads(pass_.q_down)
        return wire.workload.block_flops(pairs, num_heads, pass_.products) / self.flops_per_s

    def message_s(self, message: Message, wire: WireFormat, *, crosses: bool) -> float:
        """Time of a message alone on its link."""
        num_bytes = sum(
            wire.piece_bytes(PAYLOADS[piece.payload], piece.chunk, crosses=crosses)
            for piece in message.pieces
        )
        link = self.across if crosses else self.inside
        return link.latency_s + num_bytes / link.bytes_per_s
