"""Modules in place of the packages flash-attn 2 and 3: the parameters of each version, the results by the formulas.

`flash_attn_signatures.json` has the parameters as the packages' sources state them. A function made from them refuses a
call that the real one would refuse; what it gets is read as the packages' documentation says, and kept in `calls`.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from charm_megatron.kernels import ReferenceKernel
from charm_megatron.kernels.flash import aligned
from charm_megatron.workload import Band

SIGNATURES = json.loads((Path(__file__).parent / "flash_attn_signatures.json").read_text("utf-8"))
FLASH_2, FLASH_3 = "flash_attn.flash_attn_interface", "flash_attn_interface"


@dataclass
class StandIn:
    """One version of a package: its module, and what its functions were called with."""

    package: str
    version: str
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def module(self) -> ModuleType:
        recorded, module = SIGNATURES[self.package][self.version], ModuleType(self.package)
        results = recorded["forward_returns"].strip("()").replace("*rest", "out_accum, lse_accum").split(", ")

        def forward(given: dict[str, Any]) -> tuple[Tensor, ...]:
            out, lse = self.attend(given)
            known = {"out": out, "softmax_lse": lse}
            return tuple(known.get(name, torch.empty(0)) for name in results)

        def backward(given: dict[str, Any]) -> Tensor:
            self.write_gradients(given)
            return torch.empty(0)

        operators, tensors = recorded["operators"], ", ".join(["Tensor"] * len(results))
        module._flash_attn_forward = _made(self, "forward", operators, f"tuple[{tensors}]", forward)
        module._flash_attn_backward = _made(self, "backward", operators, "Tensor", backward)
        return module

    def attend(self, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """[b, s, h, d] -> out [b, s, h, d_v], lse [b, h, s]."""
        self._keep(given)
        q, k, v = (given[name].transpose(0, 1) for name in "qkv")
        out, lse = ReferenceKernel().forward(
            q, k, v, causal=False, softmax_scale=given["softmax_scale"], band=_band(given)
        )
        if self.package == FLASH_2:
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        return out.transpose(0, 1).contiguous(), lse.permute(1, 2, 0).contiguous()

    def write_gradients(self, given: dict[str, Any]) -> None:
        """Into dq, dk and dv."""
        self._keep(given)
        assert given["softmax_lse"].is_contiguous()
        operands = (given[name].transpose(0, 1) for name in ("dout", "q", "k", "v", "out"))
        gradients = ReferenceKernel().backward(
            *operands,
            given["softmax_lse"].permute(2, 0, 1),
            causal=False,
            softmax_scale=given["softmax_scale"],
            band=_band(given),
        )
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            assert given[name].is_contiguous()
            given[name].copy_(gradient.transpose(0, 1))

    def _keep(self, given: dict[str, Any]) -> None:
        self.calls.append(given)
        for name in {"q", "k", "v", "out", "dout"} & given.keys():
            x = given[name]
            if x is not None:
                assert x.stride(3) == 1, name
                assert x.shape[3] in range(8, 257, 8), name
                assert aligned(x) is x, name
        width, width_v = given["q"].shape[3], given["v"].shape[3]
        newest = self.package == FLASH_3 and "window_size_left" in given
        assert width == width_v or (newest and 128 < width <= 192 and 96 < width_v <= 128), (width, width_v)


def _band(given: dict[str, Any]) -> Band:
    """Row i sees the keys i + s_k - s_q - left .. i + s_k - s_q + right; a side below 0 is without bound."""
    apart = given["k"].shape[1] - given["q"].shape[1]
    left, right = given.get("window_size") or (given["window_size_left"], given["window_size_right"])
    if given.get("causal", given.get("is_causal")):
        right = 0
    num_rows, num_columns = given["q"].shape[1], given["k"].shape[1]
    lo = -(apart + right) if right >= 0 else 1 - num_columns
    hi = left - apart if left >= 0 else num_rows - 1
    return Band(lo, hi)


def _made(
    stand_in: StandIn, which: str, is_operator: bool, returns: str, compute: Callable[[dict[str, Any]], Any]
) -> Any:
    """A function with the recorded parameters that hands them to `compute`; an operator where the version has one."""
    name = f"_flash_attn_{which}"
    parameters = SIGNATURES[stand_in.package][stand_in.version][which]
    scope: dict[str, Any] = {"Tensor": Tensor, "compute": compute}
    exec(f"def {name}({parameters}) -> {returns}:\n    return compute(locals())", scope)
    if not is_operator:
        return scope[name]
    space = re.sub(r"\W", "_", f"stand_in_{stand_in.package}_{stand_in.version}")
    mutated = ("dq", "dk", "dv") if which == "backward" else ()
    return torch.library.custom_op(f"{space}::{name}", scope[name], mutates_args=mutated)
