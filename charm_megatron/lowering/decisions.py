"""What a planner decides: an owner for every block, and routes by which operands reach the owners.

A *block* is (query chunk, KV chunk, query head group). A *piece* is one chunk of one head group of one
side; it has one home. Everything else about a schedule is derived from these decisions by `lower`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from charm_megatron.schedule.passes import BACKWARD, FORWARD, Direction, Pass
from charm_megatron.schedule.payload import Side
from charm_megatron.schedule.piece import IntArray
from charm_megatron.schedule.problem import Problem


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

    problem: Problem
    owner: IntArray  # [num_chunks, num_chunks, q_head_groups]
    routes: tuple[Routes, ...]
    num_kv_copies: int = 1
    kv_copy: IntArray | None = None  # [num_chunks, num_chunks]
    not_before: IntArray | None = None  # [num_chunks, num_chunks]

    def num_pieces(self, side: Side) -> int:
        """How many numbers the pieces of a side have, see `piece.Numbering`."""
        copies = {"q": 1, "kv": self.num_kv_copies}[side]
        return copies * self.problem.numbering(side).num_first


@dataclass(frozen=True, eq=False)
class Phase:
    """Decisions under one pass. Phases of a method run one after the other."""

    pass_: Pass
    decisions: Decisions


@dataclass(frozen=True, eq=False)
class Method:
    """What a planner makes: the phases of each direction, in the order in which they run.

    `notes` are sentences for people.
    """

    phases: Mapping[Direction, tuple[Phase, ...]]
    notes: tuple[str, ...] = ()

    @property
    def problem(self) -> Problem:
        return self.phases[Direction.FORWARD][0].decisions.problem


@dataclass(frozen=True, eq=False)
class NamedMethod:
    """A method under the name of the planner that made it."""

    name: str
    method: Method


def method(forward: Sequence[Phase], backward: Sequence[Phase], *notes: str) -> Method:
    """A method of several phases, or one whose backward pass is not derived from its forward pass."""
    phases = {Direction.FORWARD: tuple(forward), Direction.BACKWARD: tuple(backward)}
    return Method(MappingProxyType(phases), notes)


def one_phase(decisions: Decisions, *notes: str) -> Method:
    """The usual method: the backward pass is derived from the forward pass's decisions."""
    return method([Phase(FORWARD, decisions)], [Phase(BACKWARD, decisions)], *notes)


def owner_by_homes(problem: Problem, table: npt.ArrayLike) -> IntArray:
    """Owner table from `table[q_home, kv_home]`, the same for all chunks of a rank and all heads."""
    homes = np.asarray(table, dtype=np.int64)[problem.home[:, None], problem.home[None, :]]
    return np.repeat(homes[..., None], problem.q_head_groups, axis=2)


def chunk_routes(
    problem: Problem,
    side: Side,
    chunks: npt.ArrayLike,
    path: npt.ArrayLike,
    steps: npt.ArrayLike,
    *,
    heads: Sequence[int] | None = None,
    copy: int = 0,
) -> Routes:
    """Routes of single chunks: row i takes chunks[i] along path[i], [R, k + 1], in steps[i], [R, k] or [k].

    `heads` restricts them to some head groups; `copy` says which copy of the KV pieces travels.
    """
    chunk, (ranks, times) = np.asarray(chunks, dtype=np.int64), _hops(path, steps)
    groups = problem.head_groups(side)
    taken = np.arange(groups) if heads is None else np.asarray(heads, dtype=np.int64)
    pieces = problem.numbering(side).number(chunk[:, None], taken, copy).ravel()
    return Routes(side, pieces, np.repeat(ranks, len(taken), axis=0), np.repeat(times, len(taken), axis=0))


def shard_routes(
    problem: Problem,
    side: Side,
    path: npt.ArrayLike,
    steps: npt.ArrayLike,
    *,
    home: npt.ArrayLike | None = None,
    heads: Sequence[int] | None = None,
    copy: int = 0,
) -> Routes:
    """Routes of whole shards, as `chunk_routes`: row i takes all chunks of the rank home[i], or else path[i, 0]."""
    ranks, times = _hops(path, steps)
    homes = ranks[:, 0] if home is None else np.asarray(home, dtype=np.int64)
    by_home = np.argsort(problem.home, kind="stable")
    num_chunks = np.bincount(problem.home, minlength=problem.cp_size)
    first = np.cumsum(num_chunks) - num_chunks
    counts = num_chunks[homes]
    row = np.repeat(np.arange(len(homes)), counts)
    within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    chunks = by_home[first[homes][row] + within]
    return chunk_routes(problem, side, chunks, ranks[row], times[row], heads=heads, copy=copy)


def _hops(path: npt.ArrayLike, steps: npt.ArrayLike) -> tuple[IntArray, IntArray]:
    """Paths [R, k + 1] and their steps [R, k]; no rows are no hops."""
    ranks = np.asarray(path, dtype=np.int64)
    if not len(ranks):
        return np.zeros((0, 1), dtype=np.int64), np.zeros((0, 0), dtype=np.int64)
    times = np.broadcast_to(np.asarray(steps, dtype=np.int64), (len(ranks), ranks.shape[1] - 1))
    return ranks, times
