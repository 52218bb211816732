"""A planner's decisions, lowered: the schedules of each phase of a method."""

from dataclasses import dataclass

from charm_megatron.lowering.decisions import Decisions, NamedMethod
from charm_megatron.lowering.lower import lower
from charm_megatron.lowering.program import rank_program
from charm_megatron.schedule.actions import Program
from charm_megatron.schedule.passes import Direction, Pass
from charm_megatron.schedule.schedule import PostOptions, Schedule


@dataclass(frozen=True, eq=False)
class LoweredSchedule(Schedule):
    """A schedule whose programs are made from its tables, anew at each call."""

    def program(self, rank: int) -> Program:
        return rank_program(self, rank)


def make_schedule(
    name: str, decisions: Decisions, pass_: Pass, options: PostOptions = PostOptions()
) -> Schedule:
    """Lowers `decisions` for one pass; the backward pass is the same decisions under another `Pass`."""
    hops, blocks = lower(decisions, pass_)
    return LoweredSchedule(name, decisions.problem, pass_, hops, blocks, options)


def make_schedules(
    named: NamedMethod, direction: Direction, options: PostOptions = PostOptions()
) -> tuple[Schedule, ...]:
    """The schedules of a method's phases in one direction, in the order in which they run."""
    return tuple(
        make_schedule(named.name, phase.decisions, phase.pass_, options)
        for phase in named.method.phases[direction]
    )
