"""Attention over a split sequence as functions, for models that are not Megatron's.

Legend of shapes: s tokens of this rank, b batch, h query heads, h_k KV heads, d and d_v head widths.
"""

from functools import lru_cache
from pathlib import Path
from typing import Literal, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from charm_megatron.config import CharmConfig, parse_section
from charm_megatron.errors import WorkloadError, quoted
from charm_megatron.executor import AttentionRuntime
from charm_megatron.executor.groups import group_place, require_sends
from charm_megatron.executor.positions import tokens_of_shard
from charm_megatron.executor.uncompiled import uncompiled
from charm_megatron.reading import is_whole
from charm_megatron.sharding import Sharding, make_sharding
from charm_megatron.workload import Mask

Group = dist.ProcessGroup | None

MOST_RUNTIMES = 16
"""Combinations of settings whose plans are kept. With more, those of the one used longest ago are made again."""


class Settings(TypedDict, total=False):
    """What `CharmConfig` sets beside the schedule, under the same names."""

    domains: str | int
    kernel: str
    sm_margin: int
    out_return_dtype: Literal["model", "float32"]
    grad_return_dtype: Literal["model", "float32", "by_link"]
    keep_kv_mib: float
    prefetch_depth: int
    fuse: bool
    communicators: Literal["auto", "one", "two"]
    idle_memory_mib: int
    check_calls: bool
    deadline_s: float
    flight_folder: Path | None


@uncompiled
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group,
    mask: Mask | str = "causal",
    schedule: str = "charm",
    layout: str = "zigzag",
    softmax_scale: float | None = None,
    sink: Tensor | None = None,
    **settings: Unpack[Settings],
) -> Tensor:
    """Exact attention of this rank's queries over the whole sequence; differentiable.

    q [s, b, h, d], k [s, b, h_k, d] and v [s, b, h_k, d_v] are this rank's shard in `layout` (see `shard`), float64 to
    float16. Returns out [s, b, h, d_v] in q's dtype. `group` are the ranks that the sequence is split over; None: all.
    `mask` is `causal`, `none`, `window:LEFT,RIGHT`, `documents:LENGTH,..`, these joined by +, or a `Mask`.
    `schedule` is a planner's name, or the path of a schedule in JSON. `softmax_scale` is 1 / sqrt(d) when None.
    `sink` [h], the same on all ranks, is one more logit of each head in every softmax, with a value of zero: learned,
    or zeros for off-by-one softmax. Its gradient is that of this rank's queries, to be added up over the group.
    `settings` are those of `CharmConfig`: `domains`, `kernel` and so on. `self_check` has no effect here: only
    Megatron's layers check themselves.

    Collective over `group`: all its ranks make the same call. Domains, schedules and buffers are kept per process for
    each combination of settings; `AttentionRuntime` keeps them where its owner wants them.
    Raises a kind of `InvalidInput` for what cannot be done as asked.
    """
    config = parse_section(CharmConfig, {"schedule": schedule, **settings}, "context_parallel_attention")
    runtime = _runtime(config)
    return runtime.attention(
        q, k, v, group=group, mask=mask, softmax_scale=softmax_scale, sink=sink, layout=layout
    )


@lru_cache(maxsize=MOST_RUNTIMES)
def _runtime(config: CharmConfig) -> AttentionRuntime:
    """One per process and settings, for callers who want to keep none."""
    return AttentionRuntime(config)


def shard(
    x: Tensor,
    *,
    group: Group,
    layout: str = "zigzag",
    dim: int = 0,
    documents: tuple[int, ...] = (),
) -> Tensor:
    """Returns this rank's part of a whole sequence, whose tokens lie along `dim` of `x`; nothing is sent.

    `documents` are the lengths of a packed sequence, which the layout `document_zigzag` cuts one by one. Raises
    `WorkloadError` for a length that the layout cannot split.
    """
    sharding, rank = _sharding(_length(x, dim), group, layout, documents)
    return x.index_select(dim, tokens_of_shard(sharding, rank).to(x.device))


def unshard(
    x: Tensor,
    *,
    group: Group,
    layout: str = "zigzag",
    dim: int = 0,
    documents: tuple[int, ...] = (),
) -> Tensor:
    """The whole sequence from the parts `x` of all ranks, on every rank: the inverse of `shard`.

    Collective over `group`; carries no gradient.
    """
    found, _, size = group_place(group)
    sharding, _ = _sharding(_length(x, dim) * size, group, layout, documents)
    require_sends(found, x.device)
    part = x.detach().movedim(dim, 0).contiguous()
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(parts, part, group=group)
    whole = part.new_empty((len(part) * size, *part.shape[1:]))
    for rank, from_rank in enumerate(parts):
        whole[tokens_of_shard(sharding, rank).to(x.device)] = from_rank
    return whole.movedim(0, dim)


def positions(
    seq_len: int,
    *,
    group: Group,
    layout: str = "zigzag",
    documents: tuple[int, ...] = (),
    device: torch.device | str | None = None,
) -> Tensor:
    """The positions of this rank's tokens in the sequence, int64 [s], as rotary embeddings need them.

    They count from the start of the sequence, or with `documents` from that of each token's document.
    """
    sharding, rank = _sharding(seq_len, group, layout, documents)
    tokens = tokens_of_shard(sharding, rank)
    if documents:
        stops = torch.tensor(documents).cumsum(0)
        starts = stops - torch.tensor(documents)
        tokens = tokens - starts[torch.searchsorted(stops, tokens, right=True)]
    return tokens.to(device)


def _length(x: Tensor, dim: int) -> int:
    """The length of `x` along `dim`. Raises `WorkloadError` where there is no such dimension, or no tensor."""
    if not isinstance(x, Tensor):
        raise WorkloadError(f"a sequence to split is a tensor, but is {type(x).__name__}")
    if not is_whole(dim) or not -x.dim() <= dim < x.dim():
        raise WorkloadError(f"dim {quoted(dim)} is no dimension of a tensor of shape {list(x.shape)}")
    return x.shape[dim]


def _sharding(seq_len: int, group: Group, layout: str, documents: tuple[int, ...]) -> tuple[Sharding, int]:
    if not isinstance(documents, tuple):
        raise WorkloadError(f"documents are a tuple of lengths, but are {type(documents).__name__}")
    _, rank, size = group_place(group)
    return make_sharding(layout, size, seq_len, documents), rank
