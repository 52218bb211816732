"""A run whose ranks are started by something else: torchrun, srun, or a scheduler of one's own.

Each process runs its own rank, and its output goes where the launcher sends it.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from charm_megatron.config import RunConfig
from charm_megatron.errors import ConfigError, InvalidInput
from charm_megatron.mcore.compat import require_pretraining
from charm_megatron.processes.environment import launched_rank, require_meeting_point
from charm_megatron.processes.job import job_heartbeats
from charm_megatron.processes.orphans import end_forks_with_this_process
from charm_megatron.topology.from_launcher import ranks_of_hosts
from charm_megatron.train.checks import check_job, check_quickly, require_more_to_do
from charm_megatron.train.data import TextFolder
from charm_megatron.train.gpu_environment import compute_capability, keep_nccl_traces, set_cuda_connections
from charm_megatron.train.pretrain import Summary, summarize
from charm_megatron.train.rank_job import RankJob
from charm_megatron.train.run_folder import RunFolder


def run_as_rank(
    config: RunConfig,
    path: Path | None,
    resume: bool,
    environment: Mapping[str, str],
    say: Callable[[str], None],
    trusted: bool = False,
) -> Summary | None:
    """Runs this process's rank; returns the summary on the last rank, which has the losses.

    The same checks as for ranks of our own; rank 0 makes the run folder, which all must see under the same
    path, and has `say` print what should be known. `trusted` as for `run_pretrain`. Raises `InvalidInput` for what
    the caller can mend.
    """
    if path is None:
        raise InvalidInput("--out must be given where ranks are started by something else, the same to all")
    placement = launched_rank(environment)
    assert placement is not None, "the caller has looked"
    rank, world_size = placement.rank, placement.world_size
    config = _with_ranks(config, world_size)
    require_meeting_point(environment)
    folder = RunFolder(path.absolute())
    done = 0
    if resume:
        done = folder.check_resumable(trusted, is_first_rank=rank == 0)
    elif rank == 0:
        folder.check_new()
    check_quickly(config, folder if resume else None)
    require_pretraining()
    facts = check_job(config, folder, resume, ranks_of_hosts(environment, world_size))
    require_more_to_do(folder, done, facts)
    with ExitStack() as stack:
        if rank == 0:
            folder.make()
            stack.enter_context(folder.locked())
            if not resume:
                folder.require_empty()
            folder.create(config)
            news = folder.rewind(done) if resume else TextFolder.find(config.data.text).notices()
            for sentence in (*facts.warnings, *news):
                say(sentence)
        from charm_megatron.train.job import run_rank

        end_forks_with_this_process()
        keep_nccl_traces(folder, os.environ)
        set_cuda_connections(config, os.environ, compute_capability)
        with job_heartbeats(environment, config.charm.deadline_s):
            run_rank(RankJob(config, folder, facts.argv), _ignore)
        return summarize(folder, config) if rank == world_size - 1 else None


def _ignore(kind: str, row: dict[str, Any]) -> None:
    """Megatron's own log shows the progress of these runs."""


def _with_ranks(config: RunConfig, world_size: int) -> RunConfig:
    if "ranks" in config.launch.model_fields_set and config.launch.ranks != world_size:
        raise ConfigError(
            f"launch.ranks is {config.launch.ranks}, but {world_size} ranks were started; start as many, or "
            f"leave launch.ranks out"
        )
    launch = config.launch.model_copy(update={"ranks": world_size})
    return config.model_copy(update={"launch": launch})
