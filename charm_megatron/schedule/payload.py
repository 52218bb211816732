"""Payloads: the kinds of tensors that travel between ranks, and what a row of each holds."""

from dataclasses import dataclass
from typing import Literal

Side = Literal["q", "kv"]
SIDES: tuple[Side, Side] = ("q", "kv")
WidthName = Literal["head_dim", "head_dim_v"]
DtypeRole = Literal["model", "out_return", "grad_return"]
Reduction = Literal["merge", "add"]


@dataclass(frozen=True)
class Payload:
    """One kind of travelling tensor: for each token and head the values of some fields, and a few statistics.

    `values` are names of tensors whose numbers lie side by side in a row, in the dtype of `dtype_role`; `widths` are
    their widths. `stats` are names of tensors with one number a row (lse, delta), in the accumulate dtype. Partial
    results are merged by their lse (`merge`) or added (`add`).
    """

    name: str
    side: Side
    values: tuple[str, ...]
    widths: tuple[WidthName, ...]
    stats: tuple[str, ...] = ()
    dtype_role: DtypeRole = "model"
    reduction: Reduction | None = None

    @property
    def is_result(self) -> bool:
        return self.reduction is not None

    @property
    def num_stats(self) -> int:
        return len(self.stats)


Q = Payload("q", "q", ("q",), ("head_dim",))
KV = Payload("kv", "kv", ("k", "v"), ("head_dim", "head_dim_v"))
OUT = Payload("o", "q", ("out",), ("head_dim_v",), ("lse",), "out_return", "merge")
Q_GRAD = Payload("g", "q", ("q", "dout"), ("head_dim", "head_dim_v"), ("lse", "delta"))
DQ = Payload("dq", "q", ("dq",), ("head_dim",), (), "grad_return", "add")
DKV = Payload("dkv", "kv", ("dk", "dv"), ("head_dim", "head_dim_v"), (), "grad_return", "add")

# Of ring self-attention (arXiv:2105.13120): keys and values travel one after the other, queries stay at home.
K = Payload("k", "kv", ("k",), ("head_dim",))
V = Payload("v", "kv", ("v",), ("head_dim_v",))
DK = Payload("dk", "kv", ("dk",), ("head_dim",), (), "grad_return", "add")
DV = Payload("dv", "kv", ("dv",), ("head_dim_v",), (), "grad_return", "add")
P = Payload("p", "q", (), ())
PV = Payload("pv", "q", ("out",), ("head_dim_v",), (), "out_return", "add")
DP = Payload("dp", "q", ("dout",), ("head_dim_v",), ("delta",))
DS = Payload("ds", "q", ("q",), ("head_dim",))

# What kernels take for out in the backward pass where it has not travelled: its row sums with dout are delta.
OUT_STAND_IN = Payload("s", "q", ("out",), ("head_dim_v",))

PAYLOADS = {payload.name: payload for payload in (Q, KV, OUT, Q_GRAD, DQ, DKV, K, V, DK, DV, P, PV, DP, DS)}
"""All that travel, by name."""
