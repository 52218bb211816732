"""What each side of attention carries to a block and brings home from it, forward and backward.

The q side brings (out, lse) home in the forward pass; in the backward pass it carries
(q, dout, lse, delta) and brings dq home, and the KV side brings (dk, dv) home. Nothing else
distinguishes the two passes: lowering, checker and executor are the same code for both.
"""

from dataclasses import dataclass
from typing import Literal

Side = Literal["q", "kv"]
WidthName = Literal["head_dim", "head_dim_v"]
DtypeRole = Literal["model", "out_return", "grad_return"]


@dataclass(frozen=True)
class Cargo:
    """One kind of travelling data: for each token and head `widths` wide numbers and a few scalars.

    Wide numbers have the dtype of `dtype_role`; scalars (lse, delta) the accumulate dtype.
    """

    name: str
    side: Side
    is_result: bool
    fields: tuple[str, ...]
    widths: tuple[WidthName, ...]
    dtype_role: DtypeRole
    num_scalars: int


Q = Cargo("q", "q", False, ("q",), ("head_dim",), "model", 0)
KV = Cargo("kv", "kv", False, ("k", "v"), ("head_dim", "head_dim_v"), "model", 0)
OUT = Cargo("o", "q", True, ("out", "lse"), ("head_dim_v",), "out_return", 1)
Q_GRAD = Cargo("g", "q", False, ("q", "dout", "lse", "delta"), ("head_dim", "head_dim_v"), "model", 2)
DQ = Cargo("dq", "q", True, ("dq",), ("head_dim",), "grad_return", 0)
DKV = Cargo("dkv", "kv", True, ("dk", "dv"), ("head_dim", "head_dim_v"), "grad_return", 0)

CARGOS = {cargo.name: cargo for cargo in (Q, KV, OUT, Q_GRAD, DQ, DKV)}


@dataclass(frozen=True)
class Pass:
    """The cargo that goes down each side's routes, and the result, if any, that comes back up."""

    name: str
    q_down: Cargo
    kv_down: Cargo
    q_up: Cargo | None
    kv_up: Cargo | None

    def down(self, side: Side) -> Cargo:
        return self.q_down if side == "q" else self.kv_down

    def up(self, side: Side) -> Cargo | None:
        return self.q_up if side == "q" else self.kv_up

    @property
    def cargos(self) -> tuple[Cargo, ...]:
        """All cargos in lane order: results first, since others wait for them (paper, Appendix A)."""
        cargos = (self.q_up, self.kv_up, self.q_down, self.kv_down)
        return tuple(cargo for cargo in cargos if cargo is not None)


FORWARD = Pass("forward", q_down=Q, kv_down=KV, q_up=OUT, kv_up=None)
BACKWARD = Pass("backward", q_down=Q_GRAD, kv_down=KV, q_up=DQ, kv_up=DKV)
