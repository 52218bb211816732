"""Pieces in memory: byte buffers that hold some pieces of one cargo, ready to be sent.

Legend: P pieces of a parcel, s tokens of a piece, b batch, h heads of a piece, w wide numbers and c scalars of
a row (see `WireFormat`). A buffer is all wide numbers [P, s, b, h, w], then all scalars [P, s, b, h, c]. Tokens
are outermost within a piece, so consecutive pieces are one tensor [P * s, b, h, w], and k and v of a row lie
side by side: kernels read them in place.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from charm_megatron.schedule.actions import Name
from charm_megatron.schedule.passes import Cargo
from charm_megatron.schedule.wire import WireFormat


@dataclass(frozen=True)
class PieceSpec:
    """Shape and dtypes of one piece of a cargo."""

    tokens: int
    batch: int
    heads: int
    width: int
    num_scalars: int
    wide_dtype: torch.dtype
    scalar_dtype: torch.dtype

    @property
    def wide_bytes(self) -> int:
        return self.tokens * self.batch * self.heads * self.width * self.wide_dtype.itemsize

    @property
    def scalar_bytes(self) -> int:
        return self.tokens * self.batch * self.heads * self.num_scalars * self.scalar_dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.wide_bytes + self.scalar_bytes


def wire_spec(wire: WireFormat, cargo: Cargo) -> PieceSpec:
    """A piece as it travels."""
    return _spec(wire, cargo, wire.wide_dtype(cargo))


def accumulator_spec(wire: WireFormat, cargo: Cargo) -> PieceSpec:
    """A result while it is being added up."""
    return _spec(wire, cargo, wire.workload.accumulate_dtype)


def _spec(wire: WireFormat, cargo: Cargo, wide_dtype: str) -> PieceSpec:
    return PieceSpec(
        tokens=wire.chunk_len,
        batch=wire.workload.batch,
        heads=wire.heads(cargo),
        width=wire.width(cargo),
        num_scalars=cargo.num_scalars,
        wide_dtype=getattr(torch, wide_dtype),
        scalar_dtype=getattr(torch, wire.workload.accumulate_dtype),
    )


class BufferPool:
    """Byte buffers that are used again; as large as the most that was ever in use at one time."""

    def __init__(self, device: torch.device):
        self.device = device
        self.num_bytes = 0
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def take(self, num_bytes: int) -> Tensor:
        """An uninitialised uint8 tensor [num_bytes]."""
        if self._free[num_bytes]:
            return self._free[num_bytes].pop()
        self.num_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back. On a GPU its next user comes later on the same stream."""
        self._free[buffer.numel()].append(buffer)


class Parcel:
    """Some pieces of one cargo in one buffer."""

    def __init__(self, spec: PieceSpec, names: Sequence[Name], buffer: Tensor):
        assert buffer.numel() == len(names) * spec.num_bytes, (buffer.numel(), len(names), spec)
        self.spec, self.names, self.buffer = spec, tuple(names), buffer
        end_of_wide = len(names) * spec.wide_bytes
        rows = (len(names) * spec.tokens, spec.batch, spec.heads)
        self._wide = buffer[:end_of_wide].view(spec.wide_dtype).view(*rows, spec.width)
        self._scalars = buffer[end_of_wide:].view(spec.scalar_dtype).view(*rows, spec.num_scalars)

    def wide(self, start: int, stop: int) -> Tensor:
        """Wide numbers of pieces start..stop, [(stop - start) * s, b, h, w]."""
        return self._wide[start * self.spec.tokens : stop * self.spec.tokens]

    def scalars(self, start: int, stop: int) -> Tensor:
        """Scalars of pieces start..stop, [(stop - start) * s, b, h, c]."""
        return self._scalars[start * self.spec.tokens : stop * self.spec.tokens]

    def wire_bytes(self, start: int, stop: int) -> Tensor | None:
        """Pieces start..stop as one contiguous byte tensor, or None where they are not contiguous."""
        if (start, stop) == (0, len(self.names)):
            return self.buffer
        if self.spec.num_scalars:
            return None
        return self.buffer[start * self.spec.wide_bytes : stop * self.spec.wide_bytes]


def head_groups_apart(shard: Tensor, num_chunks: int, head_groups: int) -> Tensor:
    """[chunks * s, b, groups * h, w] -> [groups * chunks * s, b, h, w], pieces in the order (head group, chunk).

    A view for one group of heads.
    """
    if head_groups == 1:
        return shard
    rows, batch, heads, width = shard.shape
    cut = shard.view(num_chunks, rows // num_chunks, batch, head_groups, heads // head_groups, width)
    return cut.permute(3, 0, 1, 2, 4, 5).reshape(head_groups * rows, batch, heads // head_groups, width)


def head_groups_together(pieces: Tensor, num_chunks: int, head_groups: int) -> Tensor:
    """The inverse of `head_groups_apart`."""
    if head_groups == 1:
        return pieces
    rows, batch, heads, width = pieces.shape
    tokens = rows // (head_groups * num_chunks)
    cut = pieces.view(head_groups, num_chunks, tokens, batch, heads, width)
    shard = cut.permute(1, 2, 3, 0, 4, 5)
    return shard.reshape(prod(shard.shape[:2]), batch, head_groups * heads, width)
