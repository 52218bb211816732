"""Table 2 of the CHARM+ paper (arXiv:2611.05906): the GPUs of its experiments.

TFLOPS as printed, the peak in the model's dtype; GB/s of a transfer between two GPUs, one way. The paper gives no
latency. Kernels reach less than the printed rate, so measured rates may be given to commands instead.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One row; `across` and `inside` what the paper calls the hardware boundary."""

    name: str
    has_nvlink: bool
    num_gpus: int
    tflops: float
    across_gb_per_s: float
    inside_gb_per_s: float

    @property
    def flops_per_s(self) -> float:
        return self.tflops * 1e12

    @property
    def across_bytes_per_s(self) -> float:
        return self.across_gb_per_s * 1e9

    @property
    def inside_bytes_per_s(self) -> float:
        return self.inside_gb_per_s * 1e9


L20 = Gpu("L20", False, 8, 119.5, 14.7, 24.0)
H20 = Gpu("H20", True, 16, 148.0, 42.6, 297.2)
H100 = Gpu("H100", True, 32, 989.0, 42.5, 365.1)

TABLE_2 = (L20, H20, H100)
