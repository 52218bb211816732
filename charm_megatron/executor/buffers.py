"""Pieces in memory: byte buffers that hold some pieces of one payload, ready to be sent.

Legend: s tokens, b batch, h heads of a piece, w values and c statistics of a row (see `WireFormat`). A buffer is the
values [s, b, h, w] of all its pieces, one after the other, then all their statistics [s, b, h, c]. Tokens are
outermost, so consecutive pieces are one tensor, and k and v of a row lie side by side: kernels read them in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from charm_megatron.cost.wire import WireFormat
from charm_megatron.schedule.payload import Payload


@dataclass(frozen=True)
class RowSpec:
    """Shape and dtypes of the rows of a payload; a token has batch * heads of them."""

    batch: int
    heads: int
    width: int
    num_stats: int
    value_dtype: torch.dtype
    stat_dtype: torch.dtype

    @property
    def value_bytes(self) -> int:
        """Bytes of the values of one token."""
        return self.batch * self.heads * self.width * self.value_dtype.itemsize

    @property
    def stat_bytes(self) -> int:
        """Bytes of the statistics of one token."""
        return self.batch * self.heads * self.num_stats * self.stat_dtype.itemsize

    @property
    def token_bytes(self) -> int:
        return self.value_bytes + self.stat_bytes


def wire_spec(wire: WireFormat, payload: Payload) -> RowSpec:
    """A piece as it travels."""
    return _spec(wire, payload, wire.value_dtype(payload))


def accumulator_spec(wire: WireFormat, payload: Payload) -> RowSpec:
    """A result while it is being added up."""
    return _spec(wire, payload, wire.workload.accumulate_dtype)


def _spec(wire: WireFormat, payload: Payload, value_dtype: str) -> RowSpec:
    return RowSpec(
        batch=wire.workload.batch,
        heads=wire.heads(payload),
        width=wire.width(payload),
        num_stats=payload.num_stats,
        value_dtype=getattr(torch, value_dtype),
        stat_dtype=getattr(torch, wire.workload.accumulate_dtype),
    )


class BufferPool:
    """Byte buffers that are used again.

    It holds at most `SLACK` times the most that was ever in use at one time, however many different sizes were seen:
    buffers that lie idle beyond that are dropped, those that have lain longest first.
    """

    SLACK = 4

    def __init__(self, device: torch.device):
        self.device = device
        self.num_bytes = 0
        """Bytes held, in use or idle."""
        self._num_bytes_in_use = 0
        self._most_in_use = 0
        self._idle: dict[int, list[Tensor]] = {}  # by size; the size given back last comes last

    def take(self, num_bytes: int) -> Tensor:
        """An uninitialised uint8 tensor [num_bytes]."""
        self._num_bytes_in_use += num_bytes
        self._most_in_use = max(self._most_in_use, self._num_bytes_in_use)
        idle = self._idle.get(num_bytes)
        if idle:
            return idle.pop()
        self.num_bytes += num_bytes
        self._drop_idle()
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back. On a GPU its next user comes later on the same stream."""
        size = buffer.numel()
        self._num_bytes_in_use -= size
        of_size = self._idle.pop(size, [])
        of_size.append(buffer)
        self._idle[size] = of_size
        self._drop_idle()

    def _drop_idle(self) -> None:
        limit = self.SLACK * self._most_in_use
        for size in list(self._idle):
            while self._idle[size] and self.num_bytes > limit:
                self._idle[size].pop()
                self.num_bytes -= size
            if not self._idle[size]:
                del self._idle[size]


class PackedBuffer:
    """Some pieces of one payload in one stretch of memory; `tokens[i]` is the length of piece i."""

    def __init__(self, spec: RowSpec, tokens: Sequence[int], memory: Tensor):
        self.spec, self.memory = spec, memory
        self.offsets = (0, *accumulate(tokens))
        num_tokens = self.offsets[-1]
        assert memory.numel() == num_tokens * spec.token_bytes, (memory.numel(), num_tokens, spec)
        end_of_values = num_tokens * spec.value_bytes
        rows = (num_tokens, spec.batch, spec.heads)
        self.all_values = memory[:end_of_values].view(spec.value_dtype).view(*rows, spec.width)
        self.all_stats = memory[end_of_values:].view(spec.stat_dtype).view(*rows, spec.num_stats)

    def values(self, start: int, stop: int) -> Tensor:
        """Values of pieces start..stop, [tokens, b, h, w]."""
        return self.all_values[self.offsets[start] : self.offsets[stop]]

    def stats(self, start: int, stop: int) -> Tensor:
        """Statistics of pieces start..stop, [tokens, b, h, c]."""
        return self.all_stats[self.offsets[start] : self.offsets[stop]]

    def wire_bytes(self, start: int, stop: int) -> Tensor:
        """Pieces start..stop as one byte tensor: all of them, or of a payload without statistics."""
        if (start, stop) == (0, len(self.offsets) - 1):
            return self.memory
        assert not self.spec.num_stats, "values and statistics of some pieces do not lie side by side"
        per_token = self.spec.value_bytes
        return self.memory[self.offsets[start] * per_token : self.offsets[stop] * per_token]


def head_groups_apart(shard: Tensor, groups: int) -> Tensor:
    """[s, b, groups * h, w] -> [groups * s, b, h, w], one group of heads after the other.

    A view for one group of heads.
    """
    if groups == 1:
        return shard
    tokens, batch, heads, width = shard.shape
    cut = shard.reshape(tokens, batch, groups, heads // groups, width)
    return cut.permute(2, 0, 1, 3, 4).reshape(groups * tokens, batch, heads // groups, width)


def head_groups_together(pieces: Tensor, groups: int) -> Tensor:
    """The inverse of `head_groups_apart`."""
    if groups == 1:
        return pieces
    rows, batch, heads, width = pieces.shape
    cut = pieces.view(groups, rows // groups, batch, heads, width)
    return cut.permute(1, 2, 0, 3, 4).reshape(rows // groups, batch, groups * heads, width)
