"""Tables of the CHARM+ paper (arXiv:2611.05906) that benchmarks print beside their own figures."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """A row of Table 8: differences to unsharded FlashAttention on 8 L20, bf16, 8K tokens.

    Of each of 100 draws the largest and the mean; then the average over the draws.
    """

    tensor: str
    charm_max: float
    charm_mean: float
    ring_max: float
    ring_mean: float


TABLE_8 = (
    Difference("out", 0.000834147, 4.51229e-05, 0.000807648, 4.24147e-05),
    Difference("lse", 1.65642e-06, 2.94155e-07, 1.75893e-06, 3.04284e-07),
    Difference("dq", 0.0012629, 3.29077e-05, 0.00125977, 3.27659e-05),
    Difference("dk", 0.00287713, 3.53419e-05, 0.00289413, 3.53193e-05),
    Difference("dv", 0.00447177, 3.4294e-05, 0.0044812, 3.42894e-05),
)


@dataclass(frozen=True)
class Ablation:
    """A row of Table 4: milliseconds of the forward operator; no charm within one domain."""

    num_gpus: int
    gpu: str
    crosses: bool
    seq_len: int
    ring_ms: float
    rm_plus_ms: float
    charm_ms: float | None


TABLE_4 = (
    Ablation(4, "L20", False, 1792, 9.35, 10.29, None),
    Ablation(4, "L20", False, 7168, 36.86, 39.66, None),
    Ablation(8, "L20", True, 1792, 17.61, 25.91, 14.81),
    Ablation(8, "L20", True, 7168, 69.85, 98.49, 52.4),
    Ablation(4, "H20", False, 1792, 5.38, 4.76, None),
    Ablation(4, "H20", False, 7168, 38.62, 33.2, None),
    Ablation(8, "H20", False, 1792, 5.51, 3.65, None),
    Ablation(8, "H20", False, 7168, 26.79, 13.84, None),
    Ablation(16, "H20", True, 1792, 32.17, 39.04, 12.16),
    Ablation(16, "H20", True, 7168, 84.58, 98.98, 28.91),
)
