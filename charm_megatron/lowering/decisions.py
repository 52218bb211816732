"""What a planner decides: an owner for every block, and routes by which operands reach the owners.

A *block* is (query chunk, KV chunk, query head group). A *piece* is one chunk of one head group of one
side; it has one home. Everything else about a schedule is derived from these decisions by `lowering`.
Tables are numpy arrays, so that a group of a thousand ranks is planned in seconds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from charm_megatron.errors import PlanError
from charm_megatron.schedule.passes import BACKWARD, FORWARD, Pass, Side
from charm_megatron.sharding import Sharding
from charm_megatron.topology import Domains
from charm_megatron.workload import CAUSAL, Band, Mask

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Problem:
    """The blocks to be computed, and where their operands are.

    Query heads are cut into `q_head_groups`, KV heads into `kv_head_groups`; several query head groups
    may read the same KV head group.
    """

    sharding: Sharding
    domains: Domains
    mask: Mask = CAUSAL
    q_head_groups: int = 1
    kv_head_groups: int = 1

    def __post_init__(self) -> None:
        if self.sharding.cp_size != self.domains.cp_size:
            raise PlanError(
                f"the layout is for {self.sharding.cp_size} ranks, the domains have {self.domains.cp_size}"
            )
        if self.q_head_groups % self.kv_head_groups:
            raise PlanError(
                f"{self.q_head_groups} query head groups cannot share {self.kv_head_groups} KV head groups "
                f"evenly; the first must be a multiple of the second"
            )

    @property
    def cp_size(self) -> int:
        return self.sharding.cp_size

    @property
    def num_chunks(self) -> int:
        return self.sharding.num_chunks

    def head_groups(self, side: Side) -> int:
        return self.q_head_groups if side == "q" else self.kv_head_groups

    def kv_head_of(self, q_head: IntArray) -> IntArray:
        """The KV head group that each query head group reads."""
        return q_head * self.kv_head_groups // self.q_head_groups

    @cached_property
    def home(self) -> IntArray:
        """Home rank of each chunk, [num_chunks]."""
        return np.asarray(self.sharding.home, dtype=np.int64)

    @cached_property
    def lengths(self) -> IntArray:
        """Tokens of each chunk, [num_chunks]."""
        return np.asarray([chunk.length for chunk in self.sharding.chunks], dtype=np.int64)

    @cached_property
    def bands(self) -> tuple[IntArray, IntArray]:
        """(lo, hi) of each block's `Band`, [num_chunks, num_chunks], no wider than the block.

        Row a and column b of a block are tokens start_q + stride * a and start_kv + stride * b, so the mask's
        bounds on their distance are bounds on a - b.
        """
        chunks = self.sharding.chunks
        start = np.asarray([chunk.start for chunk in chunks], dtype=np.int64)
        stride = np.asarray([chunk.stride for chunk in chunks], dtype=np.int64)
        apart = start[:, None] - start[None, :]
        widest_lo, widest_hi = np.broadcast_arrays(1 - self.lengths[None, :], self.lengths[:, None] - 1)
        lo, hi = widest_lo, widest_hi
        if self.mask.right is not None:
            lo = np.maximum(lo, -((self.mask.right + apart) // stride[:, None]))
        if self.mask.left is not None:
            hi = np.minimum(hi, (self.mask.left - apart) // stride[:, None])
        return lo, hi

    @cached_property
    def unmasked(self) -> BoolArray:
        """Which (query chunk, KV chunk) have anything to compute, [num_chunks, num_chunks]."""
        lo, hi = self.bands
        document = np.asarray([chunk.document for chunk in self.sharding.chunks])
        within = (lo <= hi) & (lo <= self.lengths[:, None] - 1) & (hi >= 1 - self.lengths[None, :])
        unmasked: BoolArray = within & (document[:, None] == document[None, :])
        return unmasked

    def band(self, q_chunk: int, kv_chunk: int) -> Band:
        """Which elements of a block count."""
        lo, hi = self.bands
        return Band(int(lo[q_chunk, kv_chunk]), int(hi[q_chunk, kv_chunk]))

    def is_full(self, q_chunk: int, kv_chunk: int) -> bool:
        """Whether no element of a block is masked."""
        return self.band(q_chunk, kv_chunk).is_full(*self.block_shape(q_chunk, kv_chunk))

    def block_shape(self, q_chunk: int, kv_chunk: int) -> tuple[int, int]:
        """(rows, columns) of a block."""
        return int(self.lengths[q_chunk]), int(self.lengths[kv_chunk])


@dataclass(frozen=True, eq=False)
class Routes:
    """Routes of equal length. Row i: piece `pieces[i]` goes path[i, 0] -> path[i, 1] -> ...

    Hop j of a row is in flight *during* step `steps[i, j]`. A row starts at its piece's home, or at a
    rank that an earlier `Routes` of the same decisions has brought the piece to.
    """

    side: Side
    pieces: IntArray  # [R], see Decisions.piece
    path: IntArray  # [R, k + 1] ranks
    steps: IntArray  # [R, k]


@dataclass(frozen=True, eq=False)
class Decisions:
    """A planner's whole output for one phase.

    `owner[q_chunk, kv_chunk, q_head]` is the rank that computes a block; entries of masked blocks are ignored.
    Each unmasked block is therefore computed exactly once by construction.

    A KV piece that reaches a rank, is given up there and comes again later comes as another *copy*;
    `kv_copy[q_chunk, kv_chunk]` says which one a block reads, where there are several. At home all copies
    are the piece itself. `not_before[q_chunk, kv_chunk]` holds a block back until that compute step.
    """

    name: str
    problem: Problem
    owner: IntArray  # [num_chunks, num_chunks, q_head_groups]
    routes: tuple[Routes, ...]
    num_kv_copies: int = 1
    kv_copy: IntArray | None = None  # [num_chunks, num_chunks]
    not_before: IntArray | None = None  # [num_chunks, num_chunks]

    def num_copies(self, side: Side) -> int:
        return self.num_kv_copies if side == "kv" else 1

    def num_pieces(self, side: Side) -> int:
        """Pieces are numbered (copy * num_chunks + chunk) * head_groups + head."""
        return self.num_copies(side) * self.problem.num_chunks * self.problem.head_groups(side)


@dataclass(frozen=True, eq=False)
class Phase:
    """Decisions under one pass. Phases of a method run one after the other."""

    pass_: Pass
    decisions: Decisions


@dataclass(frozen=True, eq=False)
class Method:
    """What a planner makes: the phases of the forward pass, and those of the backward pass."""

    name: str
    forward: tuple[Phase, ...]
    backward: tuple[Phase, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def problem(self) -> Problem:
        return self.forward[0].decisions.problem

    def phases(self, direction: str) -> tuple[Phase, ...]:
        """`direction` is "forward" or "backward"."""
        return self.forward if direction == FORWARD.name else self.backward


def one_phase(decisions: Decisions, *notes: str) -> Method:
    """The usual method: the backward pass is derived from the forward pass's decisions."""
    forward, backward = Phase(FORWARD, decisions), Phase(BACKWARD, decisions)
    return Method(decisions.name, (forward,), (backward,), notes)


def owner_by_homes(problem: Problem, table: npt.ArrayLike) -> IntArray:
    """Owner table from `table[q_home, kv_home]`, the same for all chunks of a rank and all heads."""
    homes = np.asarray(table, dtype=np.int64)[problem.home[:, None], problem.home[None, :]]
    return np.repeat(homes[..., None], problem.q_head_groups, axis=2)


def shard_routes(
    problem: Problem,
    side: Side,
    rows: Iterable[tuple[int, Sequence[int], Sequence[int]]],
    *,
    heads: Sequence[int] | None = None,
    copy: int = 0,
) -> tuple[Routes, ...]:
    """Routes of whole shards: each row is (home rank, path, steps), all of the same length.

    `heads` restricts them to some head groups. Returns one `Routes`, or none when there are no rows or no hops.
    """
    listed = [row for row in rows if len(row[1]) > 1]
    if not listed:
        return ()
    home, path, steps = (np.asarray(column, dtype=np.int64) for column in zip(*listed, strict=True))
    return (routes_of_shards(problem, side, home, path, steps, heads=heads, copy=copy),)


def routes_of_shards(
    problem: Problem,
    side: Side,
    home: IntArray,
    path: IntArray,
    steps: IntArray,
    *,
    heads: Sequence[int] | None = None,
    copy: int = 0,
) -> Routes:
    """As `shard_routes`, from columns: home [R], path [R, k + 1], steps [R, k]."""
    groups = problem.head_groups(side)
    taken = np.arange(groups) if heads is None else np.asarray(heads)
    by_home = np.argsort(problem.home, kind="stable")
    num_chunks = np.bincount(problem.home, minlength=problem.cp_size)
    first = np.cumsum(num_chunks) - num_chunks
    counts = num_chunks[home]
    of_row = np.repeat(np.arange(len(home)), counts)
    within = np.arange(len(of_row)) - np.repeat(np.cumsum(counts) - counts, counts)
    chunks = by_home[first[home][of_row] + within]
    pieces = ((copy * problem.num_chunks + chunks[:, None]) * groups + taken).ravel()
    of_row = np.repeat(of_row, len(taken))
    return Routes(side, pieces, path[of_row], steps[of_row])
