"""A schedule: decisions lowered for one pass, with a program for every rank."""

import hashlib
from dataclasses import dataclass, fields
from functools import cached_property

from charm_megatron.lowering.decisions import Decisions, Method, Problem
from charm_megatron.lowering.lower import Blocks, Hops, lower
from charm_megatron.lowering.program import rank_program
from charm_megatron.schedule.actions import Program
from charm_megatron.schedule.passes import Pass


@dataclass(frozen=True, eq=False)
class Schedule:
    """Who sends what to whom in which step, and who computes what in which compute step.

    `depth` is how many steps a transfer may start ahead of the compute step that it is planned for, plus one.
    `fuse` posts the results of a step as one group and its operands as another; otherwise each lane (payload and
    link class) is a group of its own, which needs a transport whose lanes progress independently.

    `written` are programs that were read from a file rather than made from the tables.
    """

    name: str
    problem: Problem
    pass_: Pass
    hops: Hops
    blocks: Blocks
    depth: int = 1
    fuse: bool = True
    written: tuple[Program, ...] | None = None

    @property
    def cp_size(self) -> int:
        return self.problem.cp_size

    @property
    def num_comm_steps(self) -> int:
        """Steps in which anything is in flight."""
        return int(self.hops.comm_step.max(initial=-1)) + 1

    @property
    def num_compute_steps(self) -> int:
        """Compute steps in which anything is computed."""
        return int(self.blocks.compute_step.max(initial=-1)) + 1

    def program(self, rank: int) -> Program:
        """The actions of one rank. Made anew at each call."""
        return rank_program(self, rank) if self.written is None else self.written[rank]

    @cached_property
    def digest(self) -> str:
        """Equal on two ranks exactly when they hold the same schedule."""
        problem = self.problem
        head = (
            self.name,
            self.pass_.name,
            problem.sharding,
            problem.domains,
            problem.mask,
            problem.q_head_groups,
            problem.kv_head_groups,
            self.depth,
            self.fuse,
        )
        digest = hashlib.sha256(repr(head).encode())
        for table in (self.hops, self.blocks):
            for column in fields(table):
                digest.update(getattr(table, column.name).tobytes())
        if self.written is not None:
            digest.update("\n".join(str(action) for program in self.written for action in program).encode())
        return digest.hexdigest()


def make_schedule(decisions: Decisions, pass_: Pass, *, depth: int = 1, fuse: bool = True) -> Schedule:
    """Lowers `decisions` for one pass; the backward pass is the same decisions under another `Pass`."""
    hops, blocks = lower(decisions, pass_)
    return Schedule(decisions.name, decisions.problem, pass_, hops, blocks, depth, fuse)


def make_schedules(
    method: Method, direction: str, *, depth: int = 1, fuse: bool = True
) -> tuple[Schedule, ...]:
    """The schedules of a method's phases, "forward" or "backward", in the order in which they run."""
    return tuple(
        make_schedule(phase.decisions, phase.pass_, depth=depth, fuse=fuse)
        for phase in method.phases(direction)
    )
