"""What a rank holds while a program runs: where each piece is, and buffers that come and go.

At home all copies of a piece are one, so names are looked up by `resident`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from charm_megatron.cost.wire import WireFormat
from charm_megatron.executor.buffers import (
    BufferPool,
    Parcel,
    RowSpec,
    accumulator_spec,
    head_groups_apart,
    head_groups_together,
    wire_spec,
)
from charm_megatron.schedule.actions import Piece
from charm_megatron.schedule.passes import PAYLOADS, Payload


@dataclass
class Place:
    """Where a piece is: at `index` of `parcel`. `is_fresh`: an accumulator to which nothing was added yet."""

    parcel: Parcel
    index: int
    is_fresh: bool = False


@dataclass(frozen=True)
class Run:
    """Pieces start..stop of a parcel, which are `rows` of what was asked for together."""

    parcel: Parcel
    start: int
    stop: int
    rows: slice
    is_fresh: bool

    @property
    def wide(self) -> Tensor:
        return self.parcel.wide(self.start, self.stop)

    @property
    def scalars(self) -> Tensor:
        return self.parcel.scalars(self.start, self.stop)


class PieceStore:
    """The pieces of one rank during one run. Tensors of a shard are [s, b, h, ..], s its tokens."""

    def __init__(self, wire: WireFormat, rank: int, pool: BufferPool):
        self.wire, self.rank, self.pool = wire, rank, pool
        self.chunks = wire.problem.sharding.chunks_of(rank)
        self._places: dict[Piece, Place] = {}
        self._in_use: dict[int, int] = {}  # id of a pooled parcel -> pieces of it that are still held
        self._home_buffers: list[Tensor] = []

    # ------------------------------------------------------------------ names

    def resident(self, name: Piece) -> Piece:
        """The name under which this rank holds a piece."""
        at_home = name.copy and name.src < 0 and self.wire.problem.sharding.home[name.chunk] == self.rank
        return name._replace(copy=0) if at_home else name

    def tokens(self, names: Sequence[Piece]) -> list[int]:
        """Tokens of each piece."""
        chunks = self.wire.problem.sharding.chunks
        return [chunks[name.chunk].length for name in names]

    def _home_names(self, payload: Payload) -> list[Piece]:
        """The pieces of this rank's shard, in the order in which a parcel of it holds them."""
        groups = self.wire.problem.head_groups(payload.side)
        return [Piece(payload.name, chunk, head) for head in range(groups) for chunk in self.chunks]

    # ------------------------------------------------------------------ the shard

    def pack_local(self, payload_name: str, fields: Sequence[Tensor], scalars: Sequence[Tensor] = ()) -> None:
        """Puts this rank's shard of an operand in place.

        `fields` are its wide numbers [s, b, h, ..], side by side in a row; `scalars` [s, b, h] likewise. A
        single contiguous field without scalars is used where it is; anything else is packed.
        """
        payload = PAYLOADS[payload_name]
        spec, names = wire_spec(self.wire, payload), self._home_names(payload)
        groups = self.wire.problem.head_groups(payload.side)
        apart = [head_groups_apart(x, groups) for x in fields]
        if len(apart) == 1 and not scalars and apart[0].is_contiguous():
            self.put(Parcel(spec, names, self.tokens(names), apart[0].detach().view(-1).view(torch.uint8)))
            return
        parcel = self._parcel(spec, names)
        self._home_buffers.append(parcel.buffer)
        for x, column in zip(apart, columns(parcel.wide(0, len(names)), apart), strict=True):
            column.copy_(x)
        for i, x in enumerate(scalars):
            parcel.scalars(0, len(names))[..., i].copy_(head_groups_apart(x.unsqueeze(-1), groups)[..., 0])
        self.put(parcel)

    def bind_local(self, payload_name: str, field: Tensor, scalars: Tensor | None = None) -> None:
        """Puts this rank's shard of payload that never travels in place: `field` [s, b, h, ..], `scalars` [s, b, h]."""
        names = self._home_names(PAYLOADS[payload_name])
        rows = scalars.unsqueeze(-1) if scalars is not None else field[..., :0].to(torch.float32)
        _, batch, heads, width = field.shape
        spec = RowSpec(batch, heads, width, rows.shape[-1], field.dtype, rows.dtype)
        flat = [x.detach().contiguous().view(-1).view(torch.uint8) for x in (field, rows)]
        self.put(Parcel(spec, names, self.tokens(names), torch.cat(flat)))

    def alloc_result(self, payload_name: str) -> None:
        """Makes the accumulator in which this rank's own results add up."""
        names, spec = (
            self._home_names(PAYLOADS[payload_name]),
            accumulator_spec(self.wire, PAYLOADS[payload_name]),
        )
        tokens = self.tokens(names)
        buffer = torch.empty(sum(tokens) * spec.token_bytes, dtype=torch.uint8, device=self.pool.device)
        self.put(Parcel(spec, names, tokens, buffer), is_fresh=True)

    def home_result(self, payload_name: str) -> tuple[Tensor, Tensor]:
        """Gives this rank's results after the run: wide numbers [s, b, h, w] and scalars [s, b, h, c].

        Zeros where no unmasked block has added anything.
        """
        names = self._home_names(PAYLOADS[payload_name])
        groups = self.wire.problem.head_groups(PAYLOADS[payload_name].side)
        for run in self.runs(names):
            if run.is_fresh:
                run.wide.zero_()
                run.scalars.zero_()
        parcel = self._places[names[0]].parcel
        wide, scalars = parcel.wide(0, len(names)), parcel.scalars(0, len(names))
        return head_groups_together(wide, groups), head_groups_together(scalars, groups)

    # ------------------------------------------------------------------ pieces that come and go

    def _parcel(self, spec: RowSpec, names: Sequence[Piece]) -> Parcel:
        tokens = self.tokens(names)
        return Parcel(spec, names, tokens, self.pool.take(sum(tokens) * spec.token_bytes))

    def incoming(self, names: Sequence[Piece]) -> Parcel:
        """A parcel to receive pieces in; `put` it when they are there, `free` them one by one."""
        return self._counted(self._parcel(wire_spec(self.wire, PAYLOADS[names[0].payload]), names))

    def packed(self, names: Sequence[Piece]) -> Parcel:
        """Copies of pieces in one parcel, as they travel. Give its buffer back to the pool afterwards."""
        parcel = self._parcel(wire_spec(self.wire, PAYLOADS[names[0].payload]), names)
        for at, name in enumerate(names):
            place = self.place(name)
            parcel.wide(at, at + 1).copy_(place.parcel.wide(place.index, place.index + 1))
            parcel.scalars(at, at + 1).copy_(place.parcel.scalars(place.index, place.index + 1))
        return parcel

    def accumulators(self, names: Sequence[Piece]) -> list[Run]:
        """The accumulators of `names` in runs, made where there are none; none is fresh any more afterwards."""
        missing = [name for name in names if self.resident(name) not in self._places]
        if missing:
            spec = accumulator_spec(self.wire, PAYLOADS[missing[0].payload])
            self.put(self._counted(self._parcel(spec, missing)), is_fresh=True)
        found = list(self.runs(names))
        for name in names:
            self.place(name).is_fresh = False
        return found

    def _counted(self, parcel: Parcel) -> Parcel:
        self._in_use[id(parcel)] = len(parcel.names)
        return parcel

    def put(self, parcel: Parcel, *, is_fresh: bool = False) -> None:
        """From now on these pieces may be read."""
        for index, name in enumerate(parcel.names):
            self._places[name] = Place(parcel, index, is_fresh)

    def place(self, name: Piece) -> Place:
        return self._places[self.resident(name)]

    def free(self, name: Piece) -> None:
        """Gives a piece up; the buffer goes back to the pool with the last piece in it."""
        parcel = self._places.pop(name).parcel
        self._in_use[id(parcel)] -= 1
        if not self._in_use[id(parcel)]:
            del self._in_use[id(parcel)]
            self.pool.give(parcel.buffer)

    def close(self) -> None:
        """Gives back the buffers of the operands at home."""
        assert not self._in_use, "the program ends with buffers in use"
        for buffer in self._home_buffers:
            self.pool.give(buffer)

    # ------------------------------------------------------------------ pieces that lie side by side

    def runs(self, names: Sequence[Piece]) -> Iterator[Run]:
        """Groups `names` into runs that are consecutive in one parcel and equally fresh."""
        tokens = self.tokens(names)
        first = last = self.place(names[0])
        begin, row = 0, 0
        for name, before in zip(names[1:], tokens, strict=False):
            place = self.place(name)
            row += before
            joins = place.parcel is last.parcel and place.index == last.index + 1
            if not joins or place.is_fresh != last.is_fresh:
                yield Run(first.parcel, first.index, last.index + 1, slice(begin, row), first.is_fresh)
                first, begin = place, row
            last = place
        yield Run(first.parcel, first.index, last.index + 1, slice(begin, sum(tokens)), first.is_fresh)

    def operand(self, names: Sequence[Piece]) -> tuple[Tensor, Tensor]:
        """Wide numbers [s, b, h, w] and scalars [s, b, h, c] of operands, in place where possible."""
        found = list(self.runs(names))
        if len(found) == 1:
            return found[0].wide, found[0].scalars
        return torch.cat([run.wide for run in found]), torch.cat([run.scalars for run in found])


def columns(wide: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The columns of `wide` [.., w] that `parts` [.., w_i] fill from left to right."""
    return torch.split(wide, [part.shape[-1] for part in parts], dim=-1)
