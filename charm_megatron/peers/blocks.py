"""What computes the blocks of peers that leave this to others: the same torch operator as our `torch` kernel."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from charm_megatron.kernels import BlockKernel, accumulate_dtype


class BlockOperators:
    """Attention of one block in the layout of torch's operators, q and out [b, h, s_q, d], k and v [b, h_k, s_k, d].

    lse is float32 [b, h, s_q]. Inputs may have any strides. `replaced` puts a kernel in the operators' place.
    """

    def __init__(self) -> None:
        self._kernel: BlockKernel | None = None

    @contextmanager
    def replaced(self, kernel: BlockKernel | None) -> Iterator[None]:
        """Computes with `kernel` inside; None: with the operators."""
        before, self._kernel = self._kernel, kernel
        try:
            yield
        finally:
            self._kernel = before

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Returns out and lse."""
        if self._kernel is None:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, attn_mask=None, scale=softmax_scale
            )
            return out, lse
        out, lse = self._kernel.forward(
            _rows_first(q), _rows_first(k), _rows_first(v), causal=causal, softmax_scale=softmax_scale
        )
        return _rows_third(out), lse.permute(1, 2, 0)  # [s, b, h] -> [b, h, s]

    def backward(
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dq, dk and dv; `out` and `lse` belong to all blocks of these queries together."""
        if self._kernel is None:
            wide = (x.to(accumulate_dtype(q.dtype)) for x in (dout, q, k, v, out))  # as our kernel does
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *wide, lse, 0.0, causal, attn_mask=None, scale=softmax_scale
            )
            dq, dk, dv = (x.to(q.dtype) for x in gradients)
            return dq, dk, dv
        dq, dk, dv = self._kernel.backward(
            _rows_first(dout),
            _rows_first(q),
            _rows_first(k),
            _rows_first(v),
            _rows_first(out),
            lse.permute(2, 0, 1),  # [b, h, s] -> [s, b, h]
            causal=causal,
            softmax_scale=softmax_scale,
        )
        return _rows_third(dq), _rows_third(dk), _rows_third(dv)


def _rows_first(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, 3)  # [b, h, s, d] -> [s, b, h, d]


def _rows_third(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3)  # [s, b, h, d] -> [b, h, s, d]
