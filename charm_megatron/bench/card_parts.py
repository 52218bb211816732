"""What the checks of one card share: rows, sizes, tensors, and the judge of results."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from charm_megatron.kernels import BlockKernel, BlockSizes, ReferenceKernel, select_kernel

MOST_REASON_CHARACTERS = 200
FAILED = "failed"
"""In place of what was to be seen."""
DTYPE = torch.bfloat16
NOT_ON_CPU = "not on a CPU"
SCHEDULES = ("ring", "charm")
ERROR_LIMIT = 0.03
"""Of the largest value."""


@dataclass(frozen=True)
class CardRow:
    """One figure. `limit`: the most that it may be, where there is one; `note`: why there is no figure."""

    check: str
    what: str
    value: float | None
    unit: str
    limit: float | None = None
    note: str = ""

    @property
    def is_right(self) -> bool:
        """Whether nothing speaks against it: a figure within its limit, or none that has one."""
        if self.what == FAILED:
            return False
        return self.limit is None or (self.value is not None and self.value <= self.limit)


@dataclass(frozen=True)
class Sizes:
    """How large the checks are: `tokens` of timed blocks, batch and heads, and rows of the work between blocks.

    `per_rank` and `host_tokens`: tokens of a rank in groups, and where only the host's part counts.
    """

    tokens: tuple[int, ...]
    heads: int
    rows: int
    per_rank: int
    host_tokens: int


ON_GPU = Sizes((1024, 4096, 16384), 16, 2**20, 1024, 128)
ON_CPU = Sizes((256,), 2, 2**10, 16, 16)


def draw(device: torch.device, *shape: int) -> Tensor:
    """Normal numbers in `DTYPE`."""
    return torch.randn(shape, device=device, dtype=torch.float32).to(DTYPE)


def chosen_kernel(device: torch.device, widths: tuple[int, int]) -> BlockKernel:
    """The one that attention takes, for heads of these widths of q and k, and v."""
    return select_kernel("auto", BlockSizes.on(device, DTYPE, *widths)).kernel


def worst_error(got: Sequence[Tensor], operands: Sequence[Tensor], *, causal: bool, scale: float) -> float:
    """Of out, lse, dq, dk, dv against the formulas in float64: the largest error over the largest value."""
    reference, (q, k, v, dout) = ReferenceKernel(), (x.double() for x in operands)
    out, lse = reference.forward(q, k, v, causal=causal, softmax_scale=scale)
    grads = reference.backward(dout, q, k, v, out, lse, causal=causal, softmax_scale=scale)
    pairs = zip(got, (out, lse, *grads), strict=True)
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)
