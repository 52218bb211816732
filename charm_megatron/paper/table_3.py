"""Table 3 of the CHARM+ paper (arXiv:2611.05906): peak memory of ring and CHARM+ on 8 L20, forward and backward.

The table gives batch, sequence length, heads and megabytes. It does not give the width of a head, the dtype, or
whether the sequence length is that of all ranks or of one; assumed here are 64, bfloat16, all ranks, and two NUMA
domains of four. The measured sums hold much that no count of attention's buffers has (13 GB where the equations
say 0.8), so only differences are compared: those of rows with the same product of all sizes differ by a factor of
two in the paper itself, and a prediction cannot be better than an order of magnitude. With a width of 128 the third
row is predicted 7.5 times too large.
"""

from dataclasses import dataclass

from charm_megatron.workload import Workload

NUM_DOMAINS, RANKS_PER_DOMAIN = 2, 4
HEAD_DIM = 64


@dataclass(frozen=True)
class Measured:
    """One row; MB as printed."""

    batch: int
    seq_len: int
    num_heads: int
    ring_mb: int
    charm_mb: int

    @property
    def difference_mb(self) -> int:
        return self.charm_mb - self.ring_mb

    @property
    def workload(self) -> Workload:
        heads = self.num_heads
        return Workload(self.batch, self.seq_len, heads, heads, HEAD_DIM, HEAD_DIM, "bfloat16")


TABLE_3 = (
    Measured(16, 1024, 32, 2179, 2215),
    Measured(16, 1024, 64, 3701, 3881),
    Measured(64, 8192, 32, 45079, 45423),
    Measured(128, 8192, 16, 44720, 45432),
    Measured(2, 53760, 12, 13123, 13467),
    Measured(4, 53760, 12, 19301, 20565),
    Measured(2, 26880, 12, 10745, 10803),
    Measured(4, 26880, 12, 14029, 14425),
)
