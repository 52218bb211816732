"""What a run is to do, sent by the launcher to each rank, and what ranks report. Imports neither torch nor Megatron."""

from dataclasses import dataclass
from typing import Any

from charm_megatron.config import RunConfig
from charm_megatron.train.run_folder import RunFolder


@dataclass(frozen=True)
class RankJob:
    """What a run is to do: the same on every rank, and sent to each."""

    config: RunConfig
    folder: RunFolder
    argv: tuple[str, ...]


@dataclass(frozen=True)
class RunEvent:
    """Something that a rank reports while it runs."""

    kind: str
    row: dict[str, Any]
