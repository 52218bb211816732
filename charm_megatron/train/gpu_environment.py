"""What is set in a rank's environment before its GPU is used."""

import subprocess
from collections.abc import Callable, MutableMapping

from charm_megatron.config import RunConfig
from charm_megatron.topology.nvidia_smi import CAPABILITIES, least_capability
from charm_megatron.train.run_folder import RunFolder

ANSWER_S = 20.0
NCCL_TRACE_OPERATIONS = 2000

FSDP = frozenset({"use_megatron_fsdp", "use_torch_fsdp2"})
BLACKWELL = 10.0
"""Compute capability."""


def set_cuda_connections(
    config: RunConfig, environment: MutableMapping[str, str], find_capability: Callable[[], float | None]
) -> None:
    """One hardware queue, where Megatron demands it: for tensor and context parallelism on GPUs before Blackwell.

    With one, transfers and attention hold each other up. It refuses the same with sharded parameters. What the user
    has set is left alone.
    """
    flags = {name.replace("-", "_"): value for name, value in config.megatron.items() if value}
    is_split = any(flags.get(f"{way}_parallel_size", 1) != 1 for way in ("tensor_model", "context"))
    if not is_split or flags.keys() & FSDP or "CUDA_DEVICE_MAX_CONNECTIONS" in environment:
        return
    capability = find_capability()
    if capability is None or capability < BLACKWELL:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"


def keep_nccl_traces(folder: RunFolder, environment: MutableMapping[str, str]) -> None:
    """Has NCCL's process groups write their last operations into the run folder when one times out.

    That is torch's own flight recorder, `nccl_trace_rank_<rank>`; `torchfrtrace` reads it. Names since torch 2.9, and
    those before; what the user has set is left alone.
    """
    prefix = str(folder.path / "nccl_trace_rank_")
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        environment.setdefault(name, prefix)
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        environment.setdefault(name, str(NCCL_TRACE_OPERATIONS))
    environment.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def compute_capability() -> float | None:
    """The least of this host's GPUs, such as 9.0; None where nvidia-smi does not say."""
    try:
        done = subprocess.run(
            CAPABILITIES,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=ANSWER_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return least_capability(done.stdout)
