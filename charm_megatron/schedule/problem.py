"""What a schedule solves: the blocks to be computed, and where their operands are.

A *block* is (query chunk, KV chunk, query head group).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
import numpy.typing as npt

from charm_megatron.errors import PlanError
from charm_megatron.schedule.payload import Payload, Side
from charm_megatron.schedule.piece import IntArray, Numbering, Piece
from charm_megatron.sharding import Sharding
from charm_megatron.topology import Domains
from charm_megatron.workload import CAUSAL, Band, Mask

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
        """Into how many groups the heads of a side are cut."""
        return self.q_head_groups if side == "q" else self.kv_head_groups

    def numbering(self, side: Side) -> Numbering:
        """How the pieces of one side are numbered in tables."""
        return Numbering(self.num_chunks, self.head_groups(side))

    @overload
    def kv_head_of(self, q_head: int) -> int: ...
    @overload
    def kv_head_of(self, q_head: IntArray) -> IntArray: ...
    def kv_head_of(self, q_head: int | IntArray) -> int | IntArray:
        """The KV head group that a query head group reads."""
        return q_head * self.kv_head_groups // self.q_head_groups

    def operand_pieces(
        self, side: Side, q_chunk: IntArray, kv_chunk: IntArray, q_head: IntArray, kv_copy: IntArray
    ) -> IntArray:
        """The number of the piece of one side that each block (q_chunk[i], kv_chunk[i], q_head[i]) reads."""
        if side == "q":
            return self.numbering(side).number(q_chunk, q_head)
        return self.numbering(side).number(kv_chunk, self.kv_head_of(q_head), kv_copy)

    def resident(self, piece: Piece, rank: int) -> Piece:
        """The name under which `rank` holds a piece: at home all copies of a piece are one."""
        at_home = piece.copy and piece.src is None and self.sharding.home[piece.chunk] == rank
        return piece._replace(copy=0) if at_home else piece

    def local_pieces(self, payload: Payload, rank: int) -> list[Piece]:
        """The pieces of a rank's own shard, in the order in which it lies in memory: by head group, then by chunk."""
        chunks = self.sharding.chunks_of(rank)
        return [
            Piece(payload.name, chunk, head)
            for head in range(self.head_groups(payload.side))
            for chunk in chunks
        ]

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

    @cached_property
    def has_bands(self) -> bool:
        """Whether any block is neither full, nor empty, nor the causal square of a chunk with itself."""
        lo, hi = self.bands
        is_full = (lo <= 1 - self.lengths[None, :]) & (hi >= self.lengths[:, None] - 1)
        is_causal = np.diag((lo.diagonal() == 0) & (hi.diagonal() >= self.lengths - 1))
        return bool((self.unmasked & ~is_full & ~is_causal).any())

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
