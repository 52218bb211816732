"""The JSON form of a method's schedules: what other programs read, and what a user can write by hand.

    {"format": "charm-megatron schedule", "version": 2, "name": "ring",
     "problem": {"layout": "contiguous", "cp_size": 2, "seq_len": 64, "mask": "none", "domain_of": [0, 0],
                 "q_head_groups": 1, "kv_head_groups": 1, "chunk_parts": 1},
     "options": {"prefetch_depth": 1, "fuse": true},
     "phases": [{"pass": "forward", "programs": [["post 0.0 | send 1 kv0 | recv 1 kv1", ..], ..]}, ..]}

Programs hold actions in their text form, one list a rank.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from charm_megatron.errors import ScheduleSyntaxError, nearest
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


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Problem(_Model):
    layout: str
    cp_size: int = Field(ge=1)
    seq_len: int = Field(ge=1)
    mask: str
    domain_of: list[int]
    q_head_groups: int = Field(1, ge=1)
    kv_head_groups: int = Field(1, ge=1)
    chunk_parts: int = Field(1, ge=1)

    def build(self) -> Problem:
        mask = parse_mask(self.mask)
        layout = make_sharding(self.layout, self.cp_size, self.seq_len, mask.documents)
        sharding = refine(layout, self.chunk_parts)
        return Problem(
            sharding, Domains(tuple(self.domain_of)), mask, self.q_head_groups, self.kv_head_groups
        )


class _Options(_Model):
    prefetch_depth: int = Field(1, ge=1)
    fuse: bool = True

    def build(self) -> PostOptions:
        return PostOptions(self.prefetch_depth, self.fuse)


class _Phase(_Model):
    pass_: str = Field(alias="pass")
    programs: list[list[str]]


class _File(_Model):
    format: str
    version: int
    name: str
    problem: _Problem
    options: _Options = _Options()
    phases: list[_Phase] = Field(min_length=1)


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
    try:
        read = _File.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ScheduleSyntaxError(f"{source}: {where}: {first['msg'].lower()}") from error
    if (read.format, read.version) != (FORMAT, VERSION):
        raise ScheduleSyntaxError(
            f"{source} is {read.format!r} version {read.version}, but {FORMAT!r} version {VERSION} is read"
        )
    problem = read.problem.build()
    schedules = []
    for phase in read.phases:
        if phase.pass_ not in PASSES:
            raise ScheduleSyntaxError(f"{source}: unknown pass {phase.pass_!r}{nearest(phase.pass_, PASSES)}")
        programs = [parse_program(lines) for lines in phase.programs]
        schedules.append(
            written_schedule(read.name, problem, PASSES[phase.pass_], programs, read.options.build())
        )
    return ScheduleFile(read.name, problem, tuple(schedules))


def load_schedule(path: Path) -> ScheduleFile:
    """Reads a file of the JSON form. Raises `ScheduleSyntaxError` when there is none or it is not JSON."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScheduleSyntaxError(f"cannot read schedule {path}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ScheduleSyntaxError(f"schedule {path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ScheduleSyntaxError(f"schedule {path} is not a JSON object but {type(data).__name__}")
    return from_json(data, str(path))
