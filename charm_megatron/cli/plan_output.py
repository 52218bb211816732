"""What `charm-megatron plan` shows and writes once its options are read."""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from charm_megatron.cli.plan_request import PlanRequest, PlanSettings
from charm_megatron.cli.schedule_tables import (
    ComparedSchedule,
    compare_table,
    facts,
    grid_tables,
    rank_table,
)
from charm_megatron.compile import Plan
from charm_megatron.cost.buffers import Buffers, peak_buffers
from charm_megatron.cost.memory import spread_ranks
from charm_megatron.cost.model import CostModel, Link
from charm_megatron.cost.spans import Timeline
from charm_megatron.cost.timeline import evaluate
from charm_megatron.errors import InvalidInput
from charm_megatron.files import require_writable, write_atomically
from charm_megatron.schedule.json_form import to_json
from charm_megatron.schedule.passes import Direction
from charm_megatron.schedule.queues import Queues
from charm_megatron.show.draw import PICTURE_FORMATS, draw_rank, draw_timelines, one_after_another
from charm_megatron.show.perfetto import chrome_trace

SHOWN_RANKS, SHOWN_STEPS = 8, 40


@dataclass(frozen=True)
class ModelRates:
    """The rates behind times."""

    flops_per_s: float
    inside_bytes_per_s: float
    across_bytes_per_s: float
    latency_s: float
    communicators: int = 0
    """Of NCCL; none: each transfer goes by itself."""

    def cost_model(self, *, is_shared: bool = True) -> CostModel:
        """Raises a kind of `InvalidInput` for rates that are not positive."""
        if not 0 < self.flops_per_s < math.inf:
            raise InvalidInput(f"--flops-per-s must be positive and finite, but is {self.flops_per_s:g}")
        inside = Link(self.inside_bytes_per_s, self.latency_s)
        return CostModel(self.flops_per_s, inside, Link(self.across_bytes_per_s, self.latency_s), is_shared)

    def __str__(self) -> str:
        latency = f", latency {self.latency_s * 1e6:g} us" if self.latency_s else ""
        return (
            f"{self.flops_per_s / 1e12:g} TFLOP/s, {self.inside_bytes_per_s / 1e9:g} GB/s inside, "
            f"{self.across_bytes_per_s / 1e9:g} GB/s across{latency}{self._nccl}"
        )

    @property
    def _nccl(self) -> str:
        if not self.communicators:
            return ""
        return f", {self.communicators} NCCL communicator{'s' if self.communicators > 1 else ''}"


@dataclass(frozen=True)
class PlanOutput:
    """What is to be shown and written, of which schedules."""

    names: tuple[str, ...]
    is_comparison: bool
    directions: tuple[Direction, ...]
    as_json: bool
    picture: Path | None
    only_rank: int | None
    trace: Path | None
    all_ranks: bool
    own_links: bool
    rates: ModelRates


@dataclass(frozen=True)
class NamedPlan:
    """The plan of one schedule, under the name by which the user asked for it."""

    name: str
    plan: Plan

    def timeline(self, direction: Direction, rates: ModelRates, *, is_shared: bool = True) -> Timeline:
        """`is_shared`: transfers of a rank wait for each other at its links."""
        phases, wire = self.plan.phases(direction), self.plan.wire
        cost = rates.cost_model(is_shared=is_shared)
        queues = Queues(rates.communicators) if rates.communicators else None
        return one_after_another([evaluate(phase, wire, cost, queues) for phase in phases])

    def buffers(self, direction: Direction, rank: int) -> Buffers:
        total = Buffers()
        for phase in self.plan.phases(direction):
            total |= peak_buffers(phase, self.plan.wire, rank)
        return total


def show_plans(request: PlanRequest, output: PlanOutput) -> None:
    """Plans, writes what is to be written, then prints."""
    if output.as_json and output.is_comparison:
        raise InvalidInput("--json writes one schedule; name it with --schedule in place of --compare")
    output.rates.cost_model()
    settings = request.complete(output.names)
    _check_files(settings, output)
    plans = [NamedPlan(name, settings.plan(name)) for name in output.names]
    _write_files(plans, settings, output)
    if output.as_json:
        listed = [phase for direction in output.directions for phase in plans[0].plan.phases(direction)]
        json.dump(to_json(plans[0].plan.name, listed), sys.stdout, indent=1)
        sys.stdout.write("\n")
        return
    console = Console(highlight=False, emoji=False, soft_wrap=False)
    for direction in output.directions:
        if output.is_comparison:
            _print_comparison(console, plans, direction, settings, output.rates)
        else:
            _print_schedule(console, plans[0], direction, settings, output.all_ranks)


# ---------------------------------------------------------------------- on the terminal


def _print_schedule(
    console: Console, planned: NamedPlan, direction: Direction, settings: PlanSettings, all_ranks: bool
) -> None:
    cp_size = settings.cp_size
    shown = range(cp_size if all_ranks else min(cp_size, SHOWN_RANKS))
    console.rule(f"[bold]{planned.name} {direction}[/]")
    _print_substitute(console, planned)
    console.print(f"{settings}\n", markup=False)
    for phase in planned.plan.phases(direction):
        if len(planned.plan.phases(direction)) > 1:
            console.print(f"pass {phase.pass_.name}")
        max_steps = None if all_ranks else SHOWN_STEPS
        for part in grid_tables(phase, shown, max_steps, console.width):
            console.print(part)
    numbers = planned.plan.report(direction)
    buffers = {rank: planned.buffers(direction, rank) for rank in sorted({*shown, *spread_ranks(cp_size)})}
    console.print(rank_table(numbers, buffers, settings.domains, shown))
    for line in (*facts(numbers, buffers, cp_size), *planned.plan.notes):
        console.print(line, markup=False)
    console.print()


def _print_substitute(console: Console, planned: NamedPlan) -> None:
    """Says what is shown, where that is not the schedule of the name that was asked for."""
    if planned.plan.name != planned.name:
        console.print(
            f"{planned.name}: {planned.plan.name} {planned.plan.reason}", markup=False, soft_wrap=True
        )


def _print_comparison(
    console: Console,
    plans: list[NamedPlan],
    direction: Direction,
    settings: PlanSettings,
    rates: ModelRates,
) -> None:
    rows = [
        ComparedSchedule(
            name=one.name,
            report=one.plan.report(direction),
            buffers=[one.buffers(direction, rank) for rank in spread_ranks(settings.cp_size)],
            shared=one.timeline(direction, rates),
            own=one.timeline(direction, rates, is_shared=False),
        )
        for one in plans
    ]
    console.rule(f"[bold]{direction}[/]")
    for one in plans:
        _print_substitute(console, one)
    console.print(f"{settings}\nmodel: {rates}\n", markup=False)
    console.print(compare_table(rows))
    console.print()


# ---------------------------------------------------------------------- files


def _check_files(settings: PlanSettings, output: PlanOutput) -> None:
    if output.picture is not None and output.picture.suffix not in PICTURE_FORMATS:
        raise InvalidInput(
            f"cannot draw {output.picture}: names of pictures end in {', '.join(PICTURE_FORMATS)}"
        )
    if output.trace is not None and output.is_comparison:
        raise InvalidInput("--perfetto writes one schedule; name it with --schedule in place of --compare")
    if output.only_rank is not None and output.picture is None:
        raise InvalidInput("--rank says what to draw; it needs --svg FILE")
    if output.only_rank is not None and not 0 <= output.only_rank < settings.cp_size:
        raise InvalidInput(f"--rank must be 0 to {settings.cp_size - 1}, but is {output.only_rank}")
    require_writable(output.picture, output.trace)


def _write_files(plans: list[NamedPlan], settings: PlanSettings, output: PlanOutput) -> None:
    if output.picture is None and output.trace is None:
        return
    direction = output.directions[0]
    timelines = [one.timeline(direction, output.rates, is_shared=not output.own_links) for one in plans]
    if output.picture is not None:
        links = ", a link for each transfer" if output.own_links else ""
        title = f"{direction}: {settings}\nmodel: {output.rates}{links}"
        names = [(one.name, timeline) for one, timeline in zip(plans, timelines, strict=True)]
        phases = [one.plan.phases(direction) for one in plans]
        domains, rank = settings.domains, output.only_rank
        _write(
            output.picture,
            lambda path: (
                draw_timelines(names, domains, path, title=title, phases=phases)
                if rank is None
                else draw_rank(names, rank, path, title=title, phases=phases)
            ),
        )
    if output.trace is not None:
        trace = json.dumps(chrome_trace(timelines[0]))
        _write(output.trace, lambda path: path.write_text(trace, encoding="utf-8"))


def _write(path: Path, write: Callable[[Path], object]) -> None:
    write_atomically(path, write)
    print(f"wrote {path}", file=sys.stderr)
