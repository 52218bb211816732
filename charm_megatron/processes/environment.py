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
    if not all(text.isdecimal() and int(text) for text in sizes):
        raise TopologyError(
            f"WORLD_SIZE and LOCAL_WORLD_SIZE must be numbers of ranks, but are {' and '.join(sizes)}"
        )
    if not all(text.isdecimal() for text in ranks):
        raise TopologyError(f"RANK and LOCAL_RANK must be numbers, but are {' and '.join(ranks)}")
    return RankPlacement(int(ranks[0]), int(sizes[0]), int(ranks[1]), int(sizes[1]))


def threads_per_rank(num_ranks: int) -> int:
    """OMP_NUM_THREADS where it is set, else an even share of the cores that this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() else max(1, len(os.sched_getaffinity(0)) // num_ranks)
