"""The variables by which launchers (torchrun, or srun in a script) tell a process which rank it is."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from charm_megatron.errors import TopologyError


def is_rank(environment: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as a rank."""
    return {"RANK", "WORLD_SIZE"} <= environment.keys()


def is_later_rank(environment: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as a rank other than the first."""
    return is_rank(environment) and environment["RANK"] != "0"


@dataclass(frozen=True)
class RankPlacement:
    """Which rank a process is, of how many, and on which part of its node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    def variables(self, master_addr: str, master_port: int) -> dict[str, str]:
        """What torch.distributed and Megatron read on this rank, where all meet at `master_addr`."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": str(master_port),
        }


def launched_rank(environment: Mapping[str, str]) -> RankPlacement | None:
    """What a launcher has told this process; None where it is no rank of a job.

    Raises `TopologyError` where the variables are not numbers of ranks.
    """
    if not is_rank(environment):
        return None
    sizes = environment["WORLD_SIZE"], environment.get("LOCAL_WORLD_SIZE", "1")
    ranks = environment["RANK"], environment.get("LOCAL_RANK", "0")
    if not all(_is_number(text) and int(text) for text in sizes):
        raise TopologyError(
            f"WORLD_SIZE and LOCAL_WORLD_SIZE must be numbers of ranks, but are {' and '.join(sizes)}"
        )
    if not all(_is_number(text) for text in ranks):
        raise TopologyError(f"RANK and LOCAL_RANK must be numbers, but are {' and '.join(ranks)}")
    if int(ranks[0]) >= int(sizes[0]):
        raise TopologyError(f"RANK {ranks[0]} is none of WORLD_SIZE {sizes[0]}, which are numbered from 0")
    return RankPlacement(int(ranks[0]), int(sizes[0]), int(ranks[1]), int(sizes[1]))


def require_meeting_point(environment: Mapping[str, str]) -> None:
    """Raises `TopologyError` where a rank is not told at which address and port all ranks meet."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise TopologyError(
            f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}, which say where rank 0 listens; set them "
            f"as torchrun does, or unset RANK and WORLD_SIZE to have the ranks started here"
        )
    port = environment["MASTER_PORT"]
    if not (_is_number(port) and 0 < int(port) < 65536):
        raise TopologyError(f"MASTER_PORT must be a number from 1 to 65535, but is {port!r}")


def require_single_task(environment: Mapping[str, str]) -> None:
    """Raises `TopologyError` where srun has started several of a program that starts all ranks itself.

    srun tells its tasks so by SLURM_STEP_NUM_TASKS and SLURM_PROCID; older ones by SLURM_NTASKS, which the script of
    a job has too, but without a SLURM_STEP_ID.
    """
    if "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    if _is_number(tasks) and int(tasks) > 1:
        raise TopologyError(
            f"srun started {tasks} of this program, and each would start all ranks; let srun start one torchrun a "
            f"node, as scripts/slurm/pretrain.sbatch does, or set RANK=$SLURM_PROCID, WORLD_SIZE=$SLURM_NTASKS, "
            f"LOCAL_RANK=$SLURM_LOCALID, MASTER_ADDR and MASTER_PORT for each task"
        )


def threads_per_rank(num_ranks: int) -> int:
    """OMP_NUM_THREADS where it is set, else an even share of the cores that this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return (
        int(asked) if _is_number(asked) and int(asked) else max(1, len(os.sched_getaffinity(0)) // num_ranks)
    )


def _is_number(text: str) -> bool:
    """Whether a launcher can have meant it: plain digits, and few of them."""
    return text.isascii() and text.isdecimal() and len(text) < 10
