"""What is to be computed: one attention call over a whole sequence, before it is split over ranks."""

from dataclasses import dataclass

from charm_megatron.errors import WorkloadError, nearest

ITEMSIZE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Workload:
    """Sizes of one attention call, of all ranks of a context-parallel group together.

    `seq_len` counts tokens of the unsplit sequence; `num_heads` and `num_kv_heads` are those of one
    tensor-parallel rank. `head_dim` is the width of q and k, `head_dim_v` that of v and out.
    """

    batch: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str = "float32"
    causal: bool = True

    def __post_init__(self) -> None:
        for name in ("batch", "seq_len", "num_heads", "num_kv_heads", "head_dim", "head_dim_v"):
            if getattr(self, name) < 1:
                raise WorkloadError(f"{name} must be at least 1, but is {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise WorkloadError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly; "
                f"num_heads must be a multiple of num_kv_heads"
            )
        if self.dtype not in ITEMSIZE_BYTES:
            raise WorkloadError(f"unknown dtype {self.dtype!r}{nearest(self.dtype, ITEMSIZE_BYTES)}")

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element of q, k, v and out."""
        return ITEMSIZE_BYTES[self.dtype]

    @property
    def accumulate_dtype(self) -> str:
        """Dtype of accumulators, lse and delta: float32, or float64 where the model itself is float64."""
        return "float64" if self.dtype == "float64" else "float32"

    def block_flops(self, num_pairs: float, num_heads: int, *, backward: bool = False) -> float:
        """Floating-point operations for `num_pairs` (query, key) pairs of each sequence and `num_heads` heads.

        Forward: one product for logits, one for outputs. Backward: logits again, dv, dp, dq and dk.
        """
        products = 3 * self.head_dim + 2 * self.head_dim_v if backward else self.head_dim + self.head_dim_v
        return 2.0 * num_pairs * self.batch * num_heads * products
