"""The memory that a rank takes for one run of a program: a place in it for each buffer that comes and goes."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from charm_megatron.cost.wire import WireFormat
from charm_megatron.lowering.place import plan_storage
from charm_megatron.lowering.storage import Buffer, Storage
from charm_megatron.schedule.schedule import Schedule

MOST_COMPARED = 512
"""Buffers of one program for which several orders are tried: each takes time that grows with the square."""
ALIGNMENT_BYTES = 128
"""Of each buffer's place: what devices load, and network cards copy, at a time."""


@dataclass(frozen=True)
class Lifetime:
    """A buffer is in use from action `first` up to, not including, action `last`."""

    num_bytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Buffers:
    """Buffers of one rank beside its tensors and its own results.

    `pool_bytes` is the memory that a run takes for all of them, one after the other in the same places.
    `peak_buffers` and `peak_bytes` are the most in use at one time; they are less where places do not fit.
    """

    pool_bytes: int = 0
    peak_buffers: int = 0
    peak_bytes: int = 0

    def __or__(self, other: "Buffers") -> "Buffers":
        """What serves both, one after the other."""
        return Buffers(
            max(self.pool_bytes, other.pool_bytes),
            max(self.peak_buffers, other.peak_buffers),
            max(self.peak_bytes, other.peak_bytes),
        )


def peak_buffers(schedule: Schedule, wire: WireFormat, rank: int) -> Buffers:
    """What one rank needs while it runs its program, which must be one that the checker accepts."""
    wide = wire.wide(schedule.pass_)
    storage = plan_storage(schedule.program(rank), schedule.pass_, schedule.problem, rank, wide)
    spans = [span for span in lifetimes(storage, wire) if span is not None]
    change: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for span in spans:
        for at, sign in ((span.first, 1), (span.last, -1)):
            change[at][0] += sign
            change[at][1] += sign * span.num_bytes
    in_use = np.cumsum([change[at] for at in sorted(change)] or [[0, 0]], axis=0).max(axis=0)
    return Buffers(arena(storage, wire).num_bytes, int(in_use[0]), int(in_use[1]))


@dataclass(frozen=True)
class Arena:
    """The memory of a run: where each buffer of its storage begins, in bytes; None for tensors of the rank's own."""

    offsets: tuple[int | None, ...]
    num_bytes: int


def arena(storage: Storage, wire: WireFormat) -> Arena:
    """Places the buffers of a storage: two that are in use at one time never overlap."""
    spans = lifetimes(storage, wire)
    taken = [span for span in spans if span is not None]
    found = place(taken)
    placed = iter(found)
    offsets = tuple(None if span is None else next(placed) for span in spans)
    return Arena(offsets, _aligned(_end(taken, found)))


def place(spans: Sequence[Lifetime]) -> list[int]:
    """The offset of each buffer: the orders in which to place them are tried, and the one that needs least is taken."""
    numbers = range(len(spans))
    in_time = sorted(numbers, key=lambda i: (spans[i].first, -spans[i].num_bytes))
    orders = [in_time]
    if len(spans) <= MOST_COMPARED:
        orders.append(sorted(numbers, key=lambda i: (-spans[i].num_bytes, spans[i].first)))
        orders.append(sorted(numbers, key=lambda i: (spans[i].first - spans[i].last, -spans[i].num_bytes)))
    placed = (_placed(spans, order, is_in_time=order is in_time) for order in orders)
    return min(placed, key=lambda offsets: _end(spans, offsets))


def _placed(spans: Sequence[Lifetime], order: Sequence[int], *, is_in_time: bool) -> list[int]:
    """Each in the tightest gap between those placed before that are in use at the same time."""
    offsets = [0] * len(spans)
    before: list[tuple[int, int, int, int]] = []  # (offset, end, first, last)
    for i in order:
        first, last = spans[i].first, max(spans[i].last, spans[i].first + 1)
        busy = sorted(one for one in before if one[3] > first and one[2] < last)
        size = _aligned(spans[i].num_bytes)
        offsets[i] = _gap(busy, size)
        # In order of time nothing meets those again that have ended.
        before = [*(busy if is_in_time else before), (offsets[i], offsets[i] + size, first, last)]
    return offsets


def _gap(busy: Sequence[tuple[int, int, int, int]], size: int) -> int:
    """Where `size` bytes fit: the tightest place between, else behind the last."""
    best: tuple[int, int] | None = None
    end = 0
    for begin, stop, _, _ in busy:
        if begin - end >= size and (best is None or begin - end < best[0]):
            best = begin - end, end
        end = max(end, stop)
    return end if best is None else best[1]


def _end(spans: Sequence[Lifetime], offsets: Sequence[int]) -> int:
    return max((at + span.num_bytes for at, span in zip(offsets, spans, strict=True)), default=0)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def lifetimes(storage: Storage, wire: WireFormat) -> list[Lifetime | None]:
    """When each buffer of a storage is in use; None for tensors of the rank's own, which are no part of a run's memory.

    They are: this rank's operands where they are sent and their fields must be packed side by side; a buffer for each
    message that arrives; one for each message that leaves, unless its pieces lie in one buffer as they travel; what
    stands in for tensors that visiting queries leave at home; and accumulators for results that are not at home here.
    """
    return [
        None if buffer.is_home else Lifetime(buffer_bytes(buffer, wire), buffer.first, buffer.last)
        for buffer in storage.buffers
    ]


def buffer_bytes(buffer: Buffer, wire: WireFormat) -> int:
    """The size of one buffer."""
    chunks = wire.problem.sharding.chunks
    tokens = sum(chunks[piece.chunk].length for piece in buffer.pieces)
    if buffer.is_accumulator:
        return tokens * wire.accumulator_token_bytes(buffer.payload)
    return tokens * wire.token_bytes(buffer.payload, crosses=buffer.crosses)
