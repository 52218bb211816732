"""The buffers that a rank takes from the executor's pool while it runs a program."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from charm_megatron.cost.wire import WireFormat
from charm_megatron.lowering.storage import Buffer, Storage, plan_storage
from charm_megatron.schedule.schedule import Schedule


@dataclass(frozen=True)
class Lifetime:
    """A buffer is in use from action `first` up to, not including, action `last`."""

    num_bytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Buffers:
    """Buffers of one rank beside its tensors and its own results.

    `slot_bytes` are the sizes of all slots, of which each serves one buffer after the other: what the
    executor's pool grows to. `peak_buffers` and `peak_bytes` are the most in use at one time; they are less where
    slots of one size lie idle while another size is needed.
    """

    slot_bytes: tuple[int, ...] = ()
    peak_buffers: int = 0
    peak_bytes: int = 0

    @property
    def num_slots(self) -> int:
        return len(self.slot_bytes)

    @property
    def pool_bytes(self) -> int:
        return sum(self.slot_bytes)

    def __or__(self, other: "Buffers") -> "Buffers":
        """What serves both, one after the other."""
        slots = Counter(self.slot_bytes) | Counter(other.slot_bytes)
        return Buffers(
            tuple(sorted(slots.elements(), reverse=True)),
            max(self.peak_buffers, other.peak_buffers),
            max(self.peak_bytes, other.peak_bytes),
        )


def peak_buffers(schedule: Schedule, wire: WireFormat, rank: int) -> Buffers:
    """What one rank needs while it runs its program, which must be one that the checker accepts."""
    spans = lifetimes(plan_storage(schedule.program(rank), schedule.pass_, schedule.problem, rank), wire)
    slots = assign_slots(spans)
    sizes = dict(zip(slots, (span.num_bytes for span in spans), strict=True))
    change: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for span in spans:
        for at, sign in ((span.first, 1), (span.last, -1)):
            change[at][0] += sign
            change[at][1] += sign * span.num_bytes
    in_use = np.cumsum([change[at] for at in sorted(change)] or [[0, 0]], axis=0).max(axis=0)
    return Buffers(tuple(sorted(sizes.values(), reverse=True)), int(in_use[0]), int(in_use[1]))


def assign_slots(spans: Sequence[Lifetime]) -> list[int]:
    """The slot of each buffer, by a linear scan: the slot of its size that was given back last, or a new one."""
    idle: dict[int, list[int]] = defaultdict(list)
    ending: list[tuple[int, int]] = []  # (last, number of the buffer)
    slots: dict[int, int] = {}
    num_slots = 0
    for i in sorted(range(len(spans)), key=lambda i: spans[i].first):
        for last, ended in sorted(item for item in ending if item[0] <= spans[i].first):
            ending.remove((last, ended))
            idle[spans[ended].num_bytes].append(slots[ended])
        if idle[spans[i].num_bytes]:
            slots[i] = idle[spans[i].num_bytes].pop()
        else:
            slots[i], num_slots = num_slots, num_slots + 1
        ending.append((spans[i].last, i))
    return [slots[i] for i in range(len(spans))]


def lifetimes(storage: Storage, wire: WireFormat) -> list[Lifetime]:
    """The buffers that running a program takes from the executor's pool, in the order of taking.

    They are: this rank's operands where their fields must be packed side by side; a buffer for each message that
    arrives; one for each message that leaves, unless its pieces lie in one buffer as they travel; and
    accumulators for results that are not at home here. The rank's own results are no part of it.
    """
    return [
        Lifetime(buffer_bytes(buffer, wire), buffer.first, buffer.last)
        for buffer in storage.buffers
        if buffer.is_pooled
    ]


def buffer_bytes(buffer: Buffer, wire: WireFormat) -> int:
    """The size of one buffer."""
    chunks = wire.problem.sharding.chunks
    tokens = sum(chunks[piece.chunk].length for piece in buffer.pieces)
    token_bytes = wire.accumulator_token_bytes if buffer.is_accumulator else wire.token_bytes
    return tokens * token_bytes(buffer.payload)
