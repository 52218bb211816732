"""Which packages are there, and whether they work together. Decides from versions and what `probe` says of each."""

import platform
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from charm_megatron import __version__
from charm_megatron.doctor.findings import Finding
from charm_megatron.doctor.probe import Facts
from charm_megatron.errors import InvalidInput
from charm_megatron.limits import OLDEST_NCCL
from charm_megatron.mcore.compat import (
    INSTALL_HINT,
    TE_INSTALL_HINT,
    installed_version,
    require_megatron_version,
    require_te_version,
)
from charm_megatron.units import numbered

Versions = Mapping[str, str | None]
"""Of distributions; None for one that is not installed."""

DISTRIBUTIONS = ("torch", "megatron-core", "transformer-engine", "flash-attn", "apex", "psutil")
OLDEST_TORCH = (2, 11)
"""As in pyproject.toml."""

NOT_INSTALLED = "not installed"
OPTIONAL = {
    "megatron-core": f"plans and proofs do without; for attention in Megatron, {INSTALL_HINT}",
    "transformer-engine": f"optional; {TE_INSTALL_HINT}",
    "flash-attn": "optional; torch's own flash attention is used",
    "apex": "optional; Megatron does without",
    "psutil": "Megatron needs it to save checkpoints; pip install psutil",
}
FLASH_REMEDY = "build it anew for this torch and CUDA, or pip uninstall flash-attn"
APEX_REMEDY = "build NVIDIA's apex anew with --cpp_ext --cuda_ext for this torch, or pip uninstall apex"


def installed_versions() -> dict[str, str | None]:
    """The versions of `DISTRIBUTIONS`. Imports none of them."""
    found: dict[str, str | None] = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = installed_version() if name == "megatron-core" else version(name)
        except (PackageNotFoundError, InvalidInput):
            found[name] = None
    return found


def package_findings(versions: Versions, probe: Callable[[str], Facts]) -> tuple[Finding, ...]:
    """What follows from `versions`; `probe` is asked only of packages that are there."""
    python = (Finding("charm-megatron", __version__), Finding("python", platform.python_version()))
    return (
        *python,
        *_torch(versions["torch"], probe),
        _megatron(versions["megatron-core"]),
        _transformer_engine(versions["transformer-engine"], probe),
        _flash_attn(versions["flash-attn"], probe),
        _apex(versions["apex"], probe),
        _present_or_absent("psutil", versions["psutil"]),
    )


def version_differences(of_rank: Mapping[int, Versions]) -> tuple[Finding, ...]:
    """Packages whose versions differ between the ranks of a job."""
    findings = []
    for name in DISTRIBUTIONS:
        ranks: dict[str, list[int]] = {}
        for rank, versions in sorted(of_rank.items()):
            ranks.setdefault(versions.get(name) or NOT_INSTALLED, []).append(rank)
        if len(ranks) > 1:
            found = "; ".join(f"{one} on {ranks_text(of)}" for one, of in ranks.items())
            remedy = "install the same version on every host"
            findings.append(Finding(name, found, "fault", remedy))
    return tuple(findings)


def ranks_text(ranks: list[int] | tuple[int, ...]) -> str:
    """Returns "rank 3", or "ranks 0-3, 6" for ascending `ranks`."""
    return numbered("rank", ranks)


def _torch(installed: str | None, probe: Callable[[str], Facts]) -> Iterator[Finding]:
    if installed is None:
        yield Finding("torch", NOT_INSTALLED, "fault", "attention needs it; see pytorch.org for your CUDA")
        return
    facts = probe("torch")
    if facts["problem"]:
        yield Finding("torch", installed, "fault", f"import torch fails: {facts['problem']}; install it anew")
        return
    oldest = ".".join(map(str, OLDEST_TORCH))
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    is_known = numbers is not None and (int(numbers[1]), int(numbers[2])) >= OLDEST_TORCH
    remedy = "" if is_known else f"charm needs torch {oldest} or newer; upgrade it"
    yield Finding("torch", installed, "ok" if is_known else "fault", remedy)
    yield from _of_torch(facts)


def _of_torch(facts: Facts) -> Iterator[Finding]:
    """CUDA, GPUs and backends. A machine without GPUs, or a torch without CUDA, is good for planning and gloo."""
    cuda, gpus, nccl = facts["cuda"], facts["gpus"], facts["nccl"]
    for_cpu = "attention then runs on CPUs, over gloo"
    yield Finding("CUDA of torch", cuda) if cuda else Finding("CUDA of torch", "none", "absent", for_cpu)
    if gpus:
        yield Finding("GPUs", counted(gpus))
    else:
        remedy = (
            for_cpu if cuda is None else f"{for_cpu}; where there are GPUs, see nvidia-smi and the driver"
        )
        yield Finding("GPUs", "none seen", "absent", remedy)
    if nccl:
        is_new = tuple(map(int, nccl.split("."))) >= OLDEST_NCCL
        remedy = "" if is_new else f"charm needs NCCL {'.'.join(map(str, OLDEST_NCCL))} or newer; upgrade it"
        yield Finding("NCCL", nccl, "ok" if is_new else "fault", remedy)
    else:
        remedy = "install a torch built with NCCL: several GPUs need it" if gpus else "needed for GPUs only"
        yield Finding("NCCL", "not in this torch", "fault" if gpus else "absent", remedy)
    if facts["gloo"]:
        yield Finding("gloo", "available")
    else:
        yield Finding(
            "gloo", "not in this torch", "fault", "install a torch built with gloo: ranks agree over it"
        )


def counted(names: list[str]) -> str:
    """As in "8 x NVIDIA H200", by their first appearance."""
    counts = {name: names.count(name) for name in names}
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def _megatron(installed: str | None) -> Finding:
    if installed is None:
        return _present_or_absent("megatron-core", installed)
    try:
        require_megatron_version(installed)
    except InvalidInput as error:
        return Finding("megatron-core", installed, "fault", str(error))
    return Finding("megatron-core", installed)


def _transformer_engine(installed: str | None, probe: Callable[[str], Facts]) -> Finding:
    name = "transformer-engine"
    if installed is None:
        return _present_or_absent(name, installed)
    try:
        require_te_version(installed)
    except InvalidInput as error:
        return Finding(name, installed, "fault", str(error))
    problem = probe(name)["problem"]
    if problem:
        return Finding(name, installed, "fault", f"it cannot be used: {problem}; {TE_INSTALL_HINT}")
    return Finding(name, installed)


def _flash_attn(installed: str | None, probe: Callable[[str], Facts]) -> Finding:
    problem = None if installed is None else probe("flash-attn")["problem"]
    if installed is not None and problem:
        return Finding("flash-attn", installed, "fault", f"import fails: {problem}; {FLASH_REMEDY}")
    return _present_or_absent("flash-attn", installed)


def _apex(installed: str | None, probe: Callable[[str], Facts]) -> Finding:
    if installed is None:
        return _present_or_absent("apex", installed)
    facts = probe("apex")
    if not facts.get("is_nvidias", True):
        remedy = "this is PyPI's apex, which has nothing to do with NVIDIA's; pip uninstall apex"
        return Finding("apex", installed, "fault", remedy)
    if facts["problem"]:
        return Finding("apex", installed, "fault", f"{facts['problem']}; {APEX_REMEDY}")
    return Finding("apex", installed)


def _present_or_absent(name: str, installed: str | None) -> Finding:
    if installed is None:
        return Finding(name, NOT_INSTALLED, "absent", OPTIONAL[name])
    return Finding(name, installed)
