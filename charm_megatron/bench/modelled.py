"""Kernels that take the time of a block without its arithmetic, so that computing does not steal the network's CPU.

An accelerator computes beside the host that drives the network; on a CPU both share cores. A wait in place of
each block restores that, at the price of meaningless numbers: results made so are always labelled modelled.
"""

import time

import torch
from torch import Tensor

from charm_megatron.kernels import accumulate_dtype
from charm_megatron.workload import Band


class ModelledKernel:
    """Waits as long as a device with these rates, in FLOP/s, would compute; infinite: not at all. Returns zeros."""

    name = "modelled"

    def __init__(self, forward_flops_per_s: float, backward_flops_per_s: float):
        self.forward_flops_per_s = forward_flops_per_s
        self.backward_flops_per_s = backward_flops_per_s

    def grad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        softmax_scale: float,
        band: Band | None = None,
    ) -> tuple[Tensor, Tensor]:
        self._wait(q, k, q.shape[3] + v.shape[3], causal, band, self.forward_flops_per_s)
        lse = torch.zeros(q.shape[:3], dtype=accumulate_dtype(q.dtype), device=q.device)
        return torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device), lse

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
        band: Band | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._wait(q, k, 3 * q.shape[3] + 2 * v.shape[3], causal, band, self.backward_flops_per_s)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    @staticmethod
    def _wait(
        q: Tensor, k: Tensor, products: int, causal: bool, band: Band | None, flops_per_s: float
    ) -> None:
        rows, keys = q.shape[0], k.shape[0]
        whole = Band(0, rows - 1) if causal else band or Band(1 - keys, rows - 1)
        flops = 2.0 * whole.num_pairs(rows, keys) * q.shape[1] * q.shape[2] * products
        time.sleep(flops / flops_per_s)
