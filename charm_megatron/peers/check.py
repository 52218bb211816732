"""Whether a peer computes attention at all: its results against unsharded attention in float64.

A peer whose results are wrong is not timed. Legend of shapes: [s, b, h, d], with h_k in place of h for k, v, dk and dv.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from charm_megatron.kernels.unsharded import (
    RESULTS,
    Shard,
    draw_shard,
    relative_error,
    unsharded_attention,
)
from charm_megatron.peers.blocks import BlockOperators
from charm_megatron.peers.calls import PeerCall, make_call
from charm_megatron.peers.registry import Peer, tokens_of
from charm_megatron.workload import Workload

# The judge holds whole matrices of logits on every rank, so the check has its own, short sequence.
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
    whole = draw_shard(workload.seq_len, workload.seq_len, workload)
    expected = unsharded_attention(*whole, workload.mask)
    plain = _operator_alone(whole, workload)
    mine = torch.tensor(tokens_of(call.peer, workload, group.size(), dist.get_rank(group)))
    run = call.prepare(*(x[mine] for x in whole))
    run.forward()
    run.backward()
    errors = torch.tensor(
        [
            relative_error(got, expected[name][mine], expected[name])
            for name, got in zip(RESULTS, run.results(), strict=True)
        ],
        dtype=torch.float64,
    )
    dist.all_reduce(errors, op=dist.ReduceOp.MAX, group=group)
    own = {name: relative_error(plain[name], expected[name]) for name in RESULTS}
    return PeerCheck(dict(zip(RESULTS, errors.tolist(), strict=True)), own)


def _operator_alone(whole: Shard, workload: Workload) -> dict[str, Tensor]:
    """`RESULTS` by what peers compute blocks with, on the whole sequence and in the workload's dtype."""
    q, k, v, dout = (x.permute(1, 2, 0, 3) for x in whole)  # [s, b, h, d] -> [b, h, s, d]
    causal, scale, blocks = workload.mask.is_causal, workload.softmax_scale, BlockOperators()
    out, lse = blocks.forward(q, k, v, causal=causal, softmax_scale=scale)
    gradients = blocks.backward(dout, q, k, v, out, lse, causal=causal, softmax_scale=scale)
    results = (out, *gradients)
    return {name: x.permute(2, 0, 1, 3) for name, x in zip(RESULTS, results, strict=True)}
