"""Versions of megatron-core and Transformer Engine: which work, and what differs. Only this file knows.

0.16.1 is the oldest with the attention interface used here. `megatron.training` is part of the wheel from
0.19 on, and its `pretrain` has had the present signature since 0.19; 0.19.2 is the version that was tried.
Transformer Engine 2.9 is the oldest that megatron-core 0.16.1 accepts. 2.20.2 was tried: `tests/te` run with it, on
CPUs, up to its kernels. Of 2.17.1 the parameters that Megatron passes were compared; of the others nothing was tried.
"""

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from charm_megatron.errors import InvalidInput
from charm_megatron.mcore.monkeypatch import resolve, swapped, wrapped

Release = tuple[int, ...]

OLDEST: Release = (0, 16, 1)
OLDEST_FOR_PRETRAINING: Release = (0, 19, 2)
FIRST_UNKNOWN: Release = (0, 20)

OLDEST_TE: Release = (2, 9)
FIRST_UNKNOWN_TE: Release = (2, 21)

INSTALL_HINT = "pip install 'charm-megatron[megatron]' installs a version that works"


def installed_version() -> str:
    """The version of megatron-core. Imports nothing heavy.

    Raises `InvalidInput` where it is not installed.
    """
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        pass
    # A git checkout on PYTHONPATH carries no package metadata, but a file with its version.
    spec = find_spec("megatron.core") if find_spec("megatron") else None
    for folder in (spec and spec.submodule_search_locations) or ():
        info = Path(folder) / "package_info.py"
        numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", info.read_text("utf-8"), re.MULTILINE))
        return ".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH"))
    raise InvalidInput(f"megatron-core is not installed; {INSTALL_HINT}")


def is_installed() -> bool:
    """Whether there is a megatron-core, of any version. Imports nothing heavy."""
    try:
        installed_version()
    except InvalidInput:
        return False
    return True


def require_megatron() -> None:
    """Raises `InvalidInput` unless a megatron-core whose attention interface is known is installed."""
    require_megatron_version(installed_version())


def require_megatron_version(version: str) -> None:
    """Raises `InvalidInput` for a version of megatron-core whose attention interface is not known."""
    _require(version, OLDEST, "context-parallel attention")


def require_pretraining() -> None:
    """Raises `InvalidInput` unless `megatron.training` of a known version, and what it needs, is installed."""
    _require(installed_version(), OLDEST_FOR_PRETRAINING, "pretraining")
    if find_spec("megatron.training") is None:
        raise InvalidInput(f"megatron-core is installed without megatron.training; {INSTALL_HINT}")
    if find_spec("psutil") is None:
        raise InvalidInput(
            f"psutil, which Megatron needs to save checkpoints, is not installed; {INSTALL_HINT}"
        )


def _require(version: str, oldest: Release, purpose: str) -> None:
    if not oldest <= _release(version) < FIRST_UNKNOWN:
        raise InvalidInput(
            f"megatron-core {version} is not supported; {purpose} needs "
            f">={_dotted(oldest)},<{_dotted(FIRST_UNKNOWN)}; {INSTALL_HINT}"
        )


def _release(version: str) -> Release:
    numbers = re.match(r"\d+(\.\d+)*", version)
    if numbers is None:
        raise InvalidInput(f"megatron-core has version {version!r}, which is not a version number")
    return tuple(int(number) for number in numbers.group().split("."))


def _dotted(release: Release) -> str:
    return ".".join(map(str, release))


def training_arguments() -> Any:
    """Megatron's namespace of arguments; None where `megatron.training` is not in use."""
    module = sys.modules.get("megatron.training.global_vars")
    return getattr(module, "_GLOBAL_ARGS", None)


TE_EXTENSION = "megatron.core.extensions.transformer_engine"
TE_INSTALL_HINT = (
    f"pip install 'transformer-engine[pytorch]<{_dotted(FIRST_UNKNOWN_TE)}' installs one that works"
)


def megatron_te() -> Any:
    """Megatron's module of Transformer Engine classes; None where Transformer Engine is not installed.

    Raises `InvalidInput` where it is installed and broken, or of a version out of the range.
    """
    try:
        extension = import_module(TE_EXTENSION)
    except (OSError, ImportError) as error:
        # A part of it is missing, or was built for another torch or CUDA. Megatron survives ImportError only.
        raise InvalidInput(_broken_te(error)) from error
    if not extension.HAVE_TE or not isinstance(extension.TEDotProductAttention, type):
        if find_spec("transformer_engine") is None:
            return None
        raise InvalidInput(_broken_te("Megatron could not import transformer_engine.pytorch"))
    require_te_version(str(extension.get_te_version()))
    return extension


def require_te_version(version: str) -> None:
    """Raises `InvalidInput` for a version of Transformer Engine out of the range."""
    if not OLDEST_TE <= _release(version) < FIRST_UNKNOWN_TE:
        raise InvalidInput(
            f"transformer-engine {version} is not supported; charm accepts "
            f">={_dotted(OLDEST_TE)},<{_dotted(FIRST_UNKNOWN_TE)}; {TE_INSTALL_HINT}"
        )


def require_te() -> None:
    """Raises `InvalidInput` unless a Transformer Engine that works with Megatron is installed."""
    if megatron_te() is None:
        raise InvalidInput(
            f"transformer-engine is not installed; {TE_INSTALL_HINT}, or pass --transformer-impl local to do "
            f"without it"
        )


def _broken_te(problem: object) -> str:
    return (
        f"transformer-engine is installed but cannot be used ({' '.join(str(problem).split())}); "
        f"`python -c 'import torch, transformer_engine.pytorch'` shows why; {TE_INSTALL_HINT}"
    )


COMPILE_HELPERS = "megatron.core.datasets.utils:compile_helpers"
DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
OPTIMIZER_STATE = f"{DISTRIBUTED_OPTIMIZER}:DistributedOptimizer.state_dict"
OPTIMIZER_LOAD = f"{DISTRIBUTED_OPTIMIZER}:DistributedOptimizer.load_state_dict"


@contextmanager
def wheel_repairs() -> Iterator[None]:
    """Lets `megatron.training` of the wheel start, and runs of it be resumed, on every device.

    `initialize_megatron` runs `make` in the folder of the dataset helpers and exits where that fails. The
    wheel ships the helpers compiled, but no Makefile. A checkout with a Makefile is left alone.

    The distributed optimizer cannot be loaded with torch's Adam, which is used where neither Transformer Engine nor
    Apex is installed: before its first step that Adam has no state, while Megatron asserts one; parameters of
    float32 are written to as views of leaves that record gradients; and the counters of steps that the checkpoint
    holds are replaced by those from before it was loaded.
    """
    module, _ = resolve(COMPILE_HELPERS)
    has_makefile = (Path(module.__file__).parent / "Makefile").exists()
    optimizer_module, _ = resolve(f"{DISTRIBUTED_OPTIMIZER}:HAVE_APEX_OR_TE")
    with ExitStack() as stack:
        if not has_makefile:
            stack.enter_context(swapped(COMPILE_HELPERS, _helpers_are_compiled))
        if not optimizer_module.HAVE_APEX_OR_TE:
            stack.enter_context(wrapped(OPTIMIZER_STATE, _with_a_first_step))
            stack.enter_context(wrapped(OPTIMIZER_LOAD, _with_steps_of_their_own))
        yield


def _helpers_are_compiled() -> None:
    import megatron.core.datasets.helpers_cpp  # noqa: F401  # ImportError where they are not


def _with_a_first_step(state_dict: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Shows an optimizer that has no state yet as one whose step is 0; what is loaded next replaces it."""

    @functools.wraps(state_dict)
    def complete(self: Any) -> Any:
        inner = self.optimizer
        if getattr(inner, "state", None) or not hasattr(inner, "state"):
            return state_dict(self)
        import torch

        shown = {**inner.state_dict(), "state": {0: {"step": torch.tensor(0.0)}}}
        inner.state_dict = lambda: shown
        try:
            return state_dict(self)
        finally:
            del inner.state_dict

    return complete


def _with_steps_of_their_own(load_state_dict: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @functools.wraps(load_state_dict)
    def loaded(self: Any, state_dict: Any) -> Any:
        import torch

        groups = state_dict.get("optimizer", {}).get("param_groups", [])
        steps = {group["step"] for group in groups if group.get("step") is not None}
        with torch.no_grad():
            result = load_state_dict(self, state_dict)
        if len(steps) == 1:
            (step,) = steps
            for state in self.optimizer.state.values():
                if "step" in state:
                    state["step"] = torch.tensor(float(step))
        return result

    return loaded
