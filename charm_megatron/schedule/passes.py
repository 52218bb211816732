"""Passes: what each side of attention carries to a block, brings home from it, and what is computed there.

The q side brings (out, lse) home in the forward pass; in the backward pass it carries (q, dout, lse, delta) and brings
dq home, and the KV side brings (dk, dv) home. Nothing else distinguishes the two: lowering and checker are the same
code for both, and the executor has one computation for each pass (`executor.computations`).

Ring self-attention (arXiv:2105.13120) has no online softmax and takes two rounds in each direction: keys for the
logits, values for the outputs. Its q side holds the probabilities of whole rows, which never travel.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from charm_megatron.schedule.payload import (
    DK,
    DKV,
    DP,
    DQ,
    DS,
    DV,
    KV,
    OUT,
    OUT_STAND_IN,
    PV,
    Q_GRAD,
    K,
    P,
    Payload,
    Q,
    Side,
    V,
    WidthName,
)


class Direction(StrEnum):
    """Which half of a method a pass belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


DIRECTIONS = tuple(Direction)


@dataclass(frozen=True)
class Pass:
    """The payload that goes down each side's routes, and the result, if any, that comes back up.

    `products` are the matrix products of a block, each by the head width over which it runs: what it costs. `held` are
    the tensors of a rank's shard that are alive during the pass, whatever the schedule.
    """

    name: str
    direction: Direction
    q_down: Payload
    kv_down: Payload
    q_up: Payload | None
    kv_up: Payload | None
    products: tuple[WidthName, ...]
    held: tuple[str, ...]
    stand_in: Payload | None = None
    """What is made, once, of a visiting q side beside what it brings along, and never travels."""

    def down(self, side: Side) -> Payload:
        """What travels to the blocks."""
        return {"q": self.q_down, "kv": self.kv_down}[side]

    def up(self, side: Side) -> Payload | None:
        """The result that travels home."""
        return {"q": self.q_up, "kv": self.kv_up}[side]

    @cached_property
    def results(self) -> tuple[Payload, ...]:
        """What comes home, q side first."""
        return tuple(payload for payload in (self.q_up, self.kv_up) if payload is not None)

    @cached_property
    def payloads(self) -> tuple[Payload, ...]:
        """All payloads in lane order: results first, since others wait for them (paper, Appendix A)."""
        return *self.results, self.q_down, self.kv_down


FORWARD = Pass(
    "forward",
    Direction.FORWARD,
    q_down=Q,
    kv_down=KV,
    q_up=OUT,
    kv_up=None,
    products=("head_dim", "head_dim_v"),  # logits, outputs
    held=("q", "k", "v", "out", "lse"),
)
BACKWARD = Pass(
    "backward",
    Direction.BACKWARD,
    q_down=Q_GRAD,
    kv_down=KV,
    q_up=DQ,
    kv_up=DKV,
    products=("head_dim", "head_dim_v", "head_dim_v", "head_dim", "head_dim"),  # logits again, dv, dp, dq, dk
    held=("q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv"),
    stand_in=OUT_STAND_IN,
)
LOGITS = Pass(
    "logits",
    Direction.FORWARD,
    q_down=Q,
    kv_down=K,
    q_up=None,
    kv_up=None,
    products=("head_dim",),
    held=("q", "k", "v"),
)
VALUES = Pass(
    "values",
    Direction.FORWARD,
    q_down=P,
    kv_down=V,
    q_up=PV,
    kv_up=None,
    products=("head_dim_v",),
    held=("q", "k", "v", "out", "lse"),
)
VALUES_BACKWARD = Pass(
    "values_backward",
    Direction.BACKWARD,
    q_down=DP,
    kv_down=V,
    q_up=None,
    kv_up=DV,
    products=("head_dim_v", "head_dim_v"),  # dv, dp
    held=("q", "k", "v", "out", "lse", "dout", "delta", "dv"),
)
LOGITS_BACKWARD = Pass(
    "logits_backward",
    Direction.BACKWARD,
    q_down=DS,
    kv_down=K,
    q_up=DQ,
    kv_up=DK,
    products=("head_dim", "head_dim"),  # dq, dk
    held=("q", "k", "v", "out", "lse", "dout", "delta", "dq", "dk", "dv"),
)

PASSES = {p.name: p for p in (FORWARD, BACKWARD, LOGITS, VALUES, VALUES_BACKWARD, LOGITS_BACKWARD)}
