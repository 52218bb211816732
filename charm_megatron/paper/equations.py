"""Equations 11 and 12 of the CHARM+ paper (arXiv:2611.05906): memory of the attention buffers of a rank.

Both count buffers of b * s * h float32 numbers: b the batch, s the tokens of a rank, h the hidden width.
"""

from charm_megatron.workload import Workload

NUM_BUFFERS = {"ring": 20, "charm": 24}
"""By schedule: equation 11 for the ring, equation 12 for CHARM+."""

ITEMSIZE_BYTES = 4


def memory_bytes(schedule: str, workload: Workload, cp_size: int) -> int:
    """Equation 11 (ring) or 12 (charm)."""
    hidden = workload.num_heads * workload.head_dim
    return NUM_BUFFERS[schedule] * ITEMSIZE_BYTES * workload.batch * (workload.seq_len // cp_size) * hidden
