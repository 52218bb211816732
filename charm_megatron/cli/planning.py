"""What `charm-megatron plan` does once its options are read."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from charm_megatron.cli.tables import Compared, compare_table, facts, grid_tables, rank_table
from charm_megatron.compile import Plan, compile_attention
from charm_megatron.config import CharmConfig
from charm_megatron.cost.buffers import Buffers, peak_buffers
from charm_megatron.cost.model import CostModel, Link
from charm_megatron.cost.timeline import Timeline, evaluate
from charm_megatron.errors import InvalidInput
from charm_megatron.schedule.json_form import to_json
from charm_megatron.schedule.passes import Direction
from charm_megatron.show.draw import PICTURE_FORMATS, draw_rank, draw_timelines, one_after_another
from charm_megatron.show.perfetto import chrome_trace
from charm_megatron.topology import even_domains
from charm_megatron.workload import Workload, parse_mask

SHOWN_RANKS, SHOWN_STEPS = 8, 40
MEASURED_RANKS = 64
"""Of larger groups, buffers are worked out for this many ranks, evenly spread."""


@dataclass(frozen=True)
class Setting:
    """What is to be planned, as the user put it."""

    nodes: int
    ranks_per_node: int
    mask: str
    layout: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tokens_per_rank: int
    batch: int
    dtype: str
    config: CharmConfig

    @property
    def words(self) -> str:
        """In one line, for titles."""
        kv = "" if self.num_kv_heads == self.num_heads else f", {self.num_kv_heads} KV"
        return (
            f"{self.nodes} x {self.ranks_per_node} ranks, {self.layout}, mask {self.mask}, "
            f"{self.tokens_per_rank} tokens a rank, {self.num_heads} heads{kv} x {self.head_dim}, {self.dtype}"
        )


@dataclass(frozen=True)
class Output:
    """What is to be shown and written."""

    names: tuple[str, ...]
    is_comparison: bool
    directions: tuple[Direction, ...]
    as_json: bool
    picture: Path | None
    only_rank: int | None
    trace: Path | None
    all_ranks: bool
    own_links: bool


@dataclass(frozen=True)
class Prices:
    """The rates behind times."""

    flops_per_s: float
    inside_bytes_per_s: float
    across_bytes_per_s: float
    latency_s: float

    def model(self, *, is_shared: bool = True) -> CostModel:
        if self.flops_per_s <= 0:
            raise InvalidInput(f"--flops-per-s must be positive, but is {self.flops_per_s:g}")
        inside = Link(self.inside_bytes_per_s, self.latency_s)
        return CostModel(self.flops_per_s, inside, Link(self.across_bytes_per_s, self.latency_s), is_shared)

    @property
    def words(self) -> str:
        latency = f", latency {self.latency_s * 1e6:g} us" if self.latency_s else ""
        return (
            f"{self.flops_per_s / 1e12:g} TFLOP/s, {self.inside_bytes_per_s / 1e9:g} GB/s inside, "
            f"{self.across_bytes_per_s / 1e9:g} GB/s across{latency}"
        )


@dataclass(frozen=True)
class Planned:
    """One schedule under a setting."""

    name: str
    plan: Plan

    def timeline(self, direction: Direction, cost: CostModel) -> Timeline:
        phases = self.plan.phases(direction)
        return one_after_another([evaluate(phase, self.plan.wire, cost) for phase in phases])

    def buffers(self, direction: Direction, rank: int) -> Buffers:
        total = Buffers()
        for phase in self.plan.phases(direction):
            total |= peak_buffers(phase, self.plan.wire, rank)
        return total


def make_planned(name: str, setting: Setting) -> Planned:
    """Plans both directions. Raises a kind of `InvalidInput` for what cannot be."""
    for option in ("nodes", "ranks_per_node", "tokens_per_rank", "num_heads", "num_kv_heads"):
        if getattr(setting, option) < 1:
            words = option.removeprefix("num_").replace("_", "-")
            raise InvalidInput(f"--{words} must be at least 1, but is {getattr(setting, option)}")
    cp_size = setting.nodes * setting.ranks_per_node
    seq_len, mask = setting.tokens_per_rank * cp_size, parse_mask(setting.mask)
    heads, kv_heads, width = setting.num_heads, setting.num_kv_heads, setting.head_dim
    workload = Workload(setting.batch, seq_len, heads, kv_heads, width, width, setting.dtype, mask)
    config = setting.config.model_copy(update={"schedule": name})
    return Planned(
        name, compile_attention(config, even_domains(cp_size, setting.nodes), workload, setting.layout)
    )


def run_plan(setting: Setting, output: Output, prices: Prices) -> None:
    """Plans, writes what is to be written, then prints."""
    if output.as_json and output.is_comparison:
        raise InvalidInput("--json writes one schedule; name it with --schedule in place of --compare")
    prices.model()
    _check_files(setting, output)
    planned = [make_planned(name, setting) for name in output.names]
    _write_files(planned, setting, output, prices)
    if output.as_json:
        listed = [phase for direction in output.directions for phase in planned[0].plan.phases(direction)]
        json.dump(to_json(planned[0].name, listed), sys.stdout, indent=1)
        sys.stdout.write("\n")
        return
    console = Console(highlight=False, emoji=False, soft_wrap=False)
    for direction in output.directions:
        if output.is_comparison:
            _print_comparison(console, planned, direction, setting, prices)
        else:
            _print_schedule(console, planned[0], direction, setting, output.all_ranks)


# ---------------------------------------------------------------------- on the terminal


def _print_schedule(
    console: Console, planned: Planned, direction: Direction, setting: Setting, all_ranks: bool
) -> None:
    cp_size = setting.nodes * setting.ranks_per_node
    shown = range(cp_size if all_ranks else min(cp_size, SHOWN_RANKS))
    console.rule(f"[bold]{planned.name} {direction}[/]")
    console.print(f"{setting.words}\n", markup=False)
    for phase in planned.plan.phases(direction):
        if len(planned.plan.phases(direction)) > 1:
            console.print(f"pass {phase.pass_.name}")
        max_steps = None if all_ranks else SHOWN_STEPS
        for part in grid_tables(phase, shown, max_steps, console.width):
            console.print(part)
    numbers = planned.plan.report(direction)
    buffers = {rank: planned.buffers(direction, rank) for rank in sorted({*shown, *_measured(cp_size)})}
    console.print(rank_table(numbers, buffers, setting.ranks_per_node, shown))
    for line in facts(numbers, buffers, cp_size):
        console.print(line, markup=False)
    console.print()


def _measured(cp_size: int) -> list[int]:
    """The ranks whose buffers are worked out."""
    step = max(1, -(-cp_size // MEASURED_RANKS))
    return list(range(0, cp_size, step))


def _print_comparison(
    console: Console, planned: list[Planned], direction: Direction, setting: Setting, prices: Prices
) -> None:
    cp_size = setting.nodes * setting.ranks_per_node
    rows = [
        Compared(
            name=one.name,
            report=one.plan.report(direction),
            buffers=[one.buffers(direction, rank) for rank in _measured(cp_size)],
            shared=one.timeline(direction, prices.model()),
            own=one.timeline(direction, prices.model(is_shared=False)),
        )
        for one in planned
    ]
    console.rule(f"[bold]{direction}[/]")
    console.print(f"{setting.words}\nmodel: {prices.words}\n", markup=False)
    console.print(compare_table(rows))
    console.print()


# ---------------------------------------------------------------------- files


def _check_files(setting: Setting, output: Output) -> None:
    if output.picture is not None and output.picture.suffix not in PICTURE_FORMATS:
        raise InvalidInput(
            f"{output.picture} is no picture that can be drawn; names end in {', '.join(PICTURE_FORMATS)}"
        )
    if output.trace is not None and output.is_comparison:
        raise InvalidInput("--perfetto writes one schedule; name it with --schedule in place of --compare")
    cp_size = setting.nodes * setting.ranks_per_node
    if output.only_rank is not None and output.picture is None:
        raise InvalidInput("--rank says what to draw; it needs --svg FILE")
    if output.only_rank is not None and not 0 <= output.only_rank < cp_size:
        raise InvalidInput(f"--rank is one of 0 to {cp_size - 1}, but is {output.only_rank}")
    for path in (output.picture, output.trace):
        if path is not None and not path.parent.is_dir():
            raise InvalidInput(f"cannot write {path}: there is no folder {path.parent}")
        if path is not None and path.is_dir():
            raise InvalidInput(f"cannot write {path}: it is a folder")


def _write_files(planned: list[Planned], setting: Setting, output: Output, prices: Prices) -> None:
    if output.picture is None and output.trace is None:
        return
    direction = output.directions[0]
    cost = prices.model(is_shared=not output.own_links)
    timelines = [one.timeline(direction, cost) for one in planned]
    if output.picture is not None:
        links = ", a link for each transfer" if output.own_links else ""
        title = f"{direction}: {setting.words}\nmodel: {prices.words}{links}"
        names = [(one.name, timeline) for one, timeline in zip(planned, timelines, strict=True)]
        phases = [one.plan.phases(direction) for one in planned]
        domains, rank = planned[0].plan.problem.domains, output.only_rank
        write_atomically(
            output.picture,
            lambda path: (
                draw_timelines(names, domains, path, title=title, phases=phases)
                if rank is None
                else draw_rank(names, rank, path, title=title, phases=phases)
            ),
        )
    if output.trace is not None:
        trace = json.dumps(chrome_trace(timelines[0]))
        write_atomically(output.trace, lambda path: path.write_text(trace, encoding="utf-8"))


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Writes beside `path` and renames, so that nothing half-written is ever there; says so on standard error."""
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        write(partial)
        partial.replace(path)
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    print(f"wrote {path}", file=sys.stderr)
