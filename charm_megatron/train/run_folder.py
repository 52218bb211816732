"""What a run leaves on disk.

config.yaml        the configuration, overrides applied and defaults filled in
metrics.jsonl      one row per iteration: iteration, loss, grad_norm, step_time_s, tokens
evaluation.jsonl   one row per evaluation: iteration, part of the text, loss
loss.png           both, drawn
schedule.txt       the schedule of the attention
receipt.txt        domains, schedule, bytes by link class, kernel
checkpoints/       Megatron's
data/              the text as Megatron's dataset, and its indexes
logs/rank<N>.log   what each rank printed
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from charm_megatron.config import RunConfig
from charm_megatron.errors import InvalidInput
from charm_megatron.files import require_writable_folder, write_text

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
        if self.path.is_dir() and any(self.path.iterdir()):
            raise InvalidInput(
                f"{self.path} is not empty; give another --out, or --resume to continue the run in it"
            )
        return 0

    def check_resumable(self) -> int:
        """The iteration of the newest checkpoint. Raises `InvalidInput` where there is none."""
        require_writable_folder(self.path)
        tracker = self.checkpoints / "latest_checkpointed_iteration.txt"
        try:
            return int(tracker.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidInput(
                f"{self.path} holds no checkpoint to continue; start the run without --resume"
            ) from error

    def create(self, config: RunConfig) -> None:
        """Makes the folder and writes the configuration. Raises `InvalidInput` where that is not possible."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
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

    def rewind(self, iteration: int) -> None:
        """Drops the rows after `iteration`, which a resumed run is about to repeat."""
        for path in (self.metrics, self.evaluation):
            kept = [row for row in read_rows(path) if row["iteration"] <= iteration]
            write_text(path, "".join(json.dumps(row) + "\n" for row in kept))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file; none where it does not exist.

    A last line without its end was cut short when the writer was killed, and is left out.
    """
    if not path.exists():
        return []
    lines = path.read_text("utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def append_row(path: Path, row: Row) -> None:
    """Adds a row; readers see it whole or not at all."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
