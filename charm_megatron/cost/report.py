"""What a schedule costs a rank, in numbers: work, traffic, buffers, and waits that no overlap can hide.

Links come in two classes, inside a domain and across domains, as domains have one level today. Deeper levels
(NUMA inside a node) would add a class to `wire.Traffic`, and a column each here.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from charm_megatron.cost.wire import Traffic, WireFormat, hop_bytes, traffic
from charm_megatron.lowering.decisions import IntArray, Problem
from charm_megatron.schedule.actions import (
    Accumulate,
    Action,
    Attend,
    Free,
    Key,
    Message,
    Piece,
    Post,
    Program,
    Wait,
)
from charm_megatron.schedule.passes import PAYLOADS, Pass, Payload
from charm_megatron.schedule.schedule import Schedule
from charm_megatron.workload import ITEMSIZE_BYTES, Band


@dataclass(frozen=True, eq=False)
class Report:
    """The numbers of all phases of one direction. Arrays are [cp_size]."""

    num_blocks: IntArray
    flops: npt.NDArray[np.float64]
    traffic: Traffic
    num_comm_steps: int
    num_compute_steps: int
    longest_chain: int
    exposed_steps: int
    exposed_bytes: IntArray

    @property
    def flops_share(self) -> npt.NDArray[np.float64]:
        """Each rank's part of all work."""
        return self.flops / max(float(self.flops.sum()), 1.0)

    @property
    def imbalance(self) -> float:
        """What the busiest rank computes, over the mean."""
        return float(self.flops.max() / max(float(self.flops.mean()), 1.0))


def report(schedules: Sequence[Schedule], wire: WireFormat) -> Report:
    """Adds up phases that run one after the other."""
    exposed = [exposed_hops(schedule) for schedule in schedules]
    sizes = [np.where(rows, hop_bytes(s, wire), 0) for s, rows in zip(schedules, exposed, strict=True)]
    sent = [
        np.bincount(s.hops.src, weights=x, minlength=s.cp_size) for s, x in zip(schedules, sizes, strict=True)
    ]
    return Report(
        num_blocks=sum_arrays(np.bincount(s.blocks.rank, minlength=s.cp_size) for s in schedules),
        flops=np.sum([block_flops(schedule, wire) for schedule in schedules], axis=0),
        traffic=traffic(*schedules, wire=wire),
        num_comm_steps=sum(schedule.num_comm_steps for schedule in schedules),
        num_compute_steps=sum(schedule.num_compute_steps for schedule in schedules),
        longest_chain=sum(longest_chain(schedule) for schedule in schedules),
        exposed_steps=sum(
            max(0, schedule.num_comm_steps - schedule.num_compute_steps) for schedule in schedules
        ),
        exposed_bytes=sum_arrays(x.astype(np.int64) for x in sent),
    )


def sum_arrays(arrays: Iterable[IntArray]) -> IntArray:
    """Element by element."""
    total: IntArray = np.sum(list(arrays), axis=0)
    return total


def exposed_hops(schedule: Schedule) -> npt.NDArray[np.bool_]:
    """Which hops are in flight in steps after the last compute step: nothing is left to compute beside them."""
    rows: npt.NDArray[np.bool_] = schedule.hops.comm_step >= schedule.num_compute_steps
    return rows


def block_flops(schedule: Schedule, wire: WireFormat) -> npt.NDArray[np.float64]:
    """What each rank computes, [cp_size]; only unmasked elements count."""
    problem, blocks = schedule.problem, schedule.blocks
    pairs = num_pairs(problem, blocks.q, blocks.kv)
    backward = schedule.pass_.direction == "backward"
    per_pair = wire.workload.block_flops(1, wire.heads(schedule.pass_.q_down), backward=backward)
    totals = np.bincount(blocks.rank, weights=pairs.astype(np.float64), minlength=problem.cp_size)
    return np.asarray(totals * per_pair, dtype=np.float64)


def num_pairs(problem: Problem, q: IntArray, kv: IntArray) -> IntArray:
    """Unmasked elements of each block (q[i], kv[i]). Most blocks are full; of the others, equal ones count once."""
    lo, hi, rows, columns = (
        *(bound[q, kv] for bound in problem.bands),
        problem.lengths[q],
        problem.lengths[kv],
    )
    pairs = rows * columns
    cut = np.nonzero((lo > 1 - columns) | (hi < rows - 1))[0]
    if len(cut):
        kinds = np.stack([column[cut] for column in (lo, hi, rows, columns)])
        distinct, of_block = np.unique(kinds, axis=1, return_inverse=True)
        counts = [Band(low, high).num_pairs(a, b) for low, high, a, b in distinct.T.tolist()]
        pairs[cut] = np.asarray(counts, dtype=np.int64)[of_block.reshape(-1)]
    return pairs


# ---------------------------------------------------------------------- chains of transfers


def longest_chain(schedule: Schedule) -> int:
    """Transfers in the longest chain of which each needs the one before.

    An operand's hop needs the hop that brought the piece to where it leaves from. A result's hop needs whatever
    brought the operands of the blocks in it, and every partial result that was added to it there. Links
    and the order in which a rank posts are left out: this is the chain that no bandwidth shortens.
    """
    problem, hops, payloads = schedule.problem, schedule.hops, schedule.pass_.payloads
    arrived = {payload.name: _zeros(schedule, payload) for payload in payloads}
    is_result = np.asarray([int(payload.is_result) for payload in payloads], dtype=np.int64)[hops.payload]
    _lengthen(schedule, arrived, np.nonzero(is_result == 0)[0])
    blocks, pass_ = schedule.blocks, schedule.pass_
    q_piece = blocks.q * problem.q_head_groups + blocks.head
    kv_head = problem.kv_head_of(blocks.head)
    kv_piece = (blocks.kv_copy * problem.num_chunks + blocks.kv) * problem.kv_head_groups + kv_head
    size = problem.cp_size
    of_block = np.maximum(
        arrived[pass_.q_down.name][q_piece * size + blocks.rank],
        arrived[pass_.kv_down.name][kv_piece * size + blocks.rank],
    )
    for up, piece in ((pass_.q_up, q_piece), (pass_.kv_up, kv_piece)):
        if up:
            np.maximum.at(arrived[up.name], piece * size + blocks.rank, of_block)
    _lengthen(schedule, arrived, np.nonzero(is_result == 1)[0])
    return max(int(state.max(initial=0)) for state in arrived.values()) if len(hops.comm_step) else 0


def _zeros(schedule: Schedule, payload: Payload) -> IntArray:
    """A number for each (piece, rank) of a payload."""
    hops = schedule.hops
    problem = schedule.problem
    groups = problem.head_groups(payload.side)
    copies = 1 + int(schedule.blocks.kv_copy.max(initial=0)) if payload.side == "kv" else 1
    pieces = max(copies * problem.num_chunks * groups, int(hops.piece.max(initial=0)) + 1)
    return np.zeros(pieces * problem.cp_size, dtype=np.int64)


def _lengthen(schedule: Schedule, arrived: dict[str, IntArray], rows: IntArray) -> None:
    """Takes the hops of `rows` step by step: each arrives with one more than what it left with."""
    hops, size = schedule.hops, schedule.cp_size
    rows = rows[np.argsort(hops.comm_step[rows], kind="stable")]
    starts = np.nonzero(np.diff(hops.comm_step[rows], prepend=-1))[0]
    for now in np.split(rows, starts[1:]) if len(rows) else []:
        lengths = [
            (payload.name, of, arrived[payload.name][hops.piece[of] * size + hops.src[of]] + 1)
            for number, payload in enumerate(schedule.pass_.payloads)
            if len(of := now[hops.payload[now] == number])
        ]
        for name, of, length in lengths:
            np.maximum.at(arrived[name], hops.piece[of] * size + hops.dst[of], length)


# ---------------------------------------------------------------------- buffers


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


def peak_buffers(program: Program, pass_: Pass, wire: WireFormat, rank: int) -> Buffers:
    """What one rank needs while it runs `program`, which must be one that the checker accepts."""
    spans = lifetimes(program, pass_, wire, rank)
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
    slots = [-1] * len(spans)
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
    return slots


def lifetimes(program: Program, pass_: Pass, wire: WireFormat, rank: int) -> list[Lifetime]:
    """The buffers that running `program` takes from the executor's pool, in the order of taking.

    They are: this rank's operands where their fields must be packed side by side; a buffer for each message that
    arrives; one for each message that leaves, unless its pieces lie in one buffer as they travel; and
    accumulators for results that are not at home here. The rank's own results are no part of it.
    """
    return _Store(pass_, wire, rank).run(program)


@dataclass
class _Parcel:
    """Pieces in one buffer; -1: not one of the pool."""

    lifetime: int
    num_pieces: int
    num_held: int


@dataclass
class _Store:
    """Follows a program as the executor's store does, with sizes in place of tensors."""

    pass_: Pass
    wire: WireFormat
    rank: int
    at: int = 0
    spans: list[Lifetime] = field(default_factory=list)
    places: dict[Piece, tuple[_Parcel, int]] = field(default_factory=dict)
    landing: dict[Key, list[tuple[_Parcel, tuple[Piece, ...]]]] = field(default_factory=dict)
    packed: dict[Key, list[int]] = field(default_factory=dict)

    def run(self, program: Program) -> list[Lifetime]:
        home = [
            self._take_home(payload)
            for payload in (self.pass_.q_down, self.pass_.kv_down, self.pass_.q_up, self.pass_.kv_up)
            if payload
        ]
        for self.at, action in enumerate(program):
            self._step(action)
        self.at = len(program)
        for lifetime in home:
            self._give(lifetime)
        return self.spans

    def _step(self, action: Action) -> None:
        match action:
            case Post(key):
                self.packed[key] = [x for message in action.sends if (x := self._outgoing(message)) >= 0]
                self.landing[key] = [
                    (self._parcel(self._wire_bytes(names), len(names)), names) for _, names in action.recvs
                ]
            case Wait(key):
                for parcel, names in self.landing.pop(key):
                    self._put(parcel, names)
                for lifetime in self.packed.pop(key):
                    self._give(lifetime)
            case Attend(q, kv):
                self._attend(q, kv)
            case Accumulate(name):
                self._accumulators([name.own])
            case Free(name):
                self._free(name)

    # ------------------------------------------------------------------ buffers

    def _take(self, num_bytes: int) -> int:
        self.spans.append(Lifetime(num_bytes, self.at, self.at))
        return len(self.spans) - 1

    def _give(self, lifetime: int) -> None:
        if lifetime >= 0:
            span = self.spans[lifetime]
            self.spans[lifetime] = Lifetime(span.num_bytes, span.first, self.at)

    def _parcel(self, num_bytes: int, num_pieces: int) -> _Parcel:
        return _Parcel(self._take(num_bytes), num_pieces, num_pieces)

    def _put(self, parcel: _Parcel, names: Sequence[Piece]) -> None:
        for index, name in enumerate(names):
            self.places[name] = parcel, index

    def _free(self, name: Piece) -> None:
        parcel, _ = self.places.pop(name)
        parcel.num_held -= 1
        if not parcel.num_held:
            self._give(parcel.lifetime)

    def _wire_bytes(self, names: Sequence[Piece]) -> int:
        return sum(self.wire.piece_bytes(PAYLOADS[name.payload], name.chunk) for name in names)

    # ------------------------------------------------------------------ what actions take

    def _take_home(self, payload: Payload) -> int:
        """Places this rank's shard; the lifetime of the buffer in which it is packed, or -1."""
        problem = self.wire.problem
        heads, chunks = range(problem.head_groups(payload.side)), problem.sharding.chunks_of(self.rank)
        names = [Piece(payload.name, chunk, head) for head in heads for chunk in chunks]
        is_packed = not payload.is_result and len(payload.widths) + payload.num_stats > 1
        lifetime = self._take(self._wire_bytes(names)) if is_packed else -1
        self._put(_Parcel(lifetime, len(names), len(names)), names)
        return lifetime

    def _outgoing(self, message: Message) -> int:
        payload = PAYLOADS[message.names[0].payload]
        places = [self.places[self._resident(name)] for name in message.names]
        parcel, first = places[0]
        lie_together = all(p is parcel and i == first + n for n, (p, i) in enumerate(places))
        is_whole = len(places) == parcel.num_pieces
        if not payload.is_result and lie_together and (is_whole or not payload.num_stats):
            return -1
        return self._take(self._wire_bytes(message.names))

    def _attend(self, q: Sequence[Piece], kv: Sequence[Piece]) -> None:
        for names, up in ((q, self.pass_.q_up), (kv, self.pass_.kv_up)):
            if up:
                results = [name._replace(payload=up.name) for name in names]
                # The passes of ring self-attention take blocks one by one.
                in_rounds = self.pass_.name not in ("forward", "backward")
                for group in [[name] for name in results] if in_rounds else [results]:
                    self._accumulators(group)

    def _accumulators(self, names: Sequence[Piece]) -> None:
        missing = [name for name in names if self._resident(name) not in self.places]
        if missing:
            payload, workload = PAYLOADS[missing[0].payload], self.wire.workload
            numbers = self.wire.width(payload) + payload.num_stats
            row_bytes = numbers * ITEMSIZE_BYTES[workload.accumulate_dtype]
            tokens = sum(self.wire.problem.sharding.chunks[name.chunk].length for name in missing)
            rows = tokens * workload.batch * self.wire.heads(payload)
            self._put(self._parcel(rows * row_bytes, len(missing)), missing)

    def _resident(self, name: Piece) -> Piece:
        """At home all copies of a piece are one."""
        at_home = name.copy and name.src < 0 and self.wire.problem.sharding.home[name.chunk] == self.rank
        return name._replace(copy=0) if at_home else name
