"""One rank's program on tensors: a loop over its actions.

Accumulators are fp32 (fp64 for a float64 model) and partial results merge in program order, whatever
arrives first, so with a deterministic kernel results are bitwise repeatable.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from charm_megatron.executor.parcels import (
    BufferPool,
    Parcel,
    PieceSpec,
    accumulator_spec,
    head_groups_apart,
    head_groups_together,
    wire_spec,
)
from charm_megatron.executor.transport import Transfer, Transport
from charm_megatron.kernels import BlockKernel
from charm_megatron.schedule.actions import (
    Accumulate,
    Attend,
    Free,
    Key,
    Message,
    Name,
    Post,
    Program,
    Wait,
)
from charm_megatron.schedule.passes import CARGOS, FORWARD, Pass
from charm_megatron.schedule.wire import WireFormat


@dataclass(frozen=True)
class RankPlan:
    """What a rank needs to know to run one pass: its program, its label a line, and the sizes of pieces."""

    pass_: Pass
    program: Program
    labels: tuple[str, ...]
    wire: WireFormat
    shard_chunks: tuple[int, ...]


@dataclass
class _Place:
    """Where a piece is: at `index` of `parcel`. `is_fresh`: an accumulator to which nothing was added yet."""

    parcel: Parcel
    index: int
    is_fresh: bool = False


@dataclass
class _Open:
    """A post under way."""

    handle: object
    landing: list[Parcel]
    packed: list[Tensor]


class ProgramRun:
    """Runs one program once. Give it what is at home, call `run`, take the results."""

    def __init__(
        self,
        plan: RankPlan,
        kernel: BlockKernel,
        transport: Transport,
        pool: BufferPool,
        softmax_scale: float,
    ):
        self.plan, self.kernel, self.transport, self.pool = plan, kernel, transport, pool
        self.softmax_scale = softmax_scale
        self.wire_specs = {c.name: wire_spec(plan.wire, c) for c in plan.pass_.cargos}
        self.places: dict[Name, _Place] = {}
        self.open: dict[Key, _Open] = {}
        self.pooled: dict[int, int] = {}  # id of a pooled parcel -> pieces of it still in use
        self.home_buffers: list[Tensor] = []

    # ------------------------------------------------------------------ what is at home

    def home_names(self, cargo_name: str) -> list[Name]:
        """The pieces of this rank's shard, in the order in which a parcel of it holds them."""
        groups = self.plan.wire.problem.head_groups(CARGOS[cargo_name].side)
        return [Name(cargo_name, chunk, head) for head in range(groups) for chunk in self.plan.shard_chunks]

    def take_home(self, cargo_name: str, fields: Sequence[Tensor], scalars: Sequence[Tensor] = ()) -> None:
        """Puts this rank's shard of an operand in place.

        `fields` are its wide numbers [s, b, h, ..], side by side in a row; `scalars` [s, b, h] likewise. A
        single contiguous field without scalars is used where it is; anything else is packed.
        """
        cargo, spec, names = CARGOS[cargo_name], self.wire_specs[cargo_name], self.home_names(cargo_name)
        groups = self.plan.wire.problem.head_groups(cargo.side)
        apart = [head_groups_apart(x, len(self.plan.shard_chunks), groups) for x in fields]
        if len(apart) == 1 and not scalars and apart[0].is_contiguous():
            self._place(Parcel(spec, names, apart[0].detach().view(-1).view(torch.uint8)))
            return
        buffer = self.pool.take(len(names) * spec.num_bytes)
        self.home_buffers.append(buffer)
        parcel = Parcel(spec, names, buffer)
        for x, column in zip(apart, _columns(parcel.wide(0, len(names)), apart), strict=True):
            column.copy_(x)
        for i, x in enumerate(scalars):
            rows = head_groups_apart(x.unsqueeze(-1), len(self.plan.shard_chunks), groups)
            parcel.scalars(0, len(names))[..., i].copy_(rows[..., 0])
        self._place(parcel)

    def expect_home(self, cargo_name: str) -> None:
        """Makes the accumulator in which this rank's own results add up."""
        names, spec = self.home_names(cargo_name), accumulator_spec(self.plan.wire, CARGOS[cargo_name])
        buffer = torch.empty(len(names) * spec.num_bytes, dtype=torch.uint8, device=self.pool.device)
        self._place(Parcel(spec, names, buffer), is_fresh=True)

    def home_result(self, cargo_name: str) -> tuple[Tensor, Tensor]:
        """Gives this rank's results after the run: wide numbers [s, b, h, w] and scalars [s, b, h, c].

        Zeros where no unmasked block has added anything.
        """
        names = self.home_names(cargo_name)
        groups = self.plan.wire.problem.head_groups(CARGOS[cargo_name].side)
        parcel = self.places[names[0]].parcel
        for run in self._runs(names):
            if run.is_fresh:
                parcel.wide(run.start, run.stop).zero_()
                parcel.scalars(run.start, run.stop).zero_()
        wide, scalars = parcel.wide(0, len(names)), parcel.scalars(0, len(names))
        chunks = len(self.plan.shard_chunks)
        return head_groups_together(wide, chunks, groups), head_groups_together(scalars, chunks, groups)

    def _place(self, parcel: Parcel, *, is_fresh: bool = False) -> None:
        for index, name in enumerate(parcel.names):
            self.places[name] = _Place(parcel, index, is_fresh)

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Runs all actions in order, then gives back the buffers of the operands at home."""
        for action, label in zip(self.plan.program, self.plan.labels, strict=True):
            with record_function(label):
                match action:
                    case Post():
                        self._post(action)
                    case Wait(key):
                        self._wait(key)
                    case Attend():
                        self._attend(action)
                    case Accumulate(name):
                        self._accumulate(name)
                    case Free(name):
                        self._free(name)
        assert not self.open, "the program ends with transfers under way"
        assert not self.pooled, "the program ends with buffers in use"
        for buffer in self.home_buffers:
            self.pool.give(buffer)

    # ------------------------------------------------------------------ transfers

    def _post(self, post: Post) -> None:
        under_way = _Open(None, [], [])
        sends = [self._outgoing(message, under_way) for message in post.sends]
        recvs: list[Transfer] = []
        for peer, names in post.recvs:
            parcel = self._pooled_parcel(self.wire_specs[names[0].cargo], names)
            under_way.landing.append(parcel)
            recvs.append((peer, parcel.buffer))
        under_way.handle = self.transport.post(sends, recvs)
        self.open[post.key] = under_way

    def _outgoing(self, message: Message, under_way: _Open) -> Transfer:
        """The message as bytes: in place where its pieces lie side by side as they travel, else packed."""
        peer, names = message
        if not CARGOS[names[0].cargo].is_result:
            runs = list(self._runs(names))
            if len(runs) == 1:
                in_place = runs[0].parcel.wire_bytes(runs[0].start, runs[0].stop)
                if in_place is not None:
                    return peer, in_place
        spec = self.wire_specs[names[0].cargo]
        packed = Parcel(spec, names, self.pool.take(len(names) * spec.num_bytes))
        under_way.packed.append(packed.buffer)
        for at, name in enumerate(names):
            place = self.places[name]
            packed.wide(at, at + 1).copy_(place.parcel.wide(place.index, place.index + 1))
            packed.scalars(at, at + 1).copy_(place.parcel.scalars(place.index, place.index + 1))
        return peer, packed.buffer

    def _wait(self, key: Key) -> None:
        done = self.open.pop(key)
        self.transport.wait(done.handle)
        for parcel in done.landing:
            self._place(parcel)
        for buffer in done.packed:
            self.pool.give(buffer)

    def _pooled_parcel(self, spec: PieceSpec, names: Sequence[Name]) -> Parcel:
        parcel = Parcel(spec, names, self.pool.take(len(names) * spec.num_bytes))
        self.pooled[id(parcel)] = len(names)
        return parcel

    def _free(self, name: Name) -> None:
        parcel = self.places.pop(name).parcel
        self.pooled[id(parcel)] -= 1
        if not self.pooled[id(parcel)]:
            del self.pooled[id(parcel)]
            self.pool.give(parcel.buffer)

    # ------------------------------------------------------------------ pieces that lie side by side

    def _runs(self, names: Sequence[Name]) -> "Iterator[_Run]":
        """Groups `names` into runs that are consecutive in one parcel and equally fresh."""
        first = last = self.places[names[0]]
        begin = 0
        for i, name in enumerate(names[1:], start=1):
            place = self.places[name]
            joins = place.parcel is last.parcel and place.index == last.index + 1
            if not joins or place.is_fresh != last.is_fresh:
                yield _Run(first.parcel, first.index, last.index + 1, begin, first.is_fresh)
                first, begin = place, i
            last = place
        yield _Run(first.parcel, first.index, last.index + 1, begin, first.is_fresh)

    def _operand(self, names: Sequence[Name]) -> tuple[Tensor, Tensor]:
        """Wide numbers [P * s, b, h, w] and scalars [P * s, b, h, c] of operands, in place where possible."""
        runs = list(self._runs(names))
        wide = [run.parcel.wide(run.start, run.stop) for run in runs]
        scalars = [run.parcel.scalars(run.start, run.stop) for run in runs]
        if len(runs) == 1:
            return wide[0], scalars[0]
        return torch.cat(wide), torch.cat(scalars)

    # ------------------------------------------------------------------ computation

    def _attend(self, action: Attend) -> None:
        head_dim = self.plan.wire.workload.head_dim
        q, scalars = self._operand(action.q)
        kv, _ = self._operand(action.kv)
        k, v = kv[..., :head_dim], kv[..., head_dim:]
        if self.plan.pass_ is FORWARD:
            out, lse = self.kernel.forward(q, k, v, causal=action.causal, softmax_scale=self.softmax_scale)
            self._add_out(_results("o", action.q), out, lse)
            return
        dq, dk, dv = self.kernel.backward(
            q[..., head_dim:],
            q[..., :head_dim],
            k,
            v,
            scalars[..., 0],
            scalars[..., 1],
            causal=action.causal,
            softmax_scale=self.softmax_scale,
        )
        self._add_gradient(_results("dq", action.q), (dq,))
        self._add_gradient(_results("dkv", action.kv), (dk, dv))

    def _accumulators(self, names: Sequence[Name]) -> "Iterator[tuple[_Run, slice]]":
        """Runs of the accumulators `names`, made where there are none, with their rows in `names`' order."""
        missing = [name for name in names if name not in self.places]
        if missing:
            spec = accumulator_spec(self.plan.wire, CARGOS[missing[0].cargo])
            self._place(self._pooled_parcel(spec, missing), is_fresh=True)
        tokens = self.plan.wire.chunk_len
        for run in list(self._runs(names)):
            yield run, slice(run.begin * tokens, (run.begin + run.stop - run.start) * tokens)
        for name in names:
            self.places[name].is_fresh = False

    def _add_out(self, names: Sequence[Name], out: Tensor, lse: Tensor) -> None:
        """Merges a partial (out [P * s, b, h, dv], lse [P * s, b, h]) into the accumulators of `names`."""
        for run, rows in self._accumulators(names):
            out_sum = run.parcel.wide(run.start, run.stop)
            lse_sum = run.parcel.scalars(run.start, run.stop)[..., 0]
            if run.is_fresh:
                out_sum.copy_(out[rows])
                lse_sum.copy_(lse[rows])
            else:
                merge_partial(out_sum, lse_sum, out[rows], lse[rows])

    def _add_gradient(self, names: Sequence[Name], parts: Sequence[Tensor]) -> None:
        """Adds partial gradients [P * s, b, h, ..], side by side in a row, to the accumulators of `names`."""
        for run, rows in self._accumulators(names):
            total = run.parcel.wide(run.start, run.stop)
            for column, part in zip(_columns(total, parts), parts, strict=True):
                if run.is_fresh:
                    column.copy_(part[rows])
                else:
                    column.add_(part[rows])

    def _accumulate(self, name: Name) -> None:
        place = self.places[name]
        wide = place.parcel.wide(place.index, place.index + 1)
        own = (name._replace(src=-1),)
        if self.plan.pass_ is FORWARD:
            scalars = place.parcel.scalars(place.index, place.index + 1)
            self._add_out(own, wide, scalars[..., 0])
        else:
            self._add_gradient(own, (wide,))


@dataclass(frozen=True)
class _Run:
    """Pieces start..stop of a parcel; the first of them is number `begin` of the names that were asked for."""

    parcel: Parcel
    start: int
    stop: int
    begin: int
    is_fresh: bool


def _columns(wide: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The columns of `wide` [.., w] that `parts` [.., w_i] fill from left to right."""
    return torch.split(wide, [part.shape[-1] for part in parts], dim=-1)


def _results(cargo_name: str, operands: Sequence[Name]) -> list[Name]:
    return [Name(cargo_name, name.chunk, name.head) for name in operands]


def merge_partial(out_sum: Tensor, lse_sum: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merges a partial result into (out_sum [s, b, h, dv], lse_sum [s, b, h]), in place.

    lse = logaddexp(lse_a, lse_b); out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b, whose second weight
    is sigmoid(lse_b - lse_a). Both lse are finite: no block has an empty row.
    """
    weight = torch.sigmoid(lse - lse_sum).unsqueeze(-1)
    out_sum.lerp_(out.to(out_sum.dtype), weight)
    torch.logaddexp(lse_sum, lse, out=lse_sum)
