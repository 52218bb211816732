"""What a run leaves on disk.

config.yaml        the configuration, overrides applied and defaults filled in
metrics.jsonl      one row per iteration: iteration, loss, grad_norm, step_time_s, tokens
evaluation.jsonl   one row per evaluation: iteration, part of the text, loss
loss.png           both, drawn
schedule.txt       the schedule of the attention
receipt.txt        domains, schedule, bytes by link class, kernel
checkpoints/       Megatron's; see `checkpoints`
data/              the text as Megatron's dataset, and its indexes
logs/rank<N>.log   what each rank printed
flight_record_<N>.json  its last actions, where it lost a transfer
lock.json          who writes to the folder, while somebody does; see `lock`
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from charm_megatron.config import RunConfig, load_run_config
from charm_megatron.errors import InvalidInput
from charm_megatron.files import require_writable_folder, write_text
from charm_megatron.train import lock
from charm_megatron.train.checkpoints import (
    DEFAULT_FORMAT,
    iteration_folder,
    iteration_to_continue,
    newest_whole,
    require_private,
)

Row = Mapping[str, Any]


def default_path(config_path: Path, now: datetime) -> Path:
    """`runs/<name of the configuration>-<time>`, under the working directory."""
    return Path("runs") / f"{config_path.stem}-{now:%Y%m%d-%H%M%S}"


@dataclass(frozen=True)
class RunFolder:
    """The paths in a run folder. Making one of these touches no disk."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def evaluation(self) -> Path:
        return self.path / "evaluation.jsonl"

    @property
    def loss_picture(self) -> Path:
        return self.path / "loss.png"

    @property
    def schedule(self) -> Path:
        return self.path / "schedule.txt"

    @property
    def receipt(self) -> Path:
        return self.path / "receipt.txt"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def text_prefix(self) -> Path:
        """Megatron's name of the dataset: its files add .bin and .idx."""
        return self.data / "text"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, rank: int) -> Path:
        return self.logs / f"rank{rank}.log"

    def check_new(self) -> int:
        """The iterations done so far, 0. Raises `InvalidInput` unless a run can be started here."""
        require_writable_folder(self.path)
        lock.require_unlocked(self.path)
        self.require_empty()
        return 0

    def require_empty(self) -> None:
        """Raises `InvalidInput` where something other than a lock is in the folder."""
        if not self.path.is_dir() or all(child.name == lock.NAME for child in self.path.iterdir()):
            return
        if not self.config.is_file():
            raise InvalidInput(f"{self.path} is not empty; give another --out")
        if self._whole is None:
            raise InvalidInput(
                f"{self.path} holds a run that ended before its first checkpoint; give another --out, or remove "
                f"{self.path} to start it again"
            )
        raise InvalidInput(
            f"{self.path} is not empty; give another --out, or --resume to continue the run in it"
        )

    def check_resumable(self, trusted: bool = False, is_first_rank: bool = True) -> int:
        """The iteration that a run continues from, the newest checkpoint's. Starts nothing, and loads nothing.

        Raises `InvalidInput` where there is none, it is not whole, another run writes to the folder, or, unless
        `trusted`, other users may. Later ranks do not look for another run: the first has locked the folder by now.
        """
        require_writable_folder(self.path)
        if is_first_rank:
            lock.require_unlocked(self.path)
        iteration = iteration_to_continue(self.checkpoints, self._ckpt_format)
        if iteration is None:
            remedy = (
                f"it ended before its first; start it again with another --out, or without --resume once "
                f"{self.path} is removed"
                if self.config.is_file()
                else "start the run without --resume"
            )
            raise InvalidInput(f"{self.path} holds no checkpoint to continue; {remedy}")
        if not trusted:
            checkpoint = iteration_folder(self.checkpoints, iteration)
            require_private(self.path, self.checkpoints, checkpoint, self.data)
        return iteration

    @property
    def _ckpt_format(self) -> str:
        config = self.started_with()
        return str((config.megatron.get("ckpt_format") if config else None) or DEFAULT_FORMAT)

    @property
    def _whole(self) -> int | None:
        return newest_whole(self.checkpoints, self._ckpt_format)

    def started_with(self) -> RunConfig | None:
        """The configuration of the run so far; None where it cannot be read."""
        try:
            return load_run_config(self.config)
        except InvalidInput:
            return None

    def standing(self) -> str:
        """What an interrupted run leaves, as a clause."""
        if not self.config.is_file():
            return "nothing was written"
        whole = self._whole
        if whole is None:
            return f"{self.path} holds no checkpoint yet"
        return f"{self.path} holds a checkpoint of iteration {whole}, which --resume continues"

    def locked(self) -> AbstractContextManager[None]:
        """Keeps other runs out inside the block. Raises `InvalidInput` where one is in the folder."""
        return lock.locked(self.path)

    def make(self) -> None:
        """Makes the folder, empty. Raises `InvalidInput` where that is not possible."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(f"cannot write to {self.path}: {error.strerror}") from error

    def create(self, config: RunConfig) -> None:
        """Makes the folder and writes the configuration. Raises `InvalidInput` where that is not possible."""
        self.make()
        try:
            self.logs.mkdir(exist_ok=True)
            self.write_config(config)
        except OSError as error:
            raise InvalidInput(f"cannot write to {self.path}: {error.strerror}") from error

    def write_config(self, config: RunConfig) -> None:
        """The resolved configuration; on resume it replaces that of the run so far."""
        text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
        write_text(self.config, text)

    def discard(self, made: Sequence[Path]) -> None:
        """Removes what is in this folder, and the folders `made` for it, the innermost first."""
        for child in self.path.iterdir():
            shutil.rmtree(child) if child.is_dir() else child.unlink()
        for folder in made:
            folder.rmdir()

    def rewind(self, iteration: int) -> list[str]:
        """Drops the rows after `iteration`, which a resumed run is about to repeat, and lines that are no rows.

        Returns a sentence for each file that had such lines.
        """
        said = []
        for path in (self.metrics, self.evaluation):
            rows, num_dropped = _rows(path)
            kept = [row for row in rows if row["iteration"] <= iteration]
            write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
            if num_dropped:
                lines = "1 line that is" if num_dropped == 1 else f"{num_dropped} lines that are"
                said.append(
                    f"dropped {lines} no row of {path.name}: cut short or overwritten when the run ended"
                )
        return said


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file; none where it does not exist.

    A last line without its end was cut short when the writer was killed, and is left out; so is what is no row, such
    as the zeros that a power loss leaves.
    """
    return _rows(path)[0]


def _rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows, and how many lines are none."""
    if not path.exists():
        return [], 0
    *lines, rest = path.read_text("utf-8", errors="replace").split("\n")
    rows = [row for row in map(_row, lines) if row is not None]
    return rows, len(lines) + bool(rest) - len(rows)


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("iteration"), int) else None


def append_row(path: Path, row: Row) -> None:
    """Adds a row; readers see it whole or not at all."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
