"""`charm-megatron bench operator`: schedules, and other libraries' attention, against each other."""

import csv
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from charm_megatron.errors import ConfigError, InvalidInput, nearest

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from charm_megatron.bench.cluster import Cluster
    from charm_megatron.bench.operator import OperatorCase, OperatorRow
    from charm_megatron.bench.suites import Race

Width = Literal["model", "float32"]
MODELLED_RATIOS = "0.1,0.2,0.5,1,2"
TABLE_WIDTH = 120


def operator_command(
    schedules: Annotated[
        str, typer.Option(help="Schedules, separated by commas; ratios are to the first.")
    ] = "ring,rm_plus,charm",
    peers: Annotated[str, typer.Option(help="Other libraries' attention, separated by commas, or all.")] = "",
    profile: Annotated[
        str | None,
        typer.Option(help="Shaped network, by name or YAML file; needs root. Loopback if not given."),
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="smoke, quick or full: ready-made races, in place of all of the below.")
    ] = None,
    passes: Annotated[str, typer.Option(help="forward, backward or both.")] = "forward,backward",
    mask: Annotated[str, typer.Option(help="causal, none, window:LEFT,RIGHT ..")] = "none",
    layout: Annotated[
        str | None,
        typer.Option(help="zigzag, contiguous or striped. If not given, zigzag for causal, else contiguous."),
    ] = None,
    heads: Annotated[int, typer.Option(help="Query heads.", min=1)] = 8,
    kv_heads: Annotated[
        int | None, typer.Option(help="KV heads; as many as query heads if not given.", min=1)
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Width of a head.", min=1)] = 64,
    tokens_per_rank: Annotated[int, typer.Option(help="Tokens of each rank.", min=1)] = 256,
    batch: Annotated[int, typer.Option(help="Sequences.", min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="Dtype of q, k, v and out.")] = "bfloat16",
    return_dtype: Annotated[
        Width, typer.Option(help="Width of partial outputs on their way home.")
    ] = "model",
    grad_return_dtype: Annotated[Width, typer.Option(help="The same for partial gradients.")] = "float32",
    compute: Annotated[
        Literal["real", "modelled"] | None,
        typer.Option(help="modelled: waits in place of blocks, as an accelerator leaves the CPU alone."),
    ] = None,
    ccr: Annotated[
        str | None,
        typer.Option(
            help="Ratios of modelled computation to the first schedule's communication, separated by commas; "
            f"{MODELLED_RATIOS} if not given."
        ),
    ] = None,
    fuse: Annotated[
        bool, typer.Option("--fuse", help="Post all transfers of a step together, as NCCL needs it.")
    ] = False,
    nodes: Annotated[
        int | None, typer.Option(help="Without --profile: domains that the ranks fall into.", min=1)
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Without --profile: ranks of each domain.", min=1)
    ] = None,
    repetitions: Annotated[int, typer.Option(help="Timed repetitions, interleaved.", min=1)] = 5,
    warm_up: Annotated[int, typer.Option(help="Repetitions before them.", min=0)] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write rows as JSON.")
    ] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write rows as CSV.")] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw speed-up, against CCR where there are several.")
    ] = None,
) -> None:
    """Time attention on the slowest rank: on a shaped network, on loopback, or as a job of torchrun or srun."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else each rank tells that its peers have no names
    from charm_megatron.bench.operator import OperatorCase
    from charm_megatron.bench.peers import PEERS
    from charm_megatron.bench.suites import SUITES, Race, races
    from charm_megatron.config import CharmConfig
    from charm_megatron.workload import CAUSAL, Workload, parse_mask

    _require_folders(json_file, csv_file, picture)
    runner = _Runner(_console(), profile, nodes, ranks_per_node)
    if suite is not None:
        if suite not in SUITES:
            raise InvalidInput(f"no suite {suite!r}{nearest(suite, SUITES)}; there are {', '.join(SUITES)}")
        if runner.is_launched:
            raise InvalidInput("a suite shapes networks of its own; start it without torchrun or srun")
        made = races(suite)
    else:
        seen = parse_mask(mask)
        workload = Workload(
            batch,
            tokens_per_rank * runner.num_ranks,
            heads,
            kv_heads or heads,
            head_dim,
            head_dim,
            dtype,
            seen,
        )
        settings = CharmConfig(fuse=fuse, return_dtype=return_dtype, grad_return_dtype=grad_return_dtype)
        case = OperatorCase(
            workload,
            tuple(_listed(schedules)),
            layout or ("zigzag" if seen == CAUSAL else "contiguous"),
            settings,
            repetitions=repetitions,
            warm_up=warm_up,
            peers=tuple(PEERS if peers == "all" else _listed(peers)),
            passes=_passes(passes),
        )
        grouped = (
            "MHA" if case.workload.num_heads == case.workload.num_kv_heads else f"GQA {heads}:{kv_heads}"
        )
        made = (Race(f"{grouped}, mask {seen}", profile or "", case, tuple(_ratios(compute, ccr))),)
    results = runner.run(made)
    if not results:
        return
    _write(results, json_file, csv_file, picture, runner.console)


def _require_folders(*paths: Path | None) -> None:
    """Before hours of measuring, not after."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise InvalidInput(f"cannot write {path}: there is no folder {path.parent}")


def _console() -> "Console":
    """As wide as the tables, also where the output is no terminal."""
    from rich.console import Console

    width = max(TABLE_WIDTH, Console().width)
    return Console(width=width, highlight=False, emoji=False, soft_wrap=True)


def _listed(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _passes(text: str) -> Any:
    from charm_megatron.bench.operator import PASSES

    words = _listed(text)
    if not words or not set(words) <= set(PASSES):
        raise ConfigError(f"--passes {text!r} is not forward, backward or forward,backward")
    return tuple(way for way in PASSES if way in words)


def _ratios(compute: str | None, text: str | None) -> list[float | None]:
    if compute == "real" and text is not None:
        raise ConfigError("--ccr sets modelled computation, but --compute is real; give one of the two")
    if compute != "modelled" and text is None:
        return [None]
    text = text or MODELLED_RATIOS
    try:
        ratios = [float(ratio) for ratio in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--ccr {text!r} is not a list of numbers, such as 0.1,0.5,1,2") from error
    if min(ratios) <= 0:
        raise ConfigError(f"--ccr {text!r} must be positive")
    return list(ratios)


Results = list[tuple[str, list["OperatorRow"]]]
"""By title of the race."""


class _Runner:
    """Runs races on the cluster of the command line, or each on its own network."""

    def __init__(
        self, console: "Console", profile: str | None, nodes: int | None, ranks_per_node: int | None
    ) -> None:
        from charm_megatron.bench.cluster import Cluster, launched_cluster
        from charm_megatron.bench.network import load_profile

        launched = launched_cluster()
        if profile is not None and launched is not None:
            raise InvalidInput("--profile makes ranks of its own; start it without torchrun or srun")
        if (profile is not None or launched is not None) and (nodes or ranks_per_node):
            raise InvalidInput("--nodes and --ranks-per-node are for loopback; here the ranks are given")
        self.console = console
        if launched is not None:
            self.cluster = launched
        elif profile is not None:
            shape = load_profile(profile)
            self.cluster = Cluster(shape.domains, shape.ranks_per_domain)
        else:
            self.cluster = Cluster(nodes or 2, ranks_per_node or 2)

    @property
    def is_launched(self) -> bool:
        return self.cluster.is_launched

    @property
    def num_ranks(self) -> int:
        return self.cluster.num_ranks

    def run(self, made: Sequence["Race"]) -> Results:
        """Runs all races, with a table after each. Empty on the later ranks of a launched job."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        results: Results = []
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True, disable=self.is_launched) as progress:
            total = sum(case.num_stages + 1 for race in made for case in race.cases)
            task = progress.add_task("", total=total)
            for race in made:
                with self._cluster(race) as cluster:
                    rows = []
                    for case in race.cases:
                        label = f"{cluster}, {race.title}" + (f", CCR {case.ccr:g}" if case.ccr else "")

                        def tell(line: str, label: str = label) -> None:
                            progress.update(task, description=f"{label}: {line}", advance=1)

                        rows += self._rows(case, cluster, tell)
                    if rows:
                        results.append((f"{cluster}: {race.title}", rows))
                        self._print(*results[-1])
        return results

    @staticmethod
    def _rows(case: "OperatorCase", cluster: "Cluster", tell: Any) -> list["OperatorRow"]:
        from charm_megatron.bench.operator import run_case

        return run_case(case, cluster, tell)

    @contextmanager
    def _cluster(self, race: "Race") -> Iterator["Cluster"]:
        from charm_megatron.bench.cluster import cluster_on
        from charm_megatron.bench.kept import attach, is_up
        from charm_megatron.bench.namespaces import why_unavailable
        from charm_megatron.bench.network import load_profile
        from charm_megatron.bench.testbed import Testbed

        if not race.profile:
            if not self.is_launched:
                self.console.print("network: loopback of this machine, not shaped; all ranks share its cores")
            yield self.cluster
            return
        shape = load_profile(race.profile)
        reason = why_unavailable()
        if reason is not None:
            from charm_megatron.bench.cluster import Cluster

            self.console.print(
                f"cannot shape {shape.name}: {reason}; on loopback instead, which is not shaped"
            )
            yield Cluster(shape.domains, shape.ranks_per_domain)
        elif is_up(shape):
            yield cluster_on(attach(shape))
        else:
            with Testbed(shape) as net:
                yield cluster_on(net)

    def _print(self, title: str, rows: list["OperatorRow"]) -> None:
        self.console.print(_table(title, rows))
        for line in _notes(rows):
            self.console.print(line)


def _table(title: str, rows: list["OperatorRow"]) -> "Table":
    from rich import box
    from rich.table import Table

    how = "modelled" if rows[0].is_modelled else "real"
    table = Table(
        box=box.SIMPLE,
        title=f"{title}; computation {how}; ms; MB of the busiest sender",
        title_justify="left",
        padding=(0, 1, 0, 0),
    )
    has_errors = any(row.error is not None for row in rows)
    for name in ("schedule", "pass"):
        table.add_column(name, no_wrap=True)
    columns = ["CCR", "median", "min", "max", "speed-up", "plan", "wire", "busiest", "bound"]
    for name in [*columns, *(["error"] if has_errors else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row.median_s is not None:
            cells = [
                _number(row.ccr, ".2f"),
                *(_number(value, ".1f", 1e3) for value in (row.median_s, row.min_s, row.max_s)),
                _number(row.ratio_to_first, ".2f"),
                *(_number(value, ".2f", 1e-6) for value in (row.bytes_planned, row.bytes_wire)),
                *(_number(value, ".0%") for value in (row.fraction_of_busiest, row.fraction_of_bound)),
                *([_number(row.error, ".1e")] if has_errors else []),
            ]
            table.add_row(row.schedule, row.direction, *cells)
    return table


def _number(value: float | None, style: str, factor: float = 1.0) -> str:
    return "-" if value is None else format(value * factor, style)


def _notes(rows: list["OperatorRow"]) -> Iterator[str]:
    """Who did not run and what a reader must know of those that did; and how we stand against the best peer."""
    from charm_megatron.bench.peers import PEERS
    from charm_megatron.bench.standing import standings

    for name in dict.fromkeys(row.schedule for row in rows if row.note):
        row = next(row for row in rows if row.schedule == name)
        yield f"{name} {'did not run: ' if row.median_s is None else ''}{row.note}"
    for name in dict.fromkeys(row.schedule for row in rows if row.is_peer and row.median_s):
        if PEERS[name].note:
            yield f"{name}: {PEERS[name].note}"
    yield from standings(rows)


def _write(
    results: Results, json_file: Path | None, csv_file: Path | None, picture: Path | None, console: "Console"
) -> None:
    from charm_megatron.bench.operator import as_json
    from charm_megatron.bench.picture import draw_speed_up

    listed = [{"race": title, **as_json(row)} for title, rows in results for row in rows]
    if json_file:
        json_file.write_text(json.dumps(listed, indent=1) + "\n", "utf-8")
    if csv_file:
        with csv_file.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(listed[0]))
            writer.writeheader()
            writer.writerows(listed)
    if picture:
        draw_speed_up(results, picture)
        console.print(f"picture: {picture}")
