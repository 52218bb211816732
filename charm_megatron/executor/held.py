"""What a rank holds while a program runs: the tensors behind the buffers that `lowering.storage` has planned."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from charm_megatron.cost.buffers import buffer_bytes
from charm_megatron.cost.wire import WireFormat
from charm_megatron.executor.buffers import (
    BufferPool,
    PackedBuffer,
    accumulator_spec,
    head_groups_apart,
    head_groups_together,
    wire_spec,
)
from charm_megatron.lowering.storage import Buffer, Range, Storage
from charm_megatron.schedule.payload import Payload


class HeldTensors:
    """The buffers of one rank during one run. Tensors of a shard are [s, b, h, ..], s its tokens."""

    def __init__(self, storage: Storage, wire: WireFormat, pool: BufferPool):
        self.storage, self.wire, self.pool = storage, wire, pool
        self._tensors: list[PackedBuffer | None] = [None] * len(storage.buffers)

    # ------------------------------------------------------------------ the rank's own shard

    def bind_local(self, payload: Payload, tensors: Mapping[str, Tensor]) -> None:
        """Puts this rank's shard of an operand in place.

        A payload of a single field is used where it is; anything else is packed: its values [s, b, h, ..] side by side
        in a row, its statistics [s, b, h] likewise.
        """
        number = self.storage.local[payload.name]
        groups = self.wire.problem.head_groups(payload.side)
        values = [head_groups_apart(tensors[name], groups) for name in payload.values]
        if not self.storage.buffers[number].is_pooled:
            memory = _bytes_of(values[0]) if values else torch.empty(0, dtype=torch.uint8)
            self._tensors[number] = self._packed(self.storage.buffers[number], memory)
            return
        packed = self.take(number)
        for x, column in zip(values, columns(packed.all_values, values), strict=True):
            column.copy_(x)
        for i, name in enumerate(payload.stats):
            packed.all_stats[..., i].copy_(head_groups_apart(tensors[name].unsqueeze(-1), groups)[..., 0])

    def alloc_result(self, payload: Payload) -> None:
        """Makes the accumulator in which this rank's own results add up; zeros where no block adds anything."""
        number = self.storage.local[payload.name]
        buffer = self.storage.buffers[number]
        memory = torch.empty(buffer_bytes(buffer, self.wire), dtype=torch.uint8, device=self.pool.device)
        self._tensors[number] = self._packed(buffer, memory)
        for untouched in self.storage.untouched:
            if untouched.buffer == number:
                self.values(untouched).zero_()
                self.stats(untouched).zero_()

    def result(self, payload: Payload) -> dict[str, Tensor]:
        """The rank's results after the run, by field: values [s, b, h, w] and statistics [s, b, h]."""
        packed = self.buffer(self.storage.local[payload.name])
        groups = self.wire.problem.head_groups(payload.side)
        values = head_groups_together(packed.all_values, groups)
        stats = head_groups_together(packed.all_stats, groups)
        widths = [self.wire.workload.width(name) for name in payload.widths]
        by_field = dict(zip(payload.values, torch.split(values, widths, dim=-1), strict=True))
        # In memory of their own: what is kept of them must not keep the accumulator.
        return by_field | {name: stats[..., i].clone() for i, name in enumerate(payload.stats)}

    # ------------------------------------------------------------------ buffers that come and go

    def take(self, number: int) -> PackedBuffer:
        """A buffer of the plan, from the pool."""
        buffer = self.storage.buffers[number]
        packed = self._packed(buffer, self.pool.take(buffer_bytes(buffer, self.wire)))
        self._tensors[number] = packed
        return packed

    def give(self, number: int) -> None:
        """Gives a buffer back to the pool."""
        self.pool.give(self.buffer(number).memory)
        self._tensors[number] = None

    def close(self) -> None:
        """Gives back the buffers of the operands at home."""
        for number in self.storage.local.values():
            if self.storage.buffers[number].is_pooled:
                self.give(number)
        self._tensors.clear()

    def buffer(self, number: int) -> PackedBuffer:
        """A buffer that is in use."""
        packed = self._tensors[number]
        assert packed is not None, f"buffer {number} is not in use"
        return packed

    def _packed(self, buffer: Buffer, memory: Tensor) -> PackedBuffer:
        spec = (accumulator_spec if buffer.is_accumulator else wire_spec)(self.wire, buffer.payload)
        chunks = self.wire.problem.sharding.chunks
        return PackedBuffer(spec, [chunks[piece.chunk].length for piece in buffer.pieces], memory)

    # ------------------------------------------------------------------ ranges

    def values(self, at: Range) -> Tensor:
        """Values of the pieces of a range, [tokens, b, h, w]."""
        return self.buffer(at.buffer).values(at.start, at.stop)

    def stats(self, at: Range) -> Tensor:
        """Statistics of the pieces of a range, [tokens, b, h, c]."""
        return self.buffer(at.buffer).stats(at.start, at.stop)

    def operand(self, ranges: Sequence[Range]) -> tuple[Tensor, Tensor]:
        """Values [s, b, h, w] and statistics [s, b, h, c] of an operand, in place where it is one range."""
        if len(ranges) == 1:
            return self.values(ranges[0]), self.stats(ranges[0])
        return torch.cat([self.values(at) for at in ranges]), torch.cat([self.stats(at) for at in ranges])

    def pack(self, number: int, sources: Sequence[Range]) -> PackedBuffer:
        """Copies of pieces in a buffer from the pool, as they travel."""
        packed = self.take(number)
        for at in sources:
            rows = slice(at.first_row, at.last_row)
            packed.all_values[rows].copy_(self.values(at))
            packed.all_stats[rows].copy_(self.stats(at))
        return packed


def columns(values: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The columns of `values` [.., w] that `parts` [.., w_i] fill from left to right."""
    return torch.split(values, [part.shape[-1] for part in parts], dim=-1)


def _bytes_of(x: Tensor) -> Tensor:
    """The same memory as bytes, where `x` is contiguous; else a copy."""
    return x.detach().contiguous().view(-1).view(torch.uint8)
