"""How `charm-megatron doctor` shows what it found."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from charm_megatron.doctor.findings import Finding
from charm_megatron.doctor.report import Report
from charm_megatron.doctor.verdicts import LEAST_PAIRS, latency_text, rate_text

STYLES = {"ok": "green", "absent": "dim", "hint": "yellow", "fault": "bold red"}


def print_json(report: Report) -> None:
    """One object on standard output."""
    print(json.dumps(report.as_json(), indent=1))


def print_report(report: Report) -> None:
    """A table for each part, and a last line that counts the faults."""
    console = Console(highlight=False, emoji=False)
    console.print(_findings("Packages", report.packages))
    console.print()
    if report.settings:
        console.print(_findings("Settings", report.settings))
    else:
        console.print("Settings: nothing in the environment hurts NCCL or torch")
    if report.where:
        console.print()
        console.print(_findings("Places", report.places))
        console.print()
        _print_links(report, console)
    console.print()
    number = report.num_faults
    end = f"{number} fault{'s' if number > 1 else ''} found" if number else "nothing is wrong"
    console.print(Text(end, style=STYLES["fault" if number else "ok"]))


def _findings(title: str, findings: Sequence[Finding]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    table.add_column("what to do", overflow="fold")
    for one in findings:
        ranks = f" (ranks {', '.join(map(str, one.ranks))})" if one.ranks else ""
        verdict = Text(one.verdict, style=STYLES[one.verdict])
        table.add_row(Text(one.name), Text(one.found + ranks), verdict, Text(one.remedy))
    return table


def _print_links(report: Report, console: Console) -> None:
    if not report.measured:
        console.print("Links: there is no pair of ranks to measure")
        return
    console.print(_classes(report))
    if any(not one.judges_speed for one in report.classes):
        console.print(f"speed is judged from {LEAST_PAIRS} pairs of a class on")
    if report.links:
        console.print()
        console.print(_findings("Bad links", report.links))


def _classes(report: Report) -> Table:
    title = f"Links of {report.domains.cp_size} {report.where}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in ("domain", "pairs", "latency", "median", "slowest", "of ranks"):
        table.add_column(heading, justify="left" if heading == "domain" else "right", no_wrap=True)
    for one in report.classes:
        slowest = one.slowest
        table.add_row(
            one.name,
            str(one.num_pairs),
            latency_text(one.median_latency_s),
            rate_text(one.median_bytes_per_s),
            "-" if slowest is None else rate_text(slowest.bytes_per_s),
            "-" if slowest is None else f"{slowest.first}, {slowest.second}",
        )
    return table


@contextmanager
def shown_progress(is_silent: bool) -> Iterator[Callable[[int, int, str], Any]]:
    """A bar on standard error while links are measured, on a terminal only."""
    console = Console(stderr=True)
    columns = (TextColumn("links: {task.description}"), BarColumn(), MofNCompleteColumn())
    disable = is_silent or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disable) as progress:
        task = progress.add_task("waiting for ranks", total=None)

        def show(done: int, total: int, words: str) -> None:
            progress.update(task, completed=done, total=total, description=words)

        yield show
