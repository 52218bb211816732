"""A rank's program as bound operations: every name, range, view and peer resolved once, when a plan is made.

The hot loop calls one operation after the other; each finds its tensors by number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from charm_megatron.compile import RankProgram
from charm_megatron.cost.buffers import arena
from charm_megatron.cost.wire import WireFormat
from charm_megatron.executor.computations import COMPUTATIONS, Block, Partial, block_of
from charm_megatron.executor.pairing import Addition, join_accumulations, pair_additions
from charm_megatron.executor.views import View, ViewTable
from charm_megatron.lowering.storage import (
    AccumulateStep,
    AttendStep,
    FreeStep,
    PostStep,
    Range,
    SendInPlace,
    SendPacked,
    Step,
    WaitStep,
)
from charm_megatron.schedule.actions import Key
from charm_megatron.schedule.payload import Payload

if TYPE_CHECKING:
    from charm_megatron.executor.run import ProgramRun

Rows = slice | None
"""Of a partial result those that belong to one range; None: all of them."""


class Pair(NamedTuple):
    """Numbers of two views: what is written, and what from."""

    into: int
    source: int


@dataclass(frozen=True, slots=True)
class Placed:
    """Tensors that are converted and put side by side, and delta [s, b, h], where it goes along: of (dout, out)."""

    pairs: tuple[Pair, ...]
    delta: tuple[int, int, int] | None = None

    def run(self, run: "ProgramRun") -> None:
        views = run.views
        run.elementwise.place([(views[into], views[source]) for into, source in self.pairs])
        if self.delta is not None:
            dout, out, into = self.delta
            run.elementwise.row_dot(views[dout], views[out], views[into])


@dataclass(frozen=True, slots=True)
class Posting:
    key: Key
    packs: tuple[Placed, ...]
    sends: tuple[tuple[int, int], ...]
    recvs: tuple[tuple[int, int], ...]
    """(peer, number of the view)."""

    def run(self, run: "ProgramRun") -> None:
        for pack in self.packs:
            pack.run(run)
        views = run.views
        sends = [(peer, views[number]) for peer, number in self.sends]
        recvs = [(peer, views[number]) for peer, number in self.recvs]
        run.handles[self.key] = run.transport.post(sends, recvs)


@dataclass(frozen=True, slots=True)
class Waiting:
    key: Key

    def run(self, run: "ProgramRun") -> None:
        run.wait(self.key)


@dataclass(frozen=True, slots=True)
class Merging:
    """A partial result is merged into sums by its lse. `empties`: (out, lse) that get no value before.

    It `waits` in a place of the run, or is merged together with the one that waits there (`takes`).
    """

    out: int
    lse: int
    rows: Rows
    is_first: bool
    empties: tuple[int, int] | None = None
    waits: int | None = None
    takes: int | None = None

    def run(self, run: "ProgramRun", partial: Partial) -> None:
        views, rows = run.views, self.rows
        if self.empties is not None:
            views[self.empties[0]].zero_()
            views[self.empties[1]].fill_(-torch.inf)
        (out,), lse = partial
        assert lse is not None, "a result that is merged brings its lse"
        if rows is not None:
            out, lse = out[rows], lse[rows]
        if parts := _to_reduce(run, (out, lse), self.waits, self.takes):
            run.elementwise.merge(views[self.out], views[self.lse], parts, is_first=self.is_first)


@dataclass(frozen=True, slots=True)
class Adding:
    """A partial result is added to sums, field by field; otherwise as `Merging`."""

    sums: tuple[int, ...]
    rows: Rows
    is_first: bool
    empties: tuple[int, ...] = ()
    waits: int | None = None
    takes: int | None = None

    def run(self, run: "ProgramRun", partial: Partial) -> None:
        views, rows, part = run.views, self.rows, tuple(partial.values)
        for number in self.empties:
            views[number].zero_()
        if rows is not None:
            part = tuple(x[rows] for x in part)
        if parts := _to_reduce(run, part, self.waits, self.takes):
            run.elementwise.add([views[number] for number in self.sums], parts, is_first=self.is_first)


Reducing = Merging | Adding


def _to_reduce[Part](run: "ProgramRun", part: Part, waits: int | None, takes: int | None) -> list[Part]:
    """A partial result, behind the one that waits for it; none where it is to wait itself."""
    if waits is not None:
        run.waiting[waits] = part
        return []
    return [part] if takes is None else [run.waiting.pop(takes), part]


@dataclass(frozen=True, slots=True)
class Attending:
    """Computes a rectangle and adds its results up. Operands by field, each of views that follow one another."""

    block: Block
    makes: tuple[tuple[int, int, int], ...]
    """(dout, delta, what stands in for out)."""
    q: tuple[tuple[int, ...], ...]
    kv: tuple[tuple[int, ...], ...]
    results: tuple[tuple[Reducing, ...], ...]

    def run(self, run: "ProgramRun") -> None:
        views = run.views
        for dout, delta, into in self.makes:
            run.elementwise.stand_in(views[dout], views[delta], views[into])
        q = [_joined([views[number] for number in parts]) for parts in self.q]
        kv = [_joined([views[number] for number in parts]) for parts in self.kv]
        partials = run.attend(run.context, self.block, q, kv)
        for ranges, partial in zip(self.results, partials, strict=True):
            for reducing in ranges:
                reducing.run(run, partial)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


@dataclass(frozen=True, slots=True)
class Accumulating:
    """A partial result that has arrived is added up."""

    values: tuple[int, ...]
    lse: int | None
    into: Reducing

    def run(self, run: "ProgramRun") -> None:
        views = run.views
        lse = None if self.lse is None else views[self.lse]
        self.into.run(run, Partial([views[number] for number in self.values], lse))


Operation = Posting | Waiting | Attending | Accumulating


@dataclass(frozen=True, eq=False)
class CompiledProgram:
    """One phase as one rank runs it. `operations[i]` is its action i; a Free has none.

    `frees[i]` are views of the buffers that nobody needs after action i, for those who watch. `begin` packs the rank's
    own operands; `untouched` are views of own results to which no block adds anything. `sent`: see `ViewTable`.
    """

    of: RankProgram
    operations: tuple[Operation | None, ...]
    frees: tuple[tuple[int, ...], ...]
    begin: tuple[Placed, ...]
    untouched: tuple[int, ...]
    views: tuple[View, ...]
    of_tensors: tuple[int, ...]
    sent: frozenset[str]
    num_bytes: int


def compile_program(program: RankProgram, wire: WireFormat) -> CompiledProgram:
    """Resolves one phase of one rank."""
    return _Compiler(program, wire).compile()


class _Compiler:
    def __init__(self, program: RankProgram, wire: WireFormat):
        self.program, self.wire = program, wire
        self.storage, self.pass_ = program.storage, program.pass_
        self.arena = arena(self.storage, wire)
        self.table = ViewTable(self.storage, wire, self.arena)
        self.steps = join_accumulations(self.storage)
        self.pairs = pair_additions(self.steps)
        self.firsts: set[int] = set()
        """Places where the first partial result of an accumulator waits."""

    def compile(self) -> CompiledProgram:
        begin = tuple(x for name in self.storage.packed for x in self._pack_own(name))
        operations = tuple(map(self._operation, range(len(self.steps)), self.steps))
        frees = tuple(map(self._frees, self.storage.steps))
        untouched = tuple(
            self.table.field(one, name)
            for at in self.storage.untouched
            for one in self._pieces(at)
            for payload in [self.storage.buffers[at.buffer].payload]
            for name in (*payload.values, *payload.stats)
        )
        return CompiledProgram(
            self.program,
            operations,
            frees,
            begin,
            untouched,
            self.table.all,
            self.table.of_tensors,
            frozenset(self.table.sent),
            self.arena.num_bytes,
        )

    def _operation(self, number: int, step: Step | None) -> Operation | None:
        match step:
            case PostStep():
                return self._post(step)
            case WaitStep(key):
                return Waiting(key)
            case AttendStep():
                return self._attend(number, step)
            case AccumulateStep():
                return self._accumulate(number, step)
            case FreeStep() | None:
                return None

    def _frees(self, step: Step) -> tuple[int, ...]:
        gives = step.gives if isinstance(step, PostStep | WaitStep | FreeStep) else ()
        return tuple(self.table.travelling(self.table.whole(number)) for number in gives)

    # ------------------------------------------------------------------ transfers

    def _pieces(self, at: Range) -> list[Range]:
        """One by one: several head groups of a rank's own tensors are no one view."""
        return [at._replace(start=i, stop=i + 1) for i in range(at.start, at.stop)]

    def _pack_own(self, name: str) -> list[Placed]:
        """Own operands, as they travel."""
        home, packed = self.storage.home[name], self.storage.packed[name]
        payload = self.storage.buffers[home].payload
        size = len(self.storage.buffers[home].pieces) // self.wire.problem.head_groups(payload.side)
        placed = []
        for head in range(self.wire.problem.head_groups(payload.side)):
            at = Range(packed, head * size, (head + 1) * size, 0, 0)
            own = at._replace(buffer=home)
            names = [name for name in (*payload.values, *payload.stats) if name != "delta"]
            pairs = tuple(Pair(self.table.field(at, name), self.table.field(own, name)) for name in names)
            delta = None
            if "delta" in payload.stats:
                dout, out = (self.table.field(own, name) for name in ("dout", "out"))
                delta = dout, out, self.table.field(at, "delta")
            placed.append(Placed(pairs, delta))
        return placed

    def _post(self, step: PostStep) -> Posting:
        packs: list[Placed] = []
        sends = []
        for send in step.sends:
            match send:
                case SendInPlace(peer, at):
                    sends.append((peer, self.table.travelling(at)))
                case SendPacked(peer, buffer, sources):
                    packs += [self._pack(buffer, at) for at in sources]
                    sends.append((peer, self.table.travelling(self.table.whole(buffer))))
        recvs = [(recv.peer, self.table.travelling(self.table.whole(recv.buffer))) for recv in step.recvs]
        return Posting(step.key, tuple(packs), tuple(sends), tuple(recvs))

    def _pack(self, buffer: int, source: Range) -> Placed:
        """Pieces of a message, which begin at a row of it."""
        first = self.table.piece_at_row(buffer, source.first_row)
        into = Range(buffer, first, first + source.stop - source.start, 0, 0)
        if self.storage.buffers[source.buffer].is_home:
            (name,) = self.storage.buffers[source.buffer].payload.values
            return Placed((Pair(self.table.field(into, name), self.table.field(source, name)),))
        pairs = [Pair(self.table.values(into), self.table.values(source))]
        stats, of_source = self.table.stats(into), self.table.stats(source)
        if stats is not None and of_source is not None:
            pairs.append(Pair(stats, of_source))
        return Placed(tuple(pairs))

    # ------------------------------------------------------------------ blocks

    def _attend(self, number: int, step: AttendStep) -> Attending:
        computation = COMPUTATIONS[self.pass_]
        block, rows, keys = block_of(step, computation)
        makes = tuple(
            (
                self.table.field(self.table.whole(make.source), "dout"),
                self.table.field(self.table.whole(make.source), "delta"),
                self.table.field(self.table.whole(make.buffer), "out"),
            )
            for make in step.makes
        )
        q = tuple(
            tuple(
                self._q_field(at, beside, name, rows)
                for at, beside in zip(step.q, step.stand_ins, strict=True)
            )
            for name in computation.q_fields
        )
        kv = tuple(
            tuple(self.table.field(at, name, keys) for at in step.kv) for name in computation.kv_fields
        )
        of_rows = {"q": rows, "kv": keys}
        results = tuple(
            tuple(
                self._reduce(
                    Addition(number, result, i), payload, at, of_rows[payload.side], is_whole=len(into) == 1
                )
                for i, at in enumerate(into)
            )
            for result, (payload, into) in enumerate(zip(self.pass_.results, step.results, strict=True))
        )
        return Attending(block, makes, q, kv, results)

    def _q_field(self, at: Range, beside: Range | None, name: str, rows: slice) -> int:
        if beside is not None and name in self.storage.buffers[beside.buffer].payload.values:
            return self.table.field(beside, name, rows)
        return self.table.field(at, name, rows)

    def _reduce(
        self, addition: Addition, payload: Payload, at: Range, rows: slice, *, is_whole: bool
    ) -> Reducing:
        """Adds a partial result, or its part for this range, to the range, or to the rows of it that a band leaves."""
        waits, takes = self.pairs.waiting.get(addition), self.pairs.taking.get(addition)
        is_cut = rows != slice(None)
        of_range = None if is_whole else slice(at.first_row, at.last_row)
        sums = tuple(self.table.field(at, name, rows) for name in payload.values)
        fills = is_cut and at.is_fresh
        is_first = (at.is_fresh and not is_cut) or takes in self.firsts
        if waits is not None and is_first:
            self.firsts.add(waits)
        empty = tuple(self.table.field(at, name) for name in payload.values) if fills else ()
        if payload.reduction == "add":
            return Adding(sums, of_range, is_first, empty, waits, takes)
        (name,) = payload.stats
        lse = self.table.field(at, name, rows)
        empties = (empty[0], self.table.field(at, name)) if fills else None
        return Merging(sums[0], lse, of_range, is_first, empties, waits, takes)

    def _accumulate(self, number: int, step: AccumulateStep) -> Accumulating:
        payload = self.storage.buffers[step.source.buffer].payload
        values = tuple(self.table.field(step.source, name) for name in payload.values)
        lse = self.table.field(step.source, payload.stats[0]) if payload.stats else None
        return Accumulating(
            values,
            lse,
            self._reduce(Addition(number, 0, 0), payload, step.target, slice(None), is_whole=True),
        )
