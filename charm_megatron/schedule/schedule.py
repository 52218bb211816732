"""A schedule: who sends what to whom, who computes what, and the program of every rank."""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import cached_property

from charm_megatron.schedule.actions import Program
from charm_megatron.schedule.passes import Pass
from charm_megatron.schedule.payload import Side
from charm_megatron.schedule.piece import IntArray
from charm_megatron.schedule.problem import Problem
from charm_megatron.schedule.tables import Blocks, Hops


@dataclass(frozen=True)
class PostOptions:
    """How transfers are posted.

    `prefetch_depth`: how many steps a transfer may start ahead of the computation that needs it.
    `fuse` posts the results of a step as one group and its operands as another; otherwise each lane (payload and link
    class) is a group of its own.
    """

    prefetch_depth: int = 1
    fuse: bool = True


@dataclass(frozen=True, eq=False)
class Schedule(ABC):
    """Who sends what to whom in which comm step, and who computes what in which compute step, for one pass."""

    name: str
    problem: Problem
    pass_: Pass
    hops: Hops
    blocks: Blocks
    options: PostOptions

    @abstractmethod
    def program(self, rank: int) -> Program:
        """The actions of one rank, in order."""

    @property
    def cp_size(self) -> int:
        return self.problem.cp_size

    @property
    def num_comm_steps(self) -> int:
        """Steps in which anything is in flight."""
        return int(self.hops.comm_step.max(initial=-1)) + 1

    @property
    def num_compute_steps(self) -> int:
        """Steps in which anything is computed."""
        return int(self.blocks.compute_step.max(initial=-1)) + 1

    def operand_pieces(self, side: Side) -> IntArray:
        """The number of the piece of one side that each row of `blocks` reads."""
        blocks = self.blocks
        return self.problem.operand_pieces(side, blocks.q, blocks.kv, blocks.head, blocks.kv_copy)

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
            self.options.prefetch_depth,
            self.options.fuse,
        )
        digest = hashlib.sha256(repr(head).encode())
        for table in (self.hops, self.blocks):
            for column in fields(table):
                digest.update(getattr(table, column.name).tobytes())
        digest.update(self._digested_beside_tables())
        return digest.hexdigest()

    def _digested_beside_tables(self) -> bytes:
        """What two schedules with equal tables can still differ in."""
        return b""
