"""Point-to-point transfers of a group, started together and waited for together."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

Transfer = tuple[int, Tensor]
"""A rank of the group, and a contiguous byte tensor that goes to it or comes from it."""


class Transport(Protocol):
    """Starts groups of transfers, and ends them.

    Between two ranks transfers match in the order in which they were posted.
    """

    @property
    def num_bytes_sent(self) -> int:
        """Bytes posted so far."""
        ...

    def post(self, sends: Sequence[Transfer], recvs: Sequence[Transfer]) -> object:
        """Starts transfers together and returns a handle. Their tensors must not be touched until `wait`."""
        ...

    def wait(self, handle: object) -> None:
        """Returns when the transfers are done, or, on a GPU, when the current stream will see them done."""
        ...


class TransferLost(RuntimeError):
    """Transfers have not ended in time, or their peers are gone: `peers` are those, `why` is torch's reason."""

    def __init__(self, peers: Sequence[int], waited_s: float, why: str):
        super().__init__(f"transfers with ranks {list(peers)} were given up after {waited_s:.1f} s: {why}")
        self.peers, self.waited_s, self.why = tuple(peers), waited_s, why


@dataclass(frozen=True)
class Posted:
    """Transfers under way: each has its peer. `blocks_host`: waiting for them stops the host, not a stream."""

    works: Sequence[dist.Work]
    peers: Sequence[int]
    blocks_host: bool


@dataclass
class GroupTransport:
    """Transfers over a torch process group.

    On gloo each transfer runs on its own and `wait` blocks the host for at most `deadline_s`. On NCCL a post is one
    ncclGroup, `wait` orders the current stream after it, and the deadline is that of the process group's own watchdog.
    """

    group: dist.ProcessGroup
    deadline_s: float
    num_bytes_sent: int = 0

    def post(self, sends: Sequence[Transfer], recvs: Sequence[Transfer]) -> Posted:
        ops = [dist.P2POp(dist.irecv, x, group=self.group, group_peer=peer) for peer, x in recvs]
        ops += [dist.P2POp(dist.isend, x, group=self.group, group_peer=peer) for peer, x in sends]
        self.num_bytes_sent += sum(x.numel() for _, x in sends)
        transfers = [*recvs, *sends]
        works = dist.batch_isend_irecv(ops)
        # By the tensors, since a group may have a backend for each kind of device.
        return Posted(works, [peer for peer, _ in transfers], not any(x.is_cuda for _, x in transfers))

    def wait(self, handle: object) -> None:
        """Raises `TransferLost` for transfers on the host that do not end in time or fail."""
        assert isinstance(handle, Posted)
        started_s = time.monotonic()
        for work in handle.works:
            if not handle.blocks_host:
                work.wait()
                continue
            left_s = max(0.001, started_s + self.deadline_s - time.monotonic())
            try:
                work.wait(timedelta(seconds=left_s))
            except RuntimeError as error:
                raise self._lost(handle, time.monotonic() - started_s, error) from error

    @staticmethod
    def _lost(handle: Posted, waited_s: float, error: RuntimeError) -> TransferLost:
        pairs = zip(handle.works, handle.peers, strict=False)
        peers = sorted({peer for work, peer in pairs if not work.is_completed() or not work.is_success()})
        return TransferLost(peers, waited_s, str(error).splitlines()[0])
