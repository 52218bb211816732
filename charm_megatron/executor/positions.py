"""Which tokens of the sequence a rank holds, as a tensor."""

import torch
from torch import Tensor

from charm_megatron.sharding import Sharding


def tokens_of_shard(sharding: Sharding, rank: int) -> Tensor:
    """The tokens of one rank's shard, by their positions in the whole sequence, int64 [s]."""
    chunks = (sharding.chunks[chunk] for chunk in sharding.chunks_of(rank))
    return torch.cat([torch.arange(c.start, c.start + c.length * c.stride, c.stride) for c in chunks])
