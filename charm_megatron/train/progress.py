"""Shows a run on the terminal: what is being prepared, then a bar with the losses, then a table."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from charm_megatron.train.pretrain import Summary
from charm_megatron.train.rank_job import RunEvent

NUM_LINES = 10
"""Lines a run prints where the output is not a terminal, and a bar would not move."""


class TerminalView:
    """Prints stages and receipt as lines, and iterations as a bar that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._line_interval = self._first_iteration = 1

    def stage(self, text: str) -> None:
        """Says what happens before the first iteration."""
        self._console.print(f"{text} ...", style="dim", highlight=False)

    def notice(self, sentence: str) -> None:
        """Says what should be known, and keeps nothing from going on."""
        self._print(sentence)

    @contextmanager
    def training(self, first_iteration: int, last_iteration: int) -> Iterator[None]:
        """Shows iterations inside the block."""
        self._first_iteration = first_iteration + 1
        self._line_interval = max(1, (last_iteration - first_iteration) // NUM_LINES)
        with self._progress:
            self._task = self._progress.add_task("", total=last_iteration, completed=first_iteration)
            yield

    def event(self, event: RunEvent) -> None:
        """Shows the receipt, an iteration or an evaluation."""
        row = event.row
        if event.kind == "started":
            for line in row["receipt"]:
                self._print(line)
        elif event.kind == "notice":
            self._print(row["sentence"])
        elif event.kind == "evaluation":
            self._print(f"iteration {row['iteration']}: {row['part']} loss {row['loss']:.4f}")
        elif event.kind == "step":
            text = (
                f"loss {_number(row['loss'], 4)}  grad norm {_number(row['grad_norm'], 3)}  "
                f"{1000 * row['step_time_s']:.0f} ms"
            )
            assert self._task is not None, "steps come while training"
            self._progress.update(self._task, completed=row["iteration"], description=text)
            is_due = row["iteration"] == self._first_iteration or row["iteration"] % self._line_interval == 0
            if is_due and not self._console.is_terminal:
                self._print(f"iteration {row['iteration']}: {text}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_summary(console: Console, summary: Summary) -> None:
    """The ends of a run, and where its picture and folder are."""
    table = Table(show_header=False, box=None, pad_edge=False)
    rows = {
        "iterations": str(summary.iterations),
        "first loss": _number(summary.first_loss, 4),
        "last loss": _number(summary.last_loss, 4),
        "validation loss": _number(summary.validation_loss, 4),
        "tokens/s": f"{summary.tokens_per_s:,.0f}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    # Outside the table, whose cells are cut to the width of the terminal.
    for name, path in (("picture", summary.folder.loss_picture), ("run folder", summary.folder.path)):
        console.print(f"{name}: {path}", markup=False, highlight=False, soft_wrap=True)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
