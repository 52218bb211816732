"""Runs races of the operator benchmark on their networks, with progress, and shows them as tables."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charm_megatron.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from charm_megatron.bench.cluster import Cluster
    from charm_megatron.bench.operator import OperatorRow
    from charm_megatron.bench.suites import Race

TABLE_WIDTH = 120


def wide_console() -> "Console":
    """As wide as the tables, also where the output is no terminal."""
    from rich.console import Console

    width = max(TABLE_WIDTH, Console().width)
    return Console(width=width, highlight=False, emoji=False, soft_wrap=True)


def require_writable(*paths: Path | None) -> None:
    """Before hours of measuring, not after. Raises `InvalidInput`."""
    for path in paths:
        if path is None:
            continue
        if not path.parent.is_dir():
            raise InvalidInput(f"cannot write {path}: there is no folder {path.parent}")
        if path.is_dir():
            raise InvalidInput(f"cannot write {path}: it is a folder")
        trial = path.with_name(f".{path.name}.part")
        try:
            trial.touch()
            trial.unlink()
        except OSError as error:
            raise InvalidInput(f"cannot write {path}: {error.strerror}") from error


def write_whole(path: Path, text: str) -> None:
    """Replaces a file at once, so that nobody finds half of it. Raises `InvalidInput`."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, "utf-8", newline="")
        part.replace(path)
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror}") from error


Results = list[tuple[str, list["OperatorRow"]]]
"""By title of the race."""


def as_rows(results: Results) -> list[dict[str, Any]]:
    """All rows for other programs."""
    from charm_megatron.bench.operator import as_json

    return [{"race": title, **as_json(row)} for title, rows in results for row in rows]


class Runner:
    """Runs races on the cluster of the command line, or each on its own network."""

    def __init__(
        self, console: "Console", profile: str | None, nodes: int | None, ranks_per_node: int | None
    ) -> None:
        from charm_megatron.bench.cluster import Cluster, launched_cluster
        from charm_megatron.testbed.profile import load_profile

        launched = launched_cluster()
        if profile is not None and launched is not None:
            raise InvalidInput("--profile makes ranks of its own; start it without torchrun")
        if (profile is not None or launched is not None) and (nodes or ranks_per_node):
            raise InvalidInput("--nodes and --ranks-per-node are for loopback; here the ranks are given")
        self.console = console
        self.profile = None if profile is None else load_profile(profile)
        if launched is not None:
            self.cluster = launched
        elif self.profile is not None:
            self.cluster = Cluster(self.profile.domains, self.profile.ranks_per_domain)
        else:
            self.cluster = Cluster(nodes or 2, ranks_per_node or 2)

    @property
    def is_launched(self) -> bool:
        return self.cluster.is_launched

    @property
    def num_ranks(self) -> int:
        return self.cluster.num_ranks

    def run(
        self,
        made: Sequence["Race"],
        *,
        shows_tables: bool = True,
        after_each: Callable[[Results], None] = lambda results: None,
    ) -> Results:
        """Runs all races, with a table after each; `after_each` gets all that there is.

        Empty on the later ranks of a launched job.
        """
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        from charm_megatron.bench import operator
        from charm_megatron.bench.ranks import leave_job

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

                        rows += operator.run_case(case, cluster, tell)
                    if rows:
                        results.append((f"{cluster}: {race.title}", rows))
                        if shows_tables:
                            self._print(*results[-1])
                        after_each(results)
        if self.is_launched:
            leave_job()
        return results

    @contextmanager
    def _cluster(self, race: "Race") -> Iterator["Cluster"]:
        from charm_megatron.bench.cluster import cluster_on
        from charm_megatron.testbed.namespaces import why_unavailable
        from charm_megatron.testbed.network import Testbed
        from charm_megatron.testbed.persistent import attach, is_up

        if race.profile is None:
            if not self.is_launched:
                self.console.print("network: loopback of this machine, not shaped; all ranks share its cores")
            yield self.cluster
            return
        shape = race.profile
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
    from charm_megatron.bench.verdict import standings
    from charm_megatron.peers.registry import PEERS

    for name in dict.fromkeys(row.schedule for row in rows if row.note):
        row = next(row for row in rows if row.schedule == name)
        yield f"{name} {'did not run: ' if row.median_s is None else ''}{row.note}"
    for name in dict.fromkeys(row.schedule for row in rows if row.is_peer and row.median_s):
        peer = PEERS[name]
        yield f"{name}: {peer.package} {peer.version}{peer.note and ', '}{peer.note}"
    yield from standings(rows)
