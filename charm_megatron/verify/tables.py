"""Proves a schedule's tables by local facts, in time linear in their rows: for groups of a thousand ranks.

`check` runs all programs; this looks at hops and blocks only. That is enough, because programs follow from the
tables by one rule that does not look at the number of ranks (see `program` for why they cannot deadlock):

* every unmasked block is computed once, by a rank that both operands have reached in an earlier step;
* an operand reaches a rank at most once, never its home, and is sent on only after it arrived;
* a rank that adds to a result away from home sends it exactly once, after its last addition; a rank that adds
  nothing, and the home, send none. Steps rise along such a path, so it has no cycle and can end only at home,
  and what arrives there is everything.
"""

import numpy as np

from charm_megatron.errors import ScheduleFault
from charm_megatron.schedule.payload import SIDES, Payload, Side
from charm_megatron.schedule.piece import IntArray
from charm_megatron.schedule.problem import BoolArray
from charm_megatron.schedule.schedule import Schedule
from charm_megatron.schedule.tables import AT_HOME, NEVER


def check_tables(schedule: Schedule) -> None:
    """Raises `ScheduleFault`, naming rank, step and piece, where a fact does not hold."""
    _check_blocks(schedule)
    for side in SIDES:
        _Side(schedule, side).check()


def _check_blocks(schedule: Schedule) -> None:
    problem, blocks = schedule.problem, schedule.blocks
    shape = (problem.num_chunks, problem.num_chunks, problem.q_head_groups)
    times = np.zeros(shape, dtype=np.int64)
    np.add.at(times, (blocks.q, blocks.kv, blocks.head), 1)
    wrong = times != problem.unmasked[..., None]
    if wrong.any():
        q, kv, head = (int(index) for index in np.argwhere(wrong)[0])
        should = int(problem.unmasked[q, kv])
        raise ScheduleFault(
            f"{schedule.name}: block (q{q}, kv{kv}) of head group {head} is computed {times[q, kv, head]} times, "
            f"not {should}"
        )


class _Side:
    """The hops of one side; state arrays have one entry for each (piece, rank)."""

    def __init__(self, schedule: Schedule, side: Side):
        self.schedule, self.side, self.problem = schedule, side, schedule.problem
        self.numbering = self.problem.numbering(side)
        pieces_read = schedule.operand_pieces(side)
        largest = max(int(x.max(initial=0)) for x in (schedule.hops.piece, pieces_read))
        self.num_pieces = (self.numbering.copy_of(largest) + 1) * self.numbering.num_first
        self.num_states = self.num_pieces * self.problem.cp_size
        pieces = np.arange(self.num_pieces)
        self.home = self.problem.home[self.numbering.chunk(pieces)]
        self.at_home = self._index(pieces, self.home)
        self.readers = self._index(pieces_read, schedule.blocks.rank)
        self.compute_step = schedule.blocks.compute_step

    def _index(self, piece: IntArray, rank: IntArray) -> IntArray:
        return piece * self.problem.cp_size + rank

    def _rows(self, payload: Payload) -> BoolArray:
        rows: BoolArray = self.schedule.hops.payload == self.schedule.pass_.payloads.index(payload)
        return rows

    def check(self) -> None:
        self._check_operands()
        if self.schedule.pass_.up(self.side) is not None:
            self._check_results()

    def _check_operands(self) -> None:
        hops, rows = self.schedule.hops, self._rows(self.schedule.pass_.down(self.side))
        source, target = (
            self._index(hops.piece[rows], hops.src[rows]),
            self._index(hops.piece[rows], hops.dst[rows]),
        )
        times = np.bincount(target, minlength=self.num_states)
        times[self.at_home] += 1
        self._require(times <= 1, "reaches this rank twice")
        arrive = np.full(self.num_states, NEVER)
        arrive[self.at_home] = AT_HOME
        arrive[target] = hops.comm_step[rows]
        self._require_rows(arrive[source] < hops.comm_step[rows], source, "is sent before it has arrived")
        self._require_rows(
            arrive[self.readers] < self.compute_step, self.readers, "is read before it has arrived"
        )

    def _check_results(self) -> None:
        up = self.schedule.pass_.up(self.side)
        assert up is not None
        hops, rows = self.schedule.hops, self._rows(up)
        source, target = (
            self._own(hops.piece[rows], hops.src[rows]),
            self._own(hops.piece[rows], hops.dst[rows]),
        )
        readers = self._own(self.readers // self.problem.cp_size, self.readers % self.problem.cp_size)
        last = np.full(self.num_states, -1)
        np.maximum.at(last, readers, self.compute_step)
        np.maximum.at(last, target, hops.comm_step[rows])
        sent = np.bincount(source, minlength=self.num_states)
        away = np.ones(self.num_states, dtype=np.bool_)
        away[self.at_home] = False
        self._require(sent == ((last >= 0) & away), "has a partial result that is not sent home exactly once")
        self._require_rows(
            last[source] < hops.comm_step[rows], source, "has a partial result that leaves too early"
        )

    def _own(self, piece: IntArray, rank: IntArray) -> IntArray:
        """As `_index`, but at home all copies are one."""
        return self._index(np.where(self.home[piece] == rank, self.numbering.first(piece), piece), rank)

    def _require(self, holds: BoolArray, why: str) -> None:
        self._require_rows(holds, np.arange(len(holds)), why)

    def _require_rows(self, holds: BoolArray, states: IntArray, why: str) -> None:
        if not holds.all():
            piece, rank = divmod(int(states[int(np.argmin(holds))]), self.problem.cp_size)
            chunk, head = self.numbering.chunk(piece), self.numbering.head(piece)
            raise ScheduleFault(
                f"{self.schedule.name} {self.schedule.pass_.name}, rank {rank}: {self.side} piece of chunk {chunk}, "
                f"head group {head}, copy {self.numbering.copy_of(piece)} {why}"
            )
