"""Programs -> hop and block tables: the inverse of `program`, for schedules that were written by hand."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from charm_megatron.errors import MOST_QUOTED_CHARACTERS, ScheduleFault, shortened
from charm_megatron.limits import MOST_BLOCKS
from charm_megatron.schedule.actions import Attend, Post, Program
from charm_megatron.schedule.passes import Pass
from charm_megatron.schedule.piece import IntArray, Piece
from charm_megatron.schedule.problem import Problem
from charm_megatron.schedule.schedule import PostOptions, Schedule
from charm_megatron.schedule.tables import Blocks, Hops


@dataclass(frozen=True, eq=False)
class WrittenSchedule(Schedule):
    """A schedule whose programs were written down; its tables follow from them."""

    programs: tuple[Program, ...]

    def program(self, rank: int) -> Program:
        return self.programs[rank]

    def _digested_beside_tables(self) -> bytes:
        return "\n".join(str(action) for program in self.programs for action in program).encode()


def written_schedule(
    name: str,
    problem: Problem,
    pass_: Pass,
    programs: Sequence[Program],
    options: PostOptions = PostOptions(),
) -> Schedule:
    """A schedule from its programs, one per rank. It is as right as they are: check it before running it.

    Raises `ScheduleFault` for programs that name payload of another pass, or chunks and ranks that do not exist.
    """
    where = shortened(name, MOST_QUOTED_CHARACTERS)
    if len(programs) != problem.cp_size:
        raise ScheduleFault(f"{where}: {len(programs)} programs for {problem.cp_size} ranks")
    hops: list[tuple[int, ...]] = []
    blocks: list[tuple[int, ...]] = []
    for rank, program in enumerate(programs):
        step = 0
        for action in program:
            match action:
                case Post(key, sends, _):
                    step = key.step
                    hops += [
                        (step, *_piece(where, problem, pass_, x), rank, message.peer)
                        for message in sends
                        for x in message.pieces
                    ]
                case Attend(q, kv):
                    for x in (*q, *kv):
                        _piece(where, problem, pass_, x)
                    if len(blocks) + len(q) * len(kv) > MOST_BLOCKS:
                        raise ScheduleFault(
                            f"{where}: rank {rank} computes the block after the {MOST_BLOCKS:,} that are read "
                            f"for one pass"
                        )
                    blocks += [
                        (a.chunk, b.chunk, a.head, rank, step, b.copy)
                        for a in q
                        for b in kv
                        if not (action.causal and b.chunk > a.chunk)
                    ]
                case _:
                    pass
    tables = Hops(*_columns(hops, 5)), Blocks(*_columns(blocks, 6))
    return WrittenSchedule(name, problem, pass_, *tables, options, tuple(programs))


def _piece(where: str, problem: Problem, pass_: Pass, piece: Piece) -> tuple[int, int]:
    """The numbers of a piece's payload and of the piece."""
    payloads = {payload.name: i for i, payload in enumerate(pass_.payloads)}
    if piece.payload not in payloads:
        raise ScheduleFault(
            f"{where}: {piece} is no payload of pass {pass_.name}, which has {', '.join(payloads)}"
        )
    number = payloads[piece.payload]
    numbering = problem.numbering(pass_.payloads[number].side)
    if piece.chunk >= numbering.num_chunks or piece.head >= numbering.head_groups:
        raise ScheduleFault(
            f"{where}: there is no {piece}; chunks go to {numbering.num_chunks - 1}, head groups to "
            f"{numbering.head_groups - 1}"
        )
    return number, numbering.number(piece.chunk, piece.head, piece.copy)


def _columns(rows: list[tuple[int, ...]], width: int) -> IntArray:
    return np.asarray(sorted(rows), dtype=np.int64).reshape(-1, width).T.copy()
