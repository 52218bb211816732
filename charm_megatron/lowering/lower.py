"""Decisions -> hop and block tables, by pure passes.

1. `cut_routes`: a route ends at its last reader, so masks need no code of their own.
2. `arrivals`, `time_blocks`: a block runs in the first compute step after both operands are there.
3. `return_hops`: each route closes into a cycle, and the result follows the data home. Mirroring the route
   instead would make the backward pass of a ring grow with the number of ranks.

Time is logical: during *step* t transfers are in flight while the blocks of *compute step* t are computed. Ranks may
skew freely; a step is no barrier.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from charm_megatron.errors import ScheduleFault
from charm_megatron.lowering.decisions import Decisions, Routes
from charm_megatron.schedule.passes import Pass
from charm_megatron.schedule.payload import SIDES, Side
from charm_megatron.schedule.piece import IntArray
from charm_megatron.schedule.problem import Problem
from charm_megatron.schedule.tables import AT_HOME, NEVER, Blocks, Hops


def lower(decisions: Decisions, pass_: Pass) -> tuple[Hops, Blocks]:
    """The tables of one pass. Raises `ScheduleFault` when the routes contradict each other."""
    problem = decisions.problem
    q, kv, head, rank, copy = block_columns(decisions)
    at = {side: _at(problem, problem.operand_pieces(side, q, kv, head, copy), rank) for side in SIDES}
    routes = cut_routes(decisions, at)
    arrive = arrivals(decisions, routes)
    compute_step = time_blocks(arrive, at)
    if decisions.not_before is not None:
        compute_step = np.maximum(compute_step, decisions.not_before[q, kv])
    hops = _operand_hops(routes, pass_)
    for side in SIDES:
        if pass_.up(side) is not None:
            hops += return_hops(
                problem, routes, side, _last_compute_step(decisions, side, at[side], compute_step), pass_
            )
    return _sorted_hops(hops), Blocks(q, kv, head, rank, compute_step, copy)


def block_columns(decisions: Decisions) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """(q chunk, KV chunk, q head, owner, copy of KV) of every unmasked block, in that order."""
    problem = decisions.problem
    chunks_q, chunks_kv = np.nonzero(problem.unmasked)
    heads = problem.q_head_groups
    q, kv = np.repeat(chunks_q, heads), np.repeat(chunks_kv, heads)
    head, rank = np.tile(np.arange(heads), len(chunks_q)), decisions.owner[chunks_q, chunks_kv].ravel()
    copy = np.zeros_like(q) if decisions.kv_copy is None else decisions.kv_copy[q, kv]
    copy = np.where(problem.home[kv] == rank, 0, copy)  # at home all copies are one
    return q, kv, head, rank, copy


@dataclass(frozen=True, eq=False)
class _Cut:
    """Routes of which row i keeps its first `kept[i]` hops."""

    routes: Routes
    kept: IntArray  # [R]

    @property
    def is_live(self) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """Which hops remain, [R, k]."""
        return np.arange(self.routes.steps.shape[1]) < self.kept[:, None]


def _at(problem: Problem, piece: IntArray, rank: IntArray) -> IntArray:
    """Index of (piece, rank) into flat state arrays."""
    return piece * problem.cp_size + rank


def _home_index(decisions: Decisions, side: Side) -> IntArray:
    problem, pieces = decisions.problem, np.arange(decisions.num_pieces(side))
    return _at(problem, pieces, problem.home[problem.numbering(side).chunk(pieces)])


def _state(decisions: Decisions, side: Side, value: int) -> IntArray:
    """One number for each (piece, rank)."""
    return np.full(decisions.num_pieces(side) * decisions.problem.cp_size, value, dtype=np.int64)


def cut_routes(decisions: Decisions, at: dict[Side, IntArray]) -> list[_Cut]:
    """Cuts each route after the last rank that reads its piece or from which a later route starts."""
    problem = decisions.problem
    needed = {side: _state(decisions, side, 0) > 0 for side in SIDES}
    for side in SIDES:
        needed[side][at[side]] = True
    out = []
    for routes in reversed(
        [routes for routes in decisions.routes if routes.steps.size]
    ):  # a later route starts where an earlier one has been
        need = needed[routes.side][_at(problem, routes.pieces[:, None], routes.path[:, 1:])]
        hops = need.shape[1]
        kept = np.where(need.any(axis=1), hops - need[:, ::-1].argmax(axis=1), 0)
        rows = kept > 0
        needed[routes.side][_at(problem, routes.pieces[rows], routes.path[rows, 0])] = True
        out.append(_Cut(routes, kept))
    return out[::-1]


def arrivals(decisions: Decisions, cuts: list[_Cut]) -> dict[Side, IntArray]:
    """The step in which each (piece, rank) arrives: `AT_HOME` at home, `NEVER` where the piece does not go."""
    problem = decisions.problem
    arrive = {side: _state(decisions, side, NEVER) for side in SIDES}
    for side in SIDES:
        arrive[side][_home_index(decisions, side)] = AT_HOME
    for cut in cuts:
        routes, live, state = cut.routes, cut.is_live, arrive[cut.routes.side]
        rows = cut.kept > 0
        root = state[_at(problem, routes.pieces[rows], routes.path[rows, 0])]
        _require(root < routes.steps[rows, 0], routes, rows, "leaves a rank before it has arrived there")
        later = (np.diff(routes.steps, axis=1) > 0) | ~live[:, 1:]
        _require(later.all(axis=1), routes, slice(None), "goes on in a step in which it is still arriving")
        target = _at(problem, routes.pieces[:, None], routes.path[:, 1:])[live]
        is_new = (state[target] == NEVER).all()
        state[target] = numbers = np.arange(len(target))  # of equal targets only the last remains
        if not is_new or (state[target] != numbers).any():
            raise ScheduleFault(f"a {routes.side} piece reaches a rank twice")
        state[target] = routes.steps[live]
    return arrive


def _require(holds: np.ndarray, routes: Routes, rows: np.ndarray | slice, why: str) -> None:
    if not holds.all():
        row = int(np.argmin(holds))
        piece, path = routes.pieces[rows][row], routes.path[rows][row]
        raise ScheduleFault(f"{routes.side} piece {piece} on path {path.tolist()} {why}")


def time_blocks(arrive: dict[Side, IntArray], at: dict[Side, IntArray]) -> IntArray:
    """The first compute step in which both operands of each block are at its owner."""
    last = np.maximum(arrive["q"][at["q"]], arrive["kv"][at["kv"]])
    if (last == NEVER).any():
        raise ScheduleFault(f"an operand of block row {int(np.argmax(last))} never reaches the block's owner")
    return last + 1


def _last_compute_step(decisions: Decisions, side: Side, at: IntArray, compute_step: IntArray) -> IntArray:
    """The last compute step in which each (piece, rank) adds to its partial result; -1 where it never does."""
    ready = _state(decisions, side, -1)
    np.maximum.at(ready, at, compute_step)
    return ready


def _operand_hops(cuts: list[_Cut], pass_: Pass) -> list[Hops]:
    out = []
    for cut in cuts:
        routes, live = cut.routes, cut.is_live
        pieces = np.broadcast_to(routes.pieces[:, None], live.shape)[live]
        payload = np.full(len(pieces), pass_.payloads.index(pass_.down(routes.side)))
        out.append(
            Hops(routes.steps[live], payload, pieces, routes.path[:, :-1][live], routes.path[:, 1:][live])
        )
    return out


def return_hops(problem: Problem, cuts: list[_Cut], side: Side, ready: IntArray, pass_: Pass) -> list[Hops]:
    """Results on their way home: along the rest of each route, then back to where it started.

    `ready[piece, rank]` is the compute step after which the rank's partial result is complete; it grows as partial
    results of others arrive. Routes are taken from last to first, so that stations are complete before they
    send on.
    """
    up = pass_.up(side)
    assert up is not None
    payload = pass_.payloads.index(up)
    out = []
    for cut in reversed(cuts):
        routes = cut.routes
        if routes.side != side:
            continue
        for i, following in pairwise([*range(1, routes.path.shape[1]), 0]):
            rows = cut.kept >= i
            src = routes.path[rows, i]
            dst = np.where(cut.kept[rows] == i, routes.path[rows, 0], routes.path[rows, following])
            pieces = routes.pieces[rows]
            holds = ready[_at(problem, pieces, src)] >= 0
            pieces, src, dst = pieces[holds], src[holds], dst[holds]
            step = ready[_at(problem, pieces, src)] + 1
            np.maximum.at(ready, _at(problem, pieces, dst), step)
            out.append(Hops(step, np.full(len(pieces), payload), pieces, src, dst))
    return out


def _sorted_hops(parts: list[Hops]) -> Hops:
    if not parts:
        empty = np.zeros(0, dtype=np.int64)
        return Hops(empty, empty, empty, empty, empty)
    columns = [
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("comm_step", "payload", "piece", "src", "dst")
    ]
    order = np.lexsort((columns[2], columns[4], columns[3], columns[1], columns[0]))
    return Hops(*(column[order] for column in columns))
