"""What a planner decides: an owner for every block, and routes by which operands reach the owners.

A *block* is (query chunk, KV chunk, query head group). A *piece* is one chunk of one head group of one
side; it has one home. Everything else about a schedule is derived from these decisions by `lowering`.
Tables are numpy arrays, so that a group of a thousand ranks is planned in seconds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from charm_megatron.errors import PlanError
from charm_megatron.schedule.passes import Side
from charm_megatron.sharding import Sharding
from charm_megatron.topology import Domains

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
    causal: bool = True
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

    def num_pieces(self, side: Side) -> int:
        """Pieces are numbered chunk * head_groups + head."""
        return self.num_chunks * self.head_groups(side)

    def kv_head_of(self, q_head: IntArray) -> IntArray:
        """The KV head group that each query head group reads."""
        return q_head * self.kv_head_groups // self.q_head_groups

    @cached_property
    def home(self) -> IntArray:
        """Home rank of each chunk, [num_chunks]."""
        return np.asarray(self.sharding.home, dtype=np.int64)

    @cached_property
    def unmasked(self) -> BoolArray:
        """Which (query chunk, KV chunk) have anything to compute, [num_chunks, num_chunks]."""
        shape = (self.num_chunks, self.num_chunks)
        return np.tri(self.num_chunks, dtype=np.bool_) if self.causal else np.ones(shape, dtype=np.bool_)

    def is_diagonal(self, q_chunk: int, kv_chunk: int) -> bool:
        """Whether the block is cut by the causal mask, so that only its lower triangle counts."""
        return self.causal and q_chunk == kv_chunk


@dataclass(frozen=True, eq=False)
class Routes:
    """Routes of equal length. Row i: piece `pieces[i]` goes path[i, 0] -> path[i, 1] -> ...

    Hop j of a row is in flight *during* step `steps[i, j]`. A row starts at its piece's home, or at a
    rank that an earlier `Routes` of the same decisions has brought the piece to.
    """

    side: Side
    pieces: IntArray  # [R]
    path: IntArray  # [R, k + 1] ranks
    steps: IntArray  # [R, k]


@dataclass(frozen=True, eq=False)
class Decisions:
    """A planner's whole output.

    `owner[q_chunk, kv_chunk, q_head]` is the rank that computes a block; entries of masked blocks are
    ignored. Each unmasked block is therefore computed exactly once by construction.
    """

    name: str
    problem: Problem
    owner: IntArray  # [num_chunks, num_chunks, q_head_groups]
    routes: tuple[Routes, ...]


def owner_by_homes(problem: Problem, table: npt.ArrayLike) -> IntArray:
    """Owner table from `table[q_home, kv_home]`, the same for all chunks of a rank and all heads."""
    homes = np.asarray(table, dtype=np.int64)[problem.home[:, None], problem.home[None, :]]
    return np.repeat(homes[..., None], problem.q_head_groups, axis=2)


def shard_routes(
    problem: Problem, side: Side, rows: Iterable[tuple[int, Sequence[int], Sequence[int]]]
) -> tuple[Routes, ...]:
    """Routes of whole shards: each row is (home rank, path, steps), all of the same length.

    Returns one `Routes`, or none when there are no rows or no hops.
    """
    listed = [row for row in rows if len(row[1]) > 1]
    if not listed:
        return ()
    home, path, steps = (np.asarray(column, dtype=np.int64) for column in zip(*listed, strict=True))
    heads = problem.head_groups(side)
    chunk_rows, chunk_ids = np.nonzero(home[:, None] == problem.home[None, :])
    pieces = (chunk_ids[:, None] * heads + np.arange(heads)).ravel()
    of_row = np.repeat(chunk_rows, heads)
    return (Routes(side, pieces, path[of_row], steps[of_row]),)
