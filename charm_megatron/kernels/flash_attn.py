"""The packages flash-attn 2 and flash-attn 3, called directly: `_flash_attn_forward` and `_flash_attn_backward`.

These are the functions that their autograd functions call, with out and lse of a block and gradients under global
statistics. Their parameters differ from version to version, so each call passes those of ours that the installed
function has, by name; a function that asks for what is not known here, or lacks what a block needs, is passed over.
"""

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from charm_megatron.kernels.base import BlockSizes
from charm_megatron.kernels.flash import (
    AMPERE,
    FlashKernel,
    Window,
    aligned,
    flash_3_obstacle,
    flash_3_widths,
    merit_of,
)
from charm_megatron.kernels.packages import import_problem

FLASH_2, FLASH_3 = "flash_attn.flash_attn_interface", "flash_attn_interface"
TITLES = {FLASH_2: "flash-attn 2", FLASH_3: "flash-attn 3"}

ABSENT: Mapping[str, Mapping[str, object]] = {
    FLASH_2: {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None, "return_softmax": False},
    FLASH_3: dict.fromkeys(
        (
            *(
                "k_new",
                "v_new",
                "qv",
                "cu_seqlens_q",
                "cu_seqlens_k",
                "cu_seqlens_k_new",
                "seqused_q",
                "seqused_k",
            ),
            *(
                "sequed_q",
                "sequed_k",
                "max_seqlen_q",
                "max_seqlen_k",
                "page_table",
                "kv_batch_idx",
                "leftpad_k",
            ),
            *("rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale"),
        )
    ),
}
"""Parameters without a default, in some version, of what a block does not have."""

FORWARD, BACKWARD = "_flash_attn_forward", "_flash_attn_backward"
OPERANDS = {
    FORWARD: ("q", "k", "v"),
    BACKWARD: ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv"),
}
SETTINGS = ("softmax_scale", "causal", "is_causal", "window_size", "window_size_left", "window_size_right")
FOR_ALL_CARDS = (2, 8)
"""The first line of flash-attn 2 whose versions all run on GPUs newer than Hopper."""


@dataclass(frozen=True)
class _Function:
    """A function of a package, and the names of its parameters."""

    call: Callable[..., Any]
    names: frozenset[str]

    def __call__(self, **values: object) -> Any:
        return self.call(**{name: value for name, value in values.items() if name in self.names})


@dataclass(frozen=True)
class _Package:
    """What of an installed package computes a block."""

    forward: _Function
    backward: _Function


class FlashAttnKernel(FlashKernel):
    """What flash-attn 2 and 3 have in common. Rows are read by strides; gradients are written in rows of their own.

    With shared KV heads the backward rounds the gradient of each query head before it sums a group, in flash-attn 2.
    `torch.use_deterministic_algorithms(True)` reaches them.
    """

    module: str

    def obstacle(self, sizes: BlockSizes) -> str | None:
        problem = super().obstacle(sizes)
        if problem is not None:
            return problem
        found = _package(self.module)
        return found if isinstance(found, str) else None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float, window: Window | None
    ) -> tuple[Tensor, Tensor]:
        results = self.package.forward(
            q=q, k=k, v=v, out=None, **self._settings(causal, softmax_scale, window)
        )
        # Eight results up to flash-attn 2.6: out, q, k, v, out_padded, lse and two of dropout.
        return results[0], results[5] if len(results) == 8 else results[1]

    def gradients(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        softmax_scale: float,
        window: Window | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        self.package.backward(
            dout=aligned(dout),
            q=q,
            k=k,
            v=v,
            out=aligned(out),
            softmax_lse=lse,
            dq=dq,
            dk=dk,
            dv=dv,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._settings(causal, softmax_scale, window),
        )
        return dq, dk, dv

    @property
    def package(self) -> _Package:
        found = _package(self.module)
        assert isinstance(found, _Package), found
        return found

    def _settings(self, causal: bool, softmax_scale: float, window: Window | None) -> dict[str, object]:
        """Under all names that they have had."""
        reach = Window(-1, -1) if window is None else window
        return {
            **ABSENT[self.module],
            "softmax_scale": softmax_scale,
            "causal": causal,
            "is_causal": causal,
            "window_size": tuple(reach),
            "window_size_left": reach.left,
            "window_size_right": reach.right,
        }


class FlashAttn2Kernel(FlashAttnKernel):
    """FlashAttention 2 of the package flash-attn: float16 and bfloat16, d up to 256, one width for q, k and v."""

    name = "flash_attn_2"
    title = "flash-attn 2"
    module = FLASH_2

    def obstacle(self, sizes: BlockSizes) -> str | None:
        if sizes.capability < AMPERE:
            return f"flash-attn 2 needs a GPU of compute capability {AMPERE} or more, not {sizes.capability}"
        problem = super().obstacle(sizes)
        if problem is None and sizes.capability > 9 and _version("flash_attn") < FOR_ALL_CARDS:
            return f"flash-attn 2 on compute capability {sizes.capability} is taken from version 2.8 on"
        return problem

    def merit(self, sizes: BlockSizes) -> str:
        widths = self.widths(sizes.head_dim, sizes.head_dim_v)
        return merit_of("flash-attn 2", sizes, widths)


class FlashAttn3Kernel(FlashAttnKernel):
    """FlashAttention 3 of the package flash-attn 3, on Hopper GPUs: v may be narrower than q.

    `sm_margin` multiprocessors are left to NCCL.
    """

    name = "flash_attn_3"
    title = "flash-attn 3"
    module = FLASH_3

    def __init__(self, sm_margin: int = 0) -> None:
        self.sm_margin = sm_margin

    def leaving(self, sm_margin: int) -> "FlashAttn3Kernel":
        """The kernel that leaves so many multiprocessors to NCCL."""
        return FlashAttn3Kernel(sm_margin)

    def obstacle(self, sizes: BlockSizes) -> str | None:
        return flash_3_obstacle(sizes) or super().obstacle(sizes)

    def merit(self, sizes: BlockSizes) -> str:
        return "FlashAttention 3 is there for this Hopper GPU"

    def widths(self, head_dim: int, head_dim_v: int) -> tuple[int, int]:
        # mha_bwd takes a v of its own width since April 2025; the first change of parameters after that is this one.
        widths, found = flash_3_widths(head_dim, head_dim_v), _package(self.module)
        if isinstance(found, _Package) and "window_size_left" not in found.backward.names:
            return max(widths), max(widths)
        return widths

    def _settings(self, causal: bool, softmax_scale: float, window: Window | None) -> dict[str, object]:
        return {**super()._settings(causal, softmax_scale, window), "sm_margin": self.sm_margin}


@cache
def _package(module: str) -> _Package | str:
    """The functions of the package that is installed here, or why they cannot be had, a clause."""
    title = TITLES[module]
    problem = import_problem(title, module)
    if problem is not None:
        return problem
    functions = {}
    for name in (FORWARD, BACKWARD):
        function = getattr(sys.modules[module], name, None)
        if not callable(function):
            return f"{title} as it is installed has no {name}"
        parameters = _parameters(function)
        misfit = _misfit(module, name, parameters)
        if misfit is not None:
            return f"{title} as it is installed is of a version that is not known: {name} {misfit}"
        functions[name] = _Function(function, frozenset(parameters))
    return _Package(functions[FORWARD], functions[BACKWARD])


def _parameters(function: Callable[..., Any]) -> dict[str, bool]:
    """The names of its parameters, and whether each has a default. A custom operator says so in its schema only."""
    if isinstance(function, CustomOpDef):
        return {arg.name: arg.has_default_value() for arg in function._opoverload._schema.arguments}
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default is not parameter.empty for parameter in parameters}


def _misfit(module: str, function: str, parameters: Mapping[str, bool]) -> str | None:
    """What keeps a function with these parameters from computing a block."""
    alternatives = [
        ("softmax_scale",),
        ("causal", "is_causal"),
        ("window_size", "window_size_left"),
        *((name,) for name in OPERANDS[function]),
        *([("deterministic",)] if function == BACKWARD else []),
        *([("sm_margin",)] if module == FLASH_3 else []),
    ]
    for names in alternatives:
        if not any(name in parameters for name in names):
            return f"has no {names[0]}"
    known = {*ABSENT[module], *SETTINGS, *OPERANDS[function], "out", "deterministic", "sm_margin"}
    asked = [name for name, has_default in parameters.items() if not has_default and name not in known]
    return f"asks for {asked[0]}" if asked else None


def _version(module: str) -> tuple[int, ...]:
    """As in (2, 8); (0, 0) where a module has none."""
    found = re.match(r"(\d+)\.(\d+)", str(getattr(sys.modules.get(module), "__version__", "")))
    return tuple(map(int, found.groups())) if found else (0, 0)
