"""The work between blocks of attention: partial results are merged and added, operands packed, element by element.

Legend of shapes: `s` rows, `b` batch, `h` heads, `w` the width of a tensor. Tensors may have any strides, save that a
last dimension `w` is contiguous, and any mix of floating dtypes: what is written is converted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from charm_megatron.errors import error_text

MOST_REASON_CHARACTERS = 80

Merged = tuple[Tensor, Tensor]
"""A partial result: out [s, b, h, w] and lse [s, b, h]."""


class Elementwise(Protocol):
    """What executors need beside attention itself; on a GPU each call is one launch."""

    name: str

    def merge(self, out_sum: Tensor, lse_sum: Tensor, parts: Sequence[Merged], *, is_first: bool) -> None:
        """Merges one or two partial results, in their order, into (out_sum [s, b, h, w], lse_sum [s, b, h]), in place.

        lse = logaddexp(lse_a, lse_b); out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b. A row without a finite
        logit has lse -inf; two of them merge into one. NaN stays NaN. `is_first`: the sums hold nothing yet.
        """
        ...

    def add(self, sums: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], *, is_first: bool) -> None:
        """Adds one or two partial results in their order, in place: each a tensor [s, b, h, w_i] for each of `sums`."""
        ...

    def place(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Writes the second tensor of each pair, [s, b, h, w_i] or [s, b, h], to the first; all share s, b and h."""
        ...

    def row_dot(self, dout: Tensor, out: Tensor, into: Tensor) -> None:
        """Writes rowsum(dout * out), delta [s, b, h], of tensors [s, b, h, w]."""
        ...

    def stand_in(self, dout: Tensor, delta: Tensor, into: Tensor) -> None:
        """Writes an `out` [s, b, h, w] whose row sums with dout [s, b, h, w] are delta [s, b, h]."""
        ...


class TorchElementwise:
    """By torch's own operators, some for each call."""

    name = "torch"

    def merge(self, out_sum: Tensor, lse_sum: Tensor, parts: Sequence[Merged], *, is_first: bool) -> None:
        for out, lse in parts:
            if is_first:
                out_sum.copy_(out)
                lse_sum.copy_(lse)
                is_first = False
                continue
            # The second weight is the sigmoid of how much larger its lse is.
            weight = torch.sigmoid(lse - lse_sum).masked_fill_(lse == -torch.inf, 0.0).unsqueeze(-1)
            out_sum.lerp_(out.to(out_sum.dtype), weight)
            torch.logaddexp(lse_sum, lse, out=lse_sum)

    def add(self, sums: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], *, is_first: bool) -> None:
        for part in parts:
            for total, x in zip(sums, part, strict=True):
                if is_first:
                    total.copy_(x)
                else:
                    total.add_(x)
            is_first = False

    def place(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for into, source in pairs:
            into.copy_(source)

    def row_dot(self, dout: Tensor, out: Tensor, into: Tensor) -> None:
        torch.sum(dout.to(into.dtype) * out.to(into.dtype), -1, out=into)

    def stand_in(self, dout: Tensor, delta: Tensor, into: Tensor) -> None:
        into.copy_(stand_in_out(dout, delta))


def stand_in_out(dout: Tensor, delta: Tensor) -> Tensor:
    """The shortest `out` whose row sums with `dout` are `delta`: dout * delta / |dout|^2.

    `dout` [s_q, b, h, d_v] model dtype, `delta` [s_q, b, h] float32 or float64; gives [s_q, b, h, d_v]
    in dout's dtype, zero where a row of dout is. It is no longer than the true out, so it fits in any
    dtype which that fits in, and rounding it changes delta by a rounding. Rows are scaled by their
    largest entry first: gradients of 1e-23 are ordinary in float32, their squares are zero.
    """
    wide = delta.dtype
    largest: Tensor = torch.linalg.vector_norm(dout, float("inf"), dim=-1, keepdim=True, dtype=wide)
    no_gradient = largest == 0  # a row with NaN is not one: it must stay visible
    largest = largest.masked_fill(no_gradient, 1.0)
    direction = dout.to(wide) / largest
    square = direction.square().sum(-1, keepdim=True).masked_fill(no_gradient, 1.0)
    # Two divisions: the product of the divisors could leave the range of the dtype, the quotients cannot.
    length = delta.unsqueeze(-1) / largest / square
    return (direction * length).to(dout.dtype)


@dataclass(frozen=True)
class ElementwiseSelection:
    """An implementation, and the reason for it, a clause for a start-up receipt."""

    implementation: Elementwise
    reason: str


def select_elementwise(device: torch.device) -> ElementwiseSelection:
    """Triton's kernels on GPUs where they compile and run; torch's operators elsewhere."""
    if device.type != "cuda":
        return ElementwiseSelection(TorchElementwise(), f"torch, as on every {device.type}")
    try:
        from charm_megatron.kernels.triton_elementwise import TritonElementwise

        fused = TritonElementwise()
        out, lse = torch.zeros(1, 1, 1, 8, device=device), torch.zeros(1, 1, 1, device=device)
        fused.merge(out, lse, [(out, lse)], is_first=False)
        torch.cuda.synchronize(device)
    except Exception as error:  # whatever a broken package or compiler raises
        why = error_text(error, MOST_REASON_CHARACTERS)
        return ElementwiseSelection(
            TorchElementwise(), f"torch, some launches each, because Triton fails: {why}"
        )
    return ElementwiseSelection(fused, "Triton, one launch each")
