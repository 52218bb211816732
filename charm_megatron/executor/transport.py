"""Point-to-point transfers of a group, started together and waited for together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from charm_megatron.errors import TransferTimeout

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


@dataclass
class GroupTransport:
    """Transfers over a torch process group.

    On gloo each transfer runs on its own and `wait` blocks the host for at most `deadline_s` each. On NCCL a
    post is one ncclGroup, `wait` orders the current stream after it, and the deadline is that of the process
    group's own watchdog.
    """

    group: dist.ProcessGroup
    deadline_s: float
    num_bytes_sent: int = 0
    blocks_host: bool = field(init=False)

    def __post_init__(self) -> None:
        self.blocks_host = dist.get_backend(self.group) == "gloo"

    def post(self, sends: Sequence[Transfer], recvs: Sequence[Transfer]) -> list[dist.Work]:
        ops = [dist.P2POp(dist.irecv, x, group=self.group, group_peer=peer) for peer, x in recvs]
        ops += [dist.P2POp(dist.isend, x, group=self.group, group_peer=peer) for peer, x in sends]
        self.num_bytes_sent += sum(x.numel() for _, x in sends)
        return dist.batch_isend_irecv(ops)

    def wait(self, handle: object) -> None:
        assert isinstance(handle, list)
        for work in handle:
            if self.blocks_host:
                self._wait_blocking(work)
            else:
                work.wait()

    def _wait_blocking(self, work: dist.Work) -> None:
        try:
            work.wait(timedelta(seconds=self.deadline_s))
        except RuntimeError as error:
            rank = dist.get_rank(self.group)
            raise TransferTimeout(
                f"rank {rank} of the context-parallel group gave up a transfer (deadline {self.deadline_s:g} s): "
                f"{str(error).splitlines()[0]}; a peer has failed or is in another call"
            ) from error
