"""What is timed: an implementation of attention, be it one of our schedules or another library."""

from typing import Protocol

from torch import Tensor


class Implementation(Protocol):
    """Attention of this rank's shard. `forward` and then `backward` are timed; both may be repeated."""

    def forward(self) -> None: ...

    def backward(self) -> None: ...

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """out, dq, dk and dv of the last passes, [s, b, h, d]."""
        ...
