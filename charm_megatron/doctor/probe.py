"""Facts of an installed package, collected in a process of its own: `python -m charm_megatron.doctor.probe NAME`.

What is broken may crash or hang when it is imported, and what asks for GPUs can fork no ranks afterwards.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from charm_megatron.errors import shortened

PROBE_S = 180.0
"""Imports of CUDA libraries from a shared file system take a minute and more."""
MOST_SAID_CHARACTERS = 160

Facts = Mapping[str, Any]
"""`problem` is why the package cannot be used, None where it can; the rest depends on the package."""


def probe(name: str, timeout_s: float = PROBE_S) -> Facts:
    """The facts of one of `PROBES`."""
    command = (sys.executable, "-m", "charm_megatron.doctor.probe", name)
    # Ranks of a job, too, ask for themselves alone.
    variables = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=variables,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"its import has not ended after {timeout_s:g} s"}
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        facts: Facts = json.loads(lines[-1])
        return facts
    said = [line for line in done.stderr.splitlines() if line.strip()]
    ended = f"its import ended Python with code {done.returncode}"
    return {"problem": shortened(said[-1] if said else ended, MOST_SAID_CHARACTERS)}


def nccl_version() -> str | None:
    """The NCCL that torch was built with; None without one. Imports torch."""
    import torch

    if not torch.distributed.is_available():
        return None
    from charm_megatron.executor import groups

    version = groups.nccl_version()
    return None if version is None else ".".join(map(str, version))


def _torch() -> dict[str, Any]:
    import torch

    has_distributed = torch.distributed.is_available()
    sees_gpu = torch.cuda.is_available()
    return {
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
        if sees_gpu
        else [],
        "nccl": nccl_version(),
        "gloo": has_distributed and torch.distributed.is_gloo_available(),
    }


def _transformer_engine() -> dict[str, Any]:
    """As Megatron imports it, where Megatron is there."""
    from charm_megatron.mcore.compat import is_installed, megatron_te

    if is_installed():
        megatron_te()
    else:
        importlib.import_module("transformer_engine.pytorch")
    return {}


def _flash_attn() -> dict[str, Any]:
    importlib.import_module("flash_attn.flash_attn_interface")
    return {}


def _apex() -> dict[str, Any]:
    """NVIDIA's is told from PyPI's unrelated package by its parts; `amp_C` is what it compiles."""
    from importlib.util import find_spec

    from charm_megatron.doctor.apex import is_nvidias_apex

    is_nvidias = is_nvidias_apex()
    problem = None
    if is_nvidias:
        for part in ("apex.optimizers", "apex.multi_tensor_apply"):
            importlib.import_module(part)
        problem = None if find_spec("amp_C") else "it was built without its CUDA extensions (amp_C)"
    return {"is_nvidias": is_nvidias, "problem": problem}


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": _torch,
    "transformer-engine": _transformer_engine,
    "flash-attn": _flash_attn,
    "apex": _apex,
}


def main() -> None:
    """Writes the facts as the last line of standard output."""
    try:
        facts = {"problem": None, **PROBES[sys.argv[1]]()}
    except Exception as error:
        facts = {"problem": shortened(f"{type(error).__name__}: {error}", MOST_SAID_CHARACTERS)}
    sys.stdout.write(f"\n{json.dumps(facts)}\n")
    sys.stdout.flush()
    os._exit(0)  # what broken extensions do at the end of Python is of no interest


if __name__ == "__main__":
    main()
