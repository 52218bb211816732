"""temporary"""

from collections.abc import Sequence
from typing import Protocol
import torch
from torch import Tensor
from charm_megatron.kernels.torch_flash import stand_in_out


class Elementwise(Protocol):
    def merge(
        self, out_sum: Tensor, lse_sum: Tensor, out: Tensor, lse: Tensor, *, is_first: bool
    ) -> None: ...
    def add(self, sums: Sequence[Tensor], parts: Sequence[Tensor], *, is_first: bool) -> None: ...
    def place(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None: ...
    def row_dot(self, dout: Tensor, out: Tensor, into: Tensor) -> None: ...
    def stand_in(self, dout: Tensor, delta: Tensor, into: Tensor) -> None: ...


class TorchElementwise:
    def merge(self, out_sum, lse_sum, out, lse, *, is_first):
        if is_first:
            out_sum.copy_(out)
            lse_sum.copy_(lse)
            return
        weight = torch.sigmoid(lse - lse_sum).masked_fill_(lse == -torch.inf, 0.0).unsqueeze(-1)
        out_sum.lerp_(out.to(out_sum.dtype), weight)
        torch.logaddexp(lse_sum, lse, out=lse_sum)

    def add(self, sums, parts, *, is_first):
        for s, p in zip(sums, parts, strict=True):
            s.copy_(p) if is_first else s.add_(p)

    def place(self, pairs):
        for a, b in pairs:
            a.copy_(b)

    def row_dot(self, dout, out, into):
        into.copy_((dout.to(into.dtype) * out.to(into.dtype)).sum(-1))

    def stand_in(self, dout, delta, into):
        into.copy_(stand_in_out(dout, delta))
