"""Runs races of the operator benchmark on their networks, with progress."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from charm_megatron.bench import operator
from charm_megatron.bench.case import OperatorRow, as_json
from charm_megatron.bench.cluster import Cluster, cluster_on, launched_cluster
from charm_megatron.bench.ranks import leave_job
from charm_megatron.bench.suites import Race
from charm_megatron.cli.bench.race_tables import race_notes, race_table
from charm_megatron.errors import InvalidInput
from charm_megatron.files import require_writable, write_text
from charm_megatron.testbed import namespaces
from charm_megatron.testbed.network import Testbed
from charm_megatron.testbed.persistent import attach, is_up
from charm_megatron.testbed.profile import load_profile

TABLE_WIDTH = 120
Results = list[tuple[str, list[OperatorRow]]]
"""Rows by the title of their race."""


def wide_console() -> Console:
    """As wide as the tables, also where the output is not a terminal."""
    width = max(TABLE_WIDTH, Console().width)
    return Console(width=width, highlight=False, emoji=False, soft_wrap=True)


def require_own_ranks(*files: Path | None) -> None:
    """What a benchmark that starts its own ranks needs. Raises `InvalidInput`."""
    require_writable(*files)
    if launched_cluster() is not None:
        raise InvalidInput("this benchmark starts ranks of its own; start it without torchrun")


def as_rows(results: Results) -> list[dict[str, Any]]:
    """All rows for other programs."""
    return [{"race": title, **as_json(row)} for title, rows in results for row in rows]


def write_json(rows: Sequence[dict[str, Any]], path: Path | None) -> None:
    """Rows as JSON; nothing without a path."""
    if path is not None:
        write_text(path, json.dumps(rows, indent=1) + "\n")


def write_csv(rows: Sequence[dict[str, Any]], path: Path | None) -> None:
    """Rows as CSV; nothing without a path."""
    if path is not None:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        write_text(path, text.getvalue())


class Runner:
    """Runs races on the cluster of the command line, or each on its own network."""

    def __init__(
        self, console: Console, profile: str | None, nodes: int | None, ranks_per_node: int | None
    ) -> None:

        launched = launched_cluster()
        if profile is not None and launched is not None:
            raise InvalidInput("--profile starts ranks of its own; start it without torchrun")
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
        made: Sequence[Race],
        *,
        shows_tables: bool = True,
        after_each: Callable[[Results], None] = lambda results: None,
    ) -> Results:
        """Runs all races, with a table after each; `after_each` is called with all rows so far.

        Empty on the later ranks of a launched job.
        """
        results: Results = []
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True, disable=self.is_launched) as progress:
            task = progress.add_task(
                "", total=sum(case.num_stages + 1 for race in made for case in race.cases)
            )

            def log(line: str) -> None:
                progress.update(task, description=line, advance=1)

            for race in made:
                title, rows = self._run_race(race, log)
                if rows:
                    results.append((title, rows))
                    if shows_tables:
                        self._print(title, rows)
                    after_each(results)
        if self.is_launched:
            leave_job()
        return results

    def _run_race(self, race: Race, log: Callable[[str], None]) -> tuple[str, list[OperatorRow]]:
        rows: list[OperatorRow] = []
        with self._cluster(race) as cluster:
            for case in race.cases:
                label = f"{cluster}, {race.title}" + (f", CCR {case.ccr:g}" if case.ccr else "")

                def log_case(line: str, label: str = label) -> None:
                    log(f"{label}: {line}")

                rows += operator.run_case(case, cluster, log_case)
            return f"{cluster}: {race.title}", rows

    @contextmanager
    def _cluster(self, race: Race) -> Iterator[Cluster]:

        if race.profile is None:
            if not self.is_launched:
                self.console.print("network: loopback of this machine, not shaped; all ranks share its cores")
            yield self.cluster
            return
        shape = race.profile
        reason = namespaces.why_unavailable()
        if reason is not None:
            self.console.print(
                f"cannot shape {shape.name}: {reason}; on loopback instead, which is not shaped"
            )
            yield Cluster(shape.domains, shape.ranks_per_domain)
        elif is_up(shape):
            yield cluster_on(attach(shape))
        else:
            with Testbed(shape) as net:
                yield cluster_on(net)

    def _print(self, title: str, rows: list[OperatorRow]) -> None:
        self.console.print(race_table(title, rows))
        for line in race_notes(rows):
            self.console.print(line)
