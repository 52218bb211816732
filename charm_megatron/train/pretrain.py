"""One pretraining run from configuration to summary: checks, run folder, ranks, picture."""

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from charm_megatron.config import RunConfig
from charm_megatron.errors import InvalidInput, LaunchError
from charm_megatron.mcore.compat import require_pretraining
from charm_megatron.train.checks import JobFacts, check_job, check_quickly, require_more_to_do
from charm_megatron.train.data import TextFolder
from charm_megatron.train.launch import SERVER, call_in_server, run_ranks
from charm_megatron.train.rank_job import RankJob, RunEvent
from charm_megatron.train.run_folder import RunFolder, read_rows


class View(Protocol):
    """Shows a run while it goes on."""

    def stage(self, text: str) -> None:
        """Says what happens before the first iteration."""

    def notice(self, sentence: str) -> None:
        """Says what should be known, and keeps nothing from going on."""

    def training(self, first_iteration: int, last_iteration: int) -> AbstractContextManager[None]:
        """Shows iterations inside the block."""

    def event(self, event: RunEvent) -> None:
        """A rank reported something."""


@dataclass(frozen=True)
class Summary:
    """What a finished run has to say for itself. A loss is None where there was none of its kind."""

    folder: RunFolder
    iterations: int
    first_loss: float | None
    last_loss: float | None
    validation_loss: float | None
    tokens_per_s: float


def run_pretrain(config: RunConfig, path: Path, resume: bool, view: View, trusted: bool = False) -> Summary:
    """Trains as `config` says and leaves everything in the run folder `path`.

    All that can be checked is checked before the folder is made. Raises `InvalidInput` for what the caller
    can mend, and then leaves no folder behind that it made; `LaunchError` where a rank fails. No rank is left
    running in any case. `trusted` resumes from a folder that other users may write to. To be called from the main
    thread.
    """
    folder = RunFolder(path.absolute())
    done = folder.check_resumable(trusted) if resume else folder.check_new()
    check_quickly(config, folder if resume else None)
    require_pretraining()
    view.stage("importing Megatron and checking its flags")
    SERVER.start()
    on_this_host = (config.launch.ranks,)
    facts: JobFacts = call_in_server(check_job, config, folder, resume, on_this_host)
    require_more_to_do(folder, done, facts)
    for warning in (*facts.warnings, *(() if resume else TextFolder.find(config.data.text).notices())):
        view.notice(warning)
    with _made(folder, config, resume):
        view.stage(f"starting {config.launch.ranks} ranks, building model and dataset")
        for sentence in folder.rewind(done) if resume else ():
            view.notice(sentence)
        with _full_disk_named(folder), view.training(done, facts.train_iters):
            run_ranks(RankJob(config, folder, facts.argv), config.launch.ranks, view.event)
        return summarize(folder, config)


@contextmanager
def _made(folder: RunFolder, config: RunConfig, resume: bool) -> Iterator[None]:
    """Makes the folder; removes it again where the input turns out to be invalid before the first iteration.

    No other run can write to it inside the block. Raises `InvalidInput` where one does.
    """
    new = [parent for parent in (folder.path, *folder.path.parents) if not parent.exists()]
    folder.make()
    with folder.locked():
        if not resume:
            folder.require_empty()
        try:
            folder.create(config)
            yield
        except InvalidInput:
            if not resume and not read_rows(folder.metrics):
                folder.discard(new)
            raise


FULL_BYTES = 1_000_000
"""A disk with less room than this is full: checkpoints and indexes are written in larger pieces."""


def _clause(error: LaunchError) -> str:
    """Which rank failed; the rest is its log."""
    return str(error).partition("\n")[0].partition(":")[0]


@contextmanager
def _full_disk_named(folder: RunFolder) -> Iterator[None]:
    """Where a rank fails and the disk is full, says so first: what ranks say of it is long, and often not that."""
    try:
        yield
    except LaunchError as error:
        with suppress(OSError):
            free = shutil.disk_usage(folder.path).free
            if free < FULL_BYTES:
                raise LaunchError(
                    f"the disk of {folder.path} is full ({free} bytes are free), and {_clause(error)}; its log is "
                    f"in {folder.logs}; {folder.standing()}"
                ) from error
        raise


def summarize(folder: RunFolder, config: RunConfig) -> Summary:
    """Reads the rows of a run, draws them, and returns the first and last of them."""
    from charm_megatron.train.plot import draw_losses

    steps, evaluations = read_rows(folder.metrics), read_rows(folder.evaluation)
    losses = [row["loss"] for row in steps if row["loss"] is not None]
    validation = [row["loss"] for row in evaluations if row["part"] == "validation"]
    draw_losses(folder.loss_picture, steps, evaluations, _title(config))
    return Summary(
        folder=folder,
        iterations=steps[-1]["iteration"] if steps else 0,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        validation_loss=validation[-1] if validation else None,
        tokens_per_s=_tokens_per_s(steps),
    )


def _title(config: RunConfig) -> str:
    cp_size = config.megatron.get("context_parallel_size", 1)
    domains = f", domains: {config.charm.domains}" if config.charm.domains != "hosts" else ""
    return f"schedule {config.charm.schedule}, {cp_size} context-parallel ranks{domains}"


def _tokens_per_s(steps: list[dict[str, Any]]) -> float:
    """Speed of the training steps, all but the first, which allocates and plans; 0 for a single step."""
    if len(steps) < 2:
        return 0.0
    time_s = sum(row["step_time_s"] for row in steps[1:])
    return float((steps[-1]["tokens"] - steps[0]["tokens"]) / time_s)
