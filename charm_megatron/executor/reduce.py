"""How partial results add up.

Accumulators are fp32 (fp64 for a float64 model), and partial results are taken in program order, whatever arrives
first: with a deterministic kernel results are bitwise repeatable.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from charm_megatron.executor.held import HeldTensors, columns
from charm_megatron.lowering.storage import Range
from charm_megatron.schedule.payload import Reduction


@dataclass(frozen=True)
class Partial:
    """A partial result: values [s, b, h, ..] side by side in a row, their lse [s, b, h] where they are merged by it.

    `rows` are the tokens that it covers, of those which the ranges it is added to have together.
    """

    values: Sequence[Tensor]
    stats: Tensor | None = None
    rows: slice = slice(None)


def add(held: HeldTensors, reduction: Reduction, into: Sequence[Range], partial: Partial) -> None:
    """Adds a partial result to accumulators."""
    for at in into:
        _REDUCTIONS[reduction](held, at, partial)


def _merge(held: HeldTensors, at: Range, partial: Partial) -> None:
    (out,), lse = partial.values, partial.stats
    assert lse is not None, "a result that is merged brings its lse"
    out_sum, lse_sum, part = held.values(at), held.stats(at)[..., 0], slice(at.first_row, at.last_row)
    if _is_part(partial.rows, out_sum.shape[0]):
        if at.is_fresh:
            out_sum.zero_()
            lse_sum.fill_(-torch.inf)
        merge_partial(out_sum[partial.rows], lse_sum[partial.rows], out, lse)
    elif at.is_fresh:
        out_sum.copy_(out[part])
        lse_sum.copy_(lse[part])
    else:
        merge_partial(out_sum, lse_sum, out[part], lse[part])


def _add(held: HeldTensors, at: Range, partial: Partial) -> None:
    for column, part in zip(columns(held.values(at), partial.values), partial.values, strict=True):
        if _is_part(partial.rows, column.shape[0]):
            if at.is_fresh:
                column.zero_()
            column[partial.rows].add_(part)
        elif at.is_fresh:
            column.copy_(part[at.first_row : at.last_row])
        else:
            column.add_(part[at.first_row : at.last_row])


_REDUCTIONS: Mapping[Reduction, Callable[[HeldTensors, Range, Partial], None]] = {
    "merge": _merge,
    "add": _add,
}


def merge_partial(out_sum: Tensor, lse_sum: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merges a partial result into (out_sum [s, b, h, d_v], lse_sum [s, b, h]), in place.

    lse = logaddexp(lse_a, lse_b); out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b, whose second weight
    is sigmoid(lse_b - lse_a). A row without a finite logit has lse -inf; two of them merge into one. NaN stays NaN.
    """
    weight = torch.sigmoid(lse - lse_sum).masked_fill_(lse == -torch.inf, 0.0).unsqueeze(-1)
    out_sum.lerp_(out.to(out_sum.dtype), weight)
    torch.logaddexp(lse_sum, lse, out=lse_sum)


def _is_part(rows: slice, num_rows: int) -> bool:
    return (rows.start or 0, num_rows if rows.stop is None else rows.stop) != (0, num_rows)
