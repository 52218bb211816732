"""Programs -> hop and block tables: the inverse of `program`, for schedules that were written by hand."""

from collections.abc import Sequence

import numpy as np

from charm_megatron.errors import ScheduleFault
from charm_megatron.lowering.decisions import IntArray, Problem
from charm_megatron.lowering.lower import Blocks, Hops
from charm_megatron.schedule.actions import Attend, Piece, Post, Program
from charm_megatron.schedule.passes import Pass
from charm_megatron.schedule.schedule import Schedule


def written_schedule(
    name: str,
    problem: Problem,
    pass_: Pass,
    programs: Sequence[Program],
    *,
    depth: int = 1,
    fuse: bool = True,
) -> Schedule:
    """A schedule from its programs, one a rank. It is as right as they are: check it before running it.

    Raises `ScheduleFault` for programs that name payload of another pass, or chunks and ranks that do not exist.
    """
    if len(programs) != problem.cp_size:
        raise ScheduleFault(f"{name}: {len(programs)} programs for {problem.cp_size} ranks")
    hops: list[tuple[int, ...]] = []
    blocks: list[tuple[int, ...]] = []
    for rank, program in enumerate(programs):
        step = -1
        for action in program:
            match action:
                case Post(key, sends, _):
                    step = key.step
                    hops += [
                        (step, *_piece(name, problem, pass_, x), rank, message.peer)
                        for message in sends
                        for x in message.names
                    ]
                case Attend(q, kv):
                    for x in (*q, *kv):
                        _piece(name, problem, pass_, x)
                    blocks += [
                        (a.chunk, b.chunk, a.head, rank, max(step, 0), b.copy)
                        for a in q
                        for b in kv
                        if not (action.causal and b.chunk > a.chunk)
                    ]
                case _:
                    pass
    return Schedule(
        name,
        problem,
        pass_,
        Hops(*_columns(hops, 5)),
        Blocks(*_columns(blocks, 6)),
        depth,
        fuse,
        tuple(programs),
    )


def _piece(where: str, problem: Problem, pass_: Pass, name: Piece) -> tuple[int, int]:
    """(payload, piece) numbers of a name."""
    payloads = {payload.name: i for i, payload in enumerate(pass_.payloads)}
    if name.payload not in payloads:
        raise ScheduleFault(
            f"{where}: {name} is no payload of pass {pass_.name}, which has {', '.join(payloads)}"
        )
    groups = problem.head_groups(pass_.payloads[payloads[name.payload]].side)
    if name.chunk >= problem.num_chunks or name.head >= groups:
        raise ScheduleFault(
            f"{where}: there is no {name}; chunks go to {problem.num_chunks - 1}, head groups to {groups - 1}"
        )
    return payloads[name.payload], (name.copy * problem.num_chunks + name.chunk) * groups + name.head


def _columns(rows: list[tuple[int, ...]], width: int) -> IntArray:
    return np.asarray(sorted(rows), dtype=np.int64).reshape(-1, width).T.copy()
