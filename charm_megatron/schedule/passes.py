"""What each side of attention carries to a block and brings home from it, forward and backward.

The q side brings (out, lse) home in the forward pass; in the backward pass it carries
(q, dout, lse, delta) and brings dq home, and the KV side brings (dk, dv) home. Nothing else
distinguishes the two passes: lowering and checker are the same code for both.

Ring self-attention (arXiv:2105.13120) has no online softmax and takes two rounds either way: keys for the logits,
values for the outputs. Its q side holds the probabilities of whole rows, which never travel.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Side = Literal["q", "kv"]
Direction = Literal["forward", "backward"]
WidthName = Literal["head_dim", "head_dim_v"]
DtypeRole = Literal["model", "out_return", "grad_return"]


@dataclass(frozen=True)
class Payload:
    """One kind of travelling data: for each token and head `widths` wide numbers and a few scalars.

    Wide numbers have the dtype of `dtype_role`; scalars (lse, delta) the accumulate dtype.
    """

    name: str
    side: Side
    is_result: bool
    fields: tuple[str, ...]
    widths: tuple[WidthName, ...]
    dtype_role: DtypeRole
    num_stats: int


Q = Payload("q", "q", False, ("q",), ("head_dim",), "model", 0)
KV = Payload("kv", "kv", False, ("k", "v"), ("head_dim", "head_dim_v"), "model", 0)
OUT = Payload("o", "q", True, ("out", "lse"), ("head_dim_v",), "out_return", 1)
Q_GRAD = Payload("g", "q", False, ("q", "dout", "lse", "delta"), ("head_dim", "head_dim_v"), "model", 2)
DQ = Payload("dq", "q", True, ("dq",), ("head_dim",), "grad_return", 0)
DKV = Payload("dkv", "kv", True, ("dk", "dv"), ("head_dim", "head_dim_v"), "grad_return", 0)

K = Payload("k", "kv", False, ("k",), ("head_dim",), "model", 0)
V = Payload("v", "kv", False, ("v",), ("head_dim_v",), "model", 0)
DK = Payload("dk", "kv", True, ("dk",), ("head_dim",), "grad_return", 0)
DV = Payload("dv", "kv", True, ("dv",), ("head_dim_v",), "grad_return", 0)
P = Payload("p", "q", False, ("probabilities",), (), "model", 0)
DP = Payload("dp", "q", False, ("probabilities", "dout"), (), "model", 0)
DS = Payload("ds", "q", False, ("dlogits", "q"), (), "model", 0)

PAYLOADS = {payload.name: payload for payload in (Q, KV, OUT, Q_GRAD, DQ, DKV, K, V, DK, DV, P, DP, DS)}


@dataclass(frozen=True)
class Pass:
    """The payload that goes down each side's routes, and the result, if any, that comes back up.

    `direction` says which half of the method it belongs to, `name` which of its passes it is.
    """

    name: str
    direction: Direction
    q_down: Payload
    kv_down: Payload
    q_up: Payload | None
    kv_up: Payload | None

    def down(self, side: Side) -> Payload:
        return self.q_down if side == "q" else self.kv_down

    def up(self, side: Side) -> Payload | None:
        return self.q_up if side == "q" else self.kv_up

    @cached_property
    def payloads(self) -> tuple[Payload, ...]:
        """All payloads in lane order: results first, since others wait for them (paper, Appendix A)."""
        payloads = (self.q_up, self.kv_up, self.q_down, self.kv_down)
        return tuple(payload for payload in payloads if payload is not None)


FORWARD = Pass("forward", "forward", q_down=Q, kv_down=KV, q_up=OUT, kv_up=None)
BACKWARD = Pass("backward", "backward", q_down=Q_GRAD, kv_down=KV, q_up=DQ, kv_up=DKV)

LOGITS = Pass("logits", "forward", q_down=Q, kv_down=K, q_up=None, kv_up=None)
VALUES = Pass("values", "forward", q_down=P, kv_down=V, q_up=OUT, kv_up=None)
VALUES_BACKWARD = Pass("values_backward", "backward", q_down=DP, kv_down=V, q_up=None, kv_up=DV)
LOGITS_BACKWARD = Pass("logits_backward", "backward", q_down=DS, kv_down=K, q_up=DQ, kv_up=DK)

PASSES = {p.name: p for p in (FORWARD, BACKWARD, LOGITS, VALUES, VALUES_BACKWARD, LOGITS_BACKWARD)}
