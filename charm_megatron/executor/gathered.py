"""Attention of a few rows over all keys and values of a group, which judges what a schedule has given them.

The shards go round one KV head at a time, and each is folded into a running softmax in float64: a rank never holds
more than one KV head of one shard beside its own. Nothing here knows plans, blocks or kernels.

Legend of shapes: s tokens of a rank, r sampled rows, b batch, h query heads, h_k KV heads, g = h / h_k, d and d_v head
widths.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from charm_megatron.executor.positions import tokens_of_shard
from charm_megatron.executor.sink import with_sink
from charm_megatron.kernels import accumulate_dtype
from charm_megatron.kernels.unsharded import visible_keys
from charm_megatron.sharding import Sharding
from charm_megatron.workload import Mask

NUM_ROUNDINGS = 4
"""Of an element of out to the model's dtype: probabilities, a block's out, a partial out on its way, the result."""
SUM_ROUNDINGS = 256
"""What adding up a row's exponentials may cost, in roundings of the accumulator: those of 65,536 tiles one after the
other, which grow with the square root, and of exp itself (2^-20 on a CPU, 2^-22 on a GPU)."""
HALF_EXP_ERROR = 2.0**-12
"""Of the exponential that torch's CPU kernel takes for half types, as it shows in lse; 1.2e-4 were measured."""
INPUT_ROUNDINGS = {"highest": 0.0, "high": 2.0**-11, "medium": 2.0**-8}
"""What products of float32 may round their factors to, by torch.get_float32_matmul_precision: TF32, bfloat16."""


@dataclass(frozen=True)
class RowResults:
    """Results of the sampled rows in float64, and how far rounding may take those of a schedule from them.

    out and out_limit [r, b, h, d_v]; lse and lse_limit [r, b, h]. `is_finite`: whether all keys, all values and the
    rows' queries are; else the results mean nothing.
    """

    out: Tensor
    lse: Tensor
    out_limit: Tensor
    lse_limit: Tensor
    is_finite: bool

    def with_sink(self, sink: Tensor) -> "RowResults":
        """The same with one more logit for each head, `sink` [h]. Nothing comes to differ by more through it."""
        out, lse = with_sink(self.out, self.lse, sink)
        return replace(self, out=out, lse=lse)


def attention_of_sample(
    group: dist.ProcessGroup,
    sharding: Sharding,
    mask: Mask,
    rows: Sequence[int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
) -> RowResults:
    """Rows `rows` of this rank's q [s, b, h, d] against k [s, b, h_k, d] and v [s, b, h_k, d_v] of all ranks.

    Collective over `group`: each rank sends its k and v to all others once.
    """
    rank, num_heads = dist.get_rank(group), k.shape[2]
    index = torch.tensor(rows, device=q.device)
    sampled = q[index].double()
    queries = sampled.reshape(
        *sampled.shape[:2], num_heads, -1, sampled.shape[3]
    )  # [r, b, h, d] -> [r, b, h_k, g, d]
    positions = tokens_of_shard(sharding, rank).to(q.device)[index]
    size = dist.get_world_size(group)
    seen = [visible_keys(mask, positions, tokens_of_shard(sharding, src).to(q.device)) for src in range(size)]
    heads = [_RunningSoftmax(queries[:, :, head], v.shape[3], softmax_scale) for head in range(num_heads)]
    is_finite = queries.isfinite().all()
    for src, head, keys, values in _shards(group, k, v):
        heads[head].add(keys.double(), values.double(), seen[src])
        is_finite = is_finite & keys.isfinite().all() & values.isfinite().all()
    found = [head.results(q.dtype) for head in heads]
    out, lse, out_limit, lse_limit = (torch.cat([one[i] for one in found], dim=2) for i in range(4))
    return RowResults(out, lse, out_limit, lse_limit, bool(is_finite))


def _shards(group: dist.ProcessGroup, k: Tensor, v: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """(rank, KV head, its k [s, b, d], its v [s, b, d_v]) of every shard, on all ranks in the same order."""
    rank, widths = dist.get_rank(group), [k.shape[3], v.shape[3]]
    for head in range(k.shape[2]):
        mine = torch.cat([k[:, :, head], v[:, :, head]], dim=-1)
        theirs = torch.empty_like(mine)
        for src in range(dist.get_world_size(group)):
            shard = mine if src == rank else theirs
            # As bytes: not every backend sends every dtype.
            dist.broadcast(shard.view(-1).view(torch.uint8), group=group, group_src=src)
            keys, values = shard.split(widths, dim=-1)  # type: ignore[no-untyped-call]
            yield src, head, keys, values


class _RunningSoftmax:
    """Attention of rows [r, b, g, d] of one KV head, shard by shard."""

    def __init__(self, queries: Tensor, head_dim_v: int, softmax_scale: float) -> None:
        self._queries, self._scale = queries, softmax_scale
        rows = queries.shape[:-1]
        self._max = queries.new_full(rows, -torch.inf)
        self._sum = queries.new_zeros(rows)
        self._out = queries.new_zeros(*rows, head_dim_v)
        self._sizes = queries.new_zeros(*rows, head_dim_v)  # of sum(p * |v|)
        self._key_norm = queries.new_zeros(queries.shape[1])

    def add(self, keys: Tensor, values: Tensor, seen: Tensor) -> None:
        """Keys [t, b, d] and values [t, b, d_v] of a shard, in float64; `seen` is bool [r, t]."""
        logits = torch.einsum("rbgd,tbd->rbgt", self._queries, keys) * self._scale
        logits = logits.masked_fill(~seen[:, None, None], -torch.inf)
        new_max = torch.maximum(self._max, logits.amax(-1))
        stable = new_max.masked_fill(new_max == -torch.inf, 0.0)  # no key seen so far
        weights, shrunk = (logits - stable[..., None]).exp(), (self._max - stable).exp()
        self._max, self._sum = new_max, self._sum * shrunk + weights.sum(-1)
        self._out = self._out * shrunk[..., None] + torch.einsum("rbgt,tbd->rbgd", weights, values)
        self._sizes = self._sizes * shrunk[..., None] + torch.einsum("rbgt,tbd->rbgd", weights, values.abs())
        self._key_norm = torch.maximum(self._key_norm, keys.norm(dim=-1).amax(0))

    def results(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """out [r, b, g, d_v], lse [r, b, g], and the limits of both for a model of `dtype`; see docs/numerics.md."""
        lse = self._max + self._sum.log()
        # Products of q and k add up to no more than this, by Cauchy and Schwarz.
        size = self._scale * self._queries.norm(dim=-1) * self._key_norm[:, None]
        lse_limit = sum(_lse_limit(size, self._queries.shape[-1], x) for x in (dtype, torch.float64))
        assert isinstance(lse_limit, Tensor), "a sum of tensors"
        rounding = NUM_ROUNDINGS * torch.finfo(dtype).eps / 2
        total = self._sum[..., None]
        out_limit = self._sizes / total * (rounding + 2 * lse_limit[..., None])
        return self._out / total, lse, out_limit, lse_limit


def _lse_limit(size: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """How far a kernel's lse may be from the exact one, where products of q and k add up to `size`."""
    rounding = torch.finfo(accumulate_dtype(dtype)).eps / 2
    of_inputs = INPUT_ROUNDINGS[torch.get_float32_matmul_precision()] if dtype == torch.float32 else 0.0
    of_exp = HALF_EXP_ERROR if dtype.itemsize == 2 else 0.0
    return size * (head_dim * rounding + 2 * of_inputs) + SUM_ROUNDINGS * rounding + of_exp
