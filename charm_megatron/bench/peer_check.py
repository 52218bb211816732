"""Whether a peer computes attention at all: its results against unsharded attention in float64.

A time of wrong results is no time. Legend of shapes: [s, b, h, d], with h_k in place of h for k, v, dk and dv.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from charm_megatron.bench.peer_calls import PeerCall, make_call
from charm_megatron.bench.peers import Peer, tokens_of
from charm_megatron.kernels import BlockKernel, ReferenceKernel, TorchCpuKernel
from charm_megatron.workload import Workload

TENSORS = ("out", "dq", "dk", "dv")

# The reference holds whole matrices of logits on every rank, so the check has its own, short sequence.
TOKENS_PER_RANK = 64

# How far from float64 a peer may be, as a multiple of what torch's unsharded attention is in the same dtype. Peers
# round each block's results before they add them up; right ones reached a factor of 2 on 4 and 8 ranks.
TIMES_OWN_ERROR = 4.0


@dataclass(frozen=True)
class PeerCheck:
    """Largest differences over all ranks, relative to the largest entry, by tensor.

    `errors` are the peer's, `own` those of torch's unsharded attention in the same dtype.
    """

    errors: Mapping[str, float]
    own: Mapping[str, float]

    @property
    def max_error(self) -> float:
        return max(self.errors.values())

    @property
    def fault(self) -> str | None:
        """What a row says in place of a ratio; None: all is right. Not a number is wrong too."""
        wrong = {
            name: error
            for name, error in self.errors.items()
            if not error <= TIMES_OWN_ERROR * self.own[name]
        }
        if not wrong:
            return None
        return f"wrong: {', '.join(f'{name} error {error:.1e}' for name, error in wrong.items())}"


def check_peer(
    peer: Peer, group: dist.ProcessGroup, workload: Workload, tokens_per_rank: int = TOKENS_PER_RANK
) -> PeerCheck:
    """Runs a peer once on a short sequence with the workload's heads, widths, dtype and mask.

    All ranks of `group` call together, and all get the same answer.
    """
    short = replace(workload, seq_len=tokens_per_rank * group.size())
    return check_call(make_call(peer, group, short), group, short)


def check_call(call: PeerCall, group: dist.ProcessGroup, workload: Workload) -> PeerCheck:
    """As `check_peer`, for a call made already, on the whole workload."""
    whole = _draw(workload)
    expected = _unsharded(ReferenceKernel(), [x.double() for x in whole], workload)
    plain = _unsharded(TorchCpuKernel(), whole, workload)
    mine = torch.tensor(tokens_of(call.peer, workload, group.size(), dist.get_rank(group)))
    run = call.prepare(*(x[mine] for x in whole))
    run.forward()
    run.backward()
    errors = torch.tensor(
        [
            _difference(got, reference[mine], reference)
            for got, reference in zip(run.results(), expected, strict=True)
        ],
        dtype=torch.float64,
    )
    dist.all_reduce(errors, op=dist.ReduceOp.MAX, group=group)
    own = [_difference(got, reference, reference) for got, reference in zip(plain, expected, strict=True)]
    return PeerCheck(dict(zip(TENSORS, errors.tolist(), strict=True)), dict(zip(TENSORS, own, strict=True)))


def _draw(workload: Workload) -> list[Tensor]:
    """q, k, v and dout of the whole sequence, the same on every rank."""
    random, dtype = torch.Generator().manual_seed(workload.seq_len), getattr(torch, workload.dtype)
    sizes = (
        (workload.num_heads, workload.head_dim),
        (workload.num_kv_heads, workload.head_dim),
        (workload.num_kv_heads, workload.head_dim_v),
        (workload.num_heads, workload.head_dim_v),
    )
    return [
        torch.randn(workload.seq_len, workload.batch, *size, generator=random).to(dtype) for size in sizes
    ]


def _unsharded(kernel: BlockKernel, whole: list[Tensor], workload: Workload) -> tuple[Tensor, ...]:
    """out, dq, dk and dv by one block."""
    q, k, v, dout = whole
    scale, causal = workload.head_dim**-0.5, workload.mask.is_causal
    out, lse = kernel.forward(q, k, v, causal=causal, softmax_scale=scale)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return out, *kernel.backward(dout, q, k, v, lse, delta, causal=causal, softmax_scale=scale)


def _difference(value: Tensor, reference: Tensor, whole: Tensor) -> float:
    """Largest difference over the largest entry of the whole reference."""
    return float((value.double() - reference).abs().max() / whole.abs().max())
