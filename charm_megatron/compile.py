"""Settings, domains and sizes -> the plan of an attention call: the one way from what is asked to what runs.

`compile_attention` knows the planners and schedule files, what stands in for a schedule that does not fit the domains,
and what has to be refused. The runtime, the command line, the benchmarks and the checks before a job all use it, so
that what is shown, costed and proved is what runs. It needs no torch.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from charm_megatron.config import CharmConfig
from charm_megatron.cost.memory import attention_memory
from charm_megatron.cost.report import Report, report
from charm_megatron.cost.wire import Traffic, WireFormat, make_wire_format, traffic
from charm_megatron.errors import PlanError, shortened
from charm_megatron.lowering.decisions import Method, NamedMethod
from charm_megatron.lowering.place import plan_storage
from charm_megatron.lowering.schedules import make_schedules
from charm_megatron.lowering.storage import Storage
from charm_megatron.planner import cut_problem, plan
from charm_megatron.schedule.actions import Program
from charm_megatron.schedule.json_form import load_schedule
from charm_megatron.schedule.passes import DIRECTIONS, Direction, Pass
from charm_megatron.schedule.problem import Problem
from charm_megatron.schedule.schedule import PostOptions, Schedule
from charm_megatron.schedule.text import format_schedule, schedule_header
from charm_megatron.sharding import make_sharding
from charm_megatron.topology import Domains
from charm_megatron.verify.programs import check_schedule
from charm_megatron.workload import Workload

SCHEDULE_FILE_SUFFIX = ".json"
MOST_RANKS_COUNTED = 8
"""Whose buffers decide whether KV is kept: to count those of all takes longer than to plan."""
MOST_LISTED_CHARACTERS = 30
"""Of domains and masks in messages that name two of each."""


@dataclass(frozen=True, eq=False)
class RankProgram:
    """One phase as one rank runs it: its actions, and where every piece lies meanwhile."""

    schedule_name: str
    pass_: Pass
    program: Program
    storage: Storage


@dataclass(frozen=True, eq=False)
class Plan:
    """Both passes of one attention call, for all ranks of a group.

    `forward` and `backward` are the phases of each, in the order in which they run; `reason` says why this schedule;
    `notes` are what its planner has to say of it.
    """

    forward: tuple[Schedule, ...]
    backward: tuple[Schedule, ...]
    wire: WireFormat
    reason: str
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The schedule's name."""
        return self.forward[0].name

    @property
    def problem(self) -> Problem:
        return self.wire.problem

    @property
    def workload(self) -> Workload:
        return self.wire.workload

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """The phases of both passes."""
        return *self.forward, *self.backward

    def phases(self, direction: Direction) -> tuple[Schedule, ...]:
        """The phases of one direction."""
        return {Direction.FORWARD: self.forward, Direction.BACKWARD: self.backward}[direction]

    @property
    def has_block_results(self) -> bool:
        """Whether every block brings a result of its own, as all do but those of ring self-attention's first round."""
        return all(schedule.pass_.results for schedule in self.schedules)

    def rank_programs(self, direction: Direction, rank: int) -> tuple[RankProgram, ...]:
        """What one rank runs in one direction."""
        return tuple(rank_program(schedule, rank, self.wire) for schedule in self.phases(direction))

    def traffic(self, direction: Direction) -> Traffic:
        """What each rank sends in one direction."""
        return traffic(*self.phases(direction), wire=self.wire)

    def report(self, direction: Direction) -> Report:
        """What each rank computes and sends in one direction."""
        return report(self.phases(direction), self.wire)

    @cached_property
    def digest(self) -> str:
        """Equal on two ranks exactly when they will send each other what the other expects."""
        head = (*(schedule.digest for schedule in self.schedules), self.wire)
        return hashlib.sha256(repr(head).encode()).hexdigest()

    def __str__(self) -> str:
        """One line, for messages."""
        return f"{schedule_header(self.forward[0])}, {self.workload}"

    @property
    def text(self) -> str:
        """All phases in the text form of schedules."""
        return "\n".join(format_schedule(schedule) for schedule in self.schedules)


def rank_program(schedule: Schedule, rank: int, wire: WireFormat) -> RankProgram:
    """What one rank runs of one phase."""
    program = schedule.program(rank)
    storage = plan_storage(program, schedule.pass_, schedule.problem, rank, wire.wide(schedule.pass_))
    return RankProgram(schedule.name, schedule.pass_, program, storage)


def compile_attention(config: CharmConfig, domains: Domains, workload: Workload, layout: str) -> Plan:
    """What `config` asks for, for these ranks and sizes.

    `config.schedule` is a planner's name, or the path of a file that `charm-megatron plan --json` or a person wrote.
    Raises `PlanError` or `WorkloadError` for what cannot be, saying what would work, `ScheduleSyntaxError` for a file
    that cannot be read, and `ScheduleFault` for one whose schedule is wrong.
    """
    if is_schedule_file(config.schedule):
        schedules = _written(Path(config.schedule), domains, workload, layout)
        return _plan(config, workload, schedules, "as written")
    name, reason = _name_for(config.schedule, domains)
    if name == "charm" and config.keep_kv_mib:
        kept = _lowered(
            config, NamedMethod(name, _planned("charm_keep_kv", domains, workload, layout)), workload
        )
        needed_mib = attention_memory(kept.schedules, kept.wire, MOST_RANKS_COUNTED).pool_bytes / 2**20
        if needed_mib <= config.keep_kv_mib:
            return replace(kept, reason=f"{reason}; KV is kept, in {needed_mib:.1f} MiB of buffers")
        reason += f"; KV is not kept, which would take {needed_mib:.1f} MiB of buffers"
    named = NamedMethod(name, _planned(name, domains, workload, layout))
    return replace(_lowered(config, named, workload), reason=reason)


def _lowered(config: CharmConfig, named: NamedMethod, workload: Workload) -> Plan:
    """What a planner has made, as a plan without a reason."""
    options = PostOptions(config.prefetch_depth, config.fuse)
    forward, backward = (make_schedules(named, direction, options) for direction in DIRECTIONS)
    return _plan(config, workload, (forward, backward), "", named.method.notes)


def _plan(
    config: CharmConfig, workload: Workload, schedules: "Passes", reason: str, notes: tuple[str, ...] = ()
) -> Plan:
    forward, backward = schedules
    wire = make_wire_format(
        workload,
        forward[0].problem,
        out_return_dtype=config.out_return_dtype,
        grad_return_dtype=config.grad_return_dtype,
    )
    return Plan(forward, backward, wire, reason, notes)


def is_schedule_file(schedule: str) -> bool:
    """Whether a schedule is named by the path of a file rather than by a planner's name."""
    return schedule.endswith(SCHEDULE_FILE_SUFFIX)


def _planned(name: str, domains: Domains, workload: Workload, layout: str) -> Method:
    sharding = make_sharding(layout, domains.cp_size, workload.seq_len, workload.mask.documents)
    heads, kv_heads = workload.num_heads, workload.num_kv_heads
    problem = cut_problem(name, sharding, domains, workload.mask, num_heads=heads, num_kv_heads=kv_heads)
    return plan(name, problem).method


Passes = tuple[tuple[Schedule, ...], tuple[Schedule, ...]]


def _written(path: Path, domains: Domains, workload: Workload, layout: str) -> Passes:
    sharding = make_sharding(layout, domains.cp_size, workload.seq_len, workload.mask.documents)
    problem = Problem(sharding, domains, workload.mask)
    loaded = load_schedule(path)
    theirs = loaded.problem
    wanted = (problem.sharding.runs_by_rank, problem.domains, problem.mask)
    if (theirs.sharding.runs_by_rank, theirs.domains, theirs.mask) != wanted:
        raise PlanError(
            f"schedule {path} is for {_problem_text(theirs)}, but this group has {_problem_text(problem)}"
        )
    for direction in DIRECTIONS:
        if not loaded.phases(direction):
            raise PlanError(f"schedule {path} has no {direction} pass; write both with plan --json")
    for schedule in loaded.schedules:
        check_schedule(schedule)
    forward, backward = (loaded.phases(direction) for direction in DIRECTIONS)
    return forward, backward


def _problem_text(problem: Problem) -> str:
    sharding = problem.sharding
    return (
        f"{problem.cp_size} ranks in domains [{shortened(problem.domains, MOST_LISTED_CHARACTERS)}], "
        f"{sharding.seq_len} tokens in {sharding.layout} layout, mask {shortened(problem.mask, MOST_LISTED_CHARACTERS)}"
    )


def _name_for(name: str, domains: Domains) -> tuple[str, str]:
    """The planner to use and why: charm cannot use domains of different sizes, as found on real hosts."""
    if name == "charm" and not domains.are_even:
        return "rm_plus", "in place of charm, because the domains have different sizes"
    return name, "as set"
