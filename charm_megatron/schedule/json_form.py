"""The JSON form of a method's schedules: what other programs read, and what a user can write by hand.

    {"format": "charm-megatron schedule", "version": 2, "name": "ring",
     "problem": {"layout": "contiguous", "cp_size": 2, "seq_len": 64, "mask": "none", "domain_of": [0, 0],
                 "q_head_groups": 1, "kv_head_groups": 1, "chunk_parts": 1},
     "options": {"prefetch_depth": 1, "fuse": true},
     "phases": [{"pass": "forward", "programs": [["post 0.0 | send 1 kv0 | recv 1 kv1", ..], ..]}, ..]}

Programs hold actions in their text form, one list a rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from charm_megatron.errors import (
    MOST_QUOTED_CHARACTERS,
    ScheduleFault,
    ScheduleSyntaxError,
    nearest,
    quoted,
    shortened,
)
from charm_megatron.limits import (
    MOST_CHUNKS,
    MOST_HEADS,
    MOST_JSON_BYTES,
    MOST_NAME_CHARACTERS,
    MOST_RANKS,
    MOST_STEPS,
    MOST_TOKENS,
)
from charm_megatron.reading import STANDARD_INPUT, parse_json, path_text, read_text
from charm_megatron.schedule.passes import PASSES, Direction
from charm_megatron.schedule.problem import Problem
from charm_megatron.schedule.schedule import PostOptions, Schedule
from charm_megatron.schedule.text import parse_program
from charm_megatron.schedule.written import written_schedule
from charm_megatron.sharding import make_sharding, refine
from charm_megatron.topology import Domains
from charm_megatron.workload import parse_mask

FORMAT = "charm-megatron schedule"
VERSION = 2
MOST_PHASES = 16
"""Methods have two or three."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Problem(_Model):
    layout: str
    cp_size: int = Field(ge=1, le=MOST_RANKS)
    seq_len: int = Field(ge=1, le=MOST_TOKENS)
    mask: str
    domain_of: list[Annotated[int, Field(ge=0, lt=MOST_RANKS)]] = Field(max_length=MOST_RANKS)
    q_head_groups: int = Field(1, ge=1, le=MOST_HEADS)
    kv_head_groups: int = Field(1, ge=1, le=MOST_HEADS)
    chunk_parts: int = Field(1, ge=1, le=MOST_CHUNKS)

    def build(self) -> Problem:
        mask = parse_mask(self.mask)
        layout = make_sharding(self.layout, self.cp_size, self.seq_len, mask.documents)
        sharding = refine(layout, self.chunk_parts)
        return Problem(
            sharding, Domains(tuple(self.domain_of)), mask, self.q_head_groups, self.kv_head_groups
        )


class _Options(_Model):
    prefetch_depth: int = Field(1, ge=1, le=MOST_STEPS)
    fuse: bool = True

    def build(self) -> PostOptions:
        return PostOptions(self.prefetch_depth, self.fuse)


class _Phase(_Model):
    pass_: str = Field(alias="pass")
    programs: list[list[str]] = Field(max_length=MOST_RANKS)


class _File(_Model):
    format: str
    version: int
    name: str = Field(max_length=MOST_NAME_CHARACTERS)
    problem: _Problem
    options: _Options = _Options()
    phases: list[_Phase] = Field(min_length=1, max_length=MOST_PHASES)


@dataclass(frozen=True)
class ScheduleFile:
    """The schedules of one file: all phases of a method, or of one direction of it."""

    name: str
    problem: Problem
    schedules: tuple[Schedule, ...]

    def phases(self, direction: Direction) -> tuple[Schedule, ...]:
        """The schedules of one direction, in the order in which they run."""
        return tuple(schedule for schedule in self.schedules if schedule.pass_.direction == direction)


def to_json(name: str, schedules: Sequence[Schedule]) -> dict[str, Any]:
    """The JSON form of schedules of one problem."""
    problem, options = schedules[0].problem, schedules[0].options
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "problem": {
            "layout": problem.sharding.layout,
            "cp_size": problem.cp_size,
            "seq_len": problem.sharding.seq_len,
            "mask": str(problem.mask),
            "domain_of": list(problem.domains.domain_of),
            "q_head_groups": problem.q_head_groups,
            "kv_head_groups": problem.kv_head_groups,
            "chunk_parts": problem.sharding.parts,
        },
        "options": {"prefetch_depth": options.prefetch_depth, "fuse": options.fuse},
        "phases": [
            {
                "pass": schedule.pass_.name,
                "programs": [
                    [str(action) for action in schedule.program(rank)] for rank in range(schedule.cp_size)
                ],
            }
            for schedule in schedules
        ],
    }


def from_json(data: Mapping[str, Any], source: str) -> ScheduleFile:
    """Reads the JSON form; `source` names it in errors.

    Raises `ScheduleSyntaxError` for what is not that form, and what the parts of it raise.
    """
    if data.get("format") != FORMAT:
        said = f"its format is {quoted(data['format'])}" if "format" in data else "it has no key 'format'"
        raise ScheduleSyntaxError(
            f"{source} is no schedule: {said}, where `charm-megatron plan --json` writes {FORMAT!r}"
        )
    try:
        read = _File.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = shortened(".".join(map(str, first["loc"])) or "the file", MOST_QUOTED_CHARACTERS)
        raise ScheduleSyntaxError(f"{source}: {where}: {first['msg'].lower()}") from error
    if read.version != VERSION:
        raise ScheduleSyntaxError(
            f"{source} is {FORMAT!r} version {quoted(read.version)}, but version {VERSION} is read"
        )
    _require_complete(read, source)
    problem = read.problem.build()
    schedules = []
    for phase in read.phases:
        programs = [parse_program(lines) for lines in phase.programs]
        schedules.append(
            written_schedule(read.name, problem, PASSES[phase.pass_], programs, read.options.build())
        )
    return ScheduleFile(read.name, problem, tuple(schedules))


def _require_complete(read: _File, source: str) -> None:
    """What has to be right before tables are made: numbers of ranks and names of passes."""
    cp_size = read.problem.cp_size
    if len(read.problem.domain_of) != cp_size:
        raise ScheduleSyntaxError(
            f"{source}: problem.domain_of is for {len(read.problem.domain_of)} ranks, but cp_size is {cp_size}"
        )
    for phase in read.phases:
        if phase.pass_ not in PASSES:
            raise ScheduleSyntaxError(
                f"{source}: unknown pass {quoted(phase.pass_)}{nearest(phase.pass_, PASSES)}"
            )
        if len(phase.programs) != cp_size:
            raise ScheduleFault(f"{source}: {len(phase.programs)} programs for {cp_size} ranks")


def load_schedule(path: Path) -> ScheduleFile:
    """Reads a file of the JSON form, or standard input for `-`.

    Raises `ScheduleSyntaxError` when there is none or it is not JSON, or too large.
    """
    source = "standard input" if str(path) == STANDARD_INPUT else path_text(path)
    name = f"schedule {source}"
    data = parse_json(read_text(path, name, MOST_JSON_BYTES, ScheduleSyntaxError), name, ScheduleSyntaxError)
    if not isinstance(data, dict):
        raise ScheduleSyntaxError(f"{name} is not a JSON object but {type(data).__name__}")
    return from_json(data, source)
