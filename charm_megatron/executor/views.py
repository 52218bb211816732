"""Which tensors the buffers of a program are: worked out once per plan, made while it runs.

Legend: s tokens, b batch, h heads of a piece, w values and c statistics of a row (see `WireFormat`). A buffer is the
values [s, b, h, w] of all its pieces, one after the other, then all their statistics [s, b, h, c]. Tokens are
outermost, so consecutive pieces are one tensor, and the fields of a row lie side by side: kernels read them in place.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from charm_megatron.cost.buffers import Arena, buffer_bytes
from charm_megatron.cost.wire import WireFormat
from charm_megatron.executor.memory import Stretch
from charm_megatron.lowering.storage import Buffer, Range, Storage
from charm_megatron.schedule.payload import Payload


class InMemory(NamedTuple):
    """Part of the run's memory; `offset` and `stride` in elements."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class InTensor(NamedTuple):
    """Rows and heads of one of the rank's own tensors, [s, b, h, w] or [s, b, h]."""

    field: str
    rows: tuple[int, int]
    heads: tuple[int, int]


View = InMemory | InTensor


class LazyViews(dict[int, Tensor]):
    """The tensors of a program in one stretch of memory, by number, each made when it is first asked for."""

    def __init__(self, views: Sequence[View], stretch: Stretch):
        super().__init__()
        self._views, self._stretch = views, stretch
        self._tensors: Mapping[str, Tensor] = {}

    def __missing__(self, number: int) -> Tensor:
        view = self._views[number]
        if isinstance(view, InMemory):
            base = self._stretch.typed(view.dtype)
            self[number] = torch.as_strided(base, view.size, view.stride, view.offset)
        else:
            self[number] = _part(self._tensors[view.field], view)
        return self[number]

    def bind(self, tensors: Mapping[str, Tensor], of_tensors: Sequence[int]) -> None:
        """From now on the rank's own tensors are these: the views `of_tensors` are made anew."""
        self._tensors = tensors
        for number in of_tensors:
            self.pop(number, None)


def _part(x: Tensor, view: InTensor) -> Tensor:
    (first, last), (head, end) = view.rows, view.heads
    if last - first != x.shape[0]:
        x = x.narrow(0, first, last - first)
    if end - head != x.shape[2]:
        x = x.narrow(2, head, end - head)
    return x


class ViewTable:
    """Numbers the views of one program, which are of the run's memory and of the rank's own tensors.

    `sent` are the own tensors that are sent as they are: their parts must be contiguous.
    """

    def __init__(self, storage: Storage, wire: WireFormat, arena: Arena):
        self.storage, self.wire, self.arena = storage, wire, arena
        self.sent: set[str] = set()
        self._numbers: dict[View, int] = {}
        chunks = wire.problem.sharding.chunks
        self._rows = [
            (0, *accumulate(chunks[piece.chunk].length for piece in b.pieces)) for b in storage.buffers
        ]

    @property
    def of_tensors(self) -> tuple[int, ...]:
        """The numbers of views that belong to one run: of tensors that the caller has brought."""
        return tuple(number for view, number in self._numbers.items() if isinstance(view, InTensor))

    @property
    def all(self) -> tuple[View, ...]:
        return tuple(self._numbers)

    # ------------------------------------------------------------------ what to look at

    def field(self, at: Range, field: str, rows: slice = slice(None)) -> int:
        """One field of the pieces of a range, of which only `rows`."""
        buffer = self.storage.buffers[at.buffer]
        span = self._span(at, rows)
        if buffer.is_home:
            return self._number(self._in_tensor(buffer, at, field, span))
        payload = buffer.payload
        if field in payload.stats:
            return self._number(self._stats(at.buffer, span, payload.stats.index(field)))
        columns = (0, *accumulate(self.wire.workload.width(name) for name in payload.widths))
        place = payload.values.index(field)
        return self._number(self._values(at.buffer, span, columns[place], columns[place + 1]))

    def values(self, at: Range) -> int:
        """All values of the pieces of a range that is no tensor of the rank's own, side by side."""
        buffer = self.storage.buffers[at.buffer]
        return self._number(self._values(at.buffer, self._span(at), 0, self.wire.width(buffer.payload)))

    def stats(self, at: Range) -> int | None:
        """All their statistics, [s, b, h, c]; None where there are none."""
        if not self.storage.buffers[at.buffer].payload.num_stats:
            return None
        return self._number(self._stats(at.buffer, self._span(at), None))

    def travelling(self, at: Range) -> int:
        """Pieces of a range as they are sent or received: bytes, or a tensor of the rank's own."""
        buffer = self.storage.buffers[at.buffer]
        if buffer.is_home:
            (field,) = buffer.payload.values
            self.sent.add(field)
            return self._number(self._in_tensor(buffer, at, field, self._span(at)))
        is_whole = (at.start, at.stop) == (0, len(buffer.pieces))
        assert is_whole or not buffer.payload.num_stats, (
            "values and statistics of some do not lie side by side"
        )
        if is_whole:
            first, last = 0, buffer_bytes(buffer, self.wire)
        else:
            first, last = (row * self._value_bytes(at.buffer) for row in self._span(at))
        return self._number(InMemory(torch.uint8, (last - first,), (1,), self._offset(at.buffer) + first))

    def whole(self, buffer: int) -> Range:
        """All pieces of a buffer."""
        num_pieces = len(self.storage.buffers[buffer].pieces)
        return Range(buffer, 0, num_pieces, 0, self._rows[buffer][-1])

    def piece_at_row(self, buffer: int, row: int) -> int:
        """The number, within its buffer, of the piece that begins at a row."""
        return self._rows[buffer].index(row)

    def _span(self, at: Range, rows: slice = slice(None)) -> tuple[int, int]:
        """First and last row, of the buffer."""
        first, last = self._rows[at.buffer][at.start], self._rows[at.buffer][at.stop]
        begin, end, _ = rows.indices(last - first)
        return first + begin, first + end

    # ------------------------------------------------------------------ where that is

    def _number(self, view: View) -> int:
        return self._numbers.setdefault(view, len(self._numbers))

    def _in_tensor(self, buffer: Buffer, at: Range, field: str, span: tuple[int, int]) -> InTensor:
        """Own pieces are counted by head group, then by chunk; a tensor has all head groups side by side."""
        head = buffer.pieces[at.start].head
        assert head == buffer.pieces[at.stop - 1].head, "own pieces of several head groups are no one tensor"
        shard = self._rows[at.buffer][-1] // self.wire.problem.head_groups(buffer.payload.side)
        heads = self.wire.heads(buffer.payload)
        rows = span[0] - head * shard, span[1] - head * shard
        return InTensor(field, rows, (head * heads, (head + 1) * heads))

    def _offset(self, number: int) -> int:
        offset = self.arena.offsets[number]
        assert offset is not None, "only what is no tensor of the rank's own lies in the run's memory"
        return offset

    def _values(self, number: int, span: tuple[int, int], first: int, last: int) -> InMemory:
        payload = self.storage.buffers[number].payload
        dtype, width = self._value_dtype(number), self.wire.width(payload)
        size, stride = self._shape(payload, span, last - first, width)
        return InMemory(
            dtype, size, stride, self._offset(number) // dtype.itemsize + span[0] * stride[0] + first
        )

    def _stats(self, number: int, span: tuple[int, int], column: int | None) -> InMemory:
        payload = self.storage.buffers[number].payload
        dtype = self._stat_dtype
        size, stride = self._shape(payload, span, payload.num_stats, payload.num_stats)
        start = self._offset(number) + self._rows[number][-1] * self._value_bytes(number)
        offset = start // dtype.itemsize + span[0] * stride[0]
        if column is None:
            return InMemory(dtype, size, stride, offset)
        return InMemory(dtype, size[:3], stride[:3], offset + column)

    def _shape(
        self, payload: Payload, span: tuple[int, int], shown: int, width: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        batch, heads = self.wire.workload.batch, self.wire.heads(payload)
        return (span[1] - span[0], batch, heads, shown), (batch * heads * width, heads * width, width, 1)

    def _value_bytes(self, number: int) -> int:
        """Of the values of one row of tokens in a buffer."""
        payload = self.storage.buffers[number].payload
        values = self.wire.workload.batch * self.wire.heads(payload) * self.wire.width(payload)
        return values * self._value_dtype(number).itemsize

    def _value_dtype(self, number: int) -> torch.dtype:
        buffer = self.storage.buffers[number]
        if buffer.is_accumulator:
            return self._stat_dtype
        return _dtype(self.wire.value_dtype(buffer.payload, crosses=buffer.crosses))

    @property
    def _stat_dtype(self) -> torch.dtype:
        return _dtype(self.wire.workload.accumulate_dtype)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
