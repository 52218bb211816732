"""Point-to-point transfers of a group, started together and waited for together."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from charm_megatron.errors import TransferTimeout

Transfer = tuple[int, Tensor]
"""A rank of the group, and a contiguous byte tensor that goes to it or comes from it."""


class Transport(Protocol):
    """Starts groups of transfers, and ends them.

    Between two ranks transfers match in the order in which they were posted.
    """

    num_bytes_sent: int

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
    _blocks_host: bool = field(init=False)
    _waited_s: float = 0.0
    _marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._blocks_host = dist.get_backend(self.group) == "gloo"

    def post(self, sends: Sequence[Transfer], recvs: Sequence[Transfer]) -> list[dist.Work]:
        ops = [dist.P2POp(dist.irecv, x, group=self.group, group_peer=peer) for peer, x in recvs]
        ops += [dist.P2POp(dist.isend, x, group=self.group, group_peer=peer) for peer, x in sends]
        self.num_bytes_sent += sum(x.numel() for _, x in sends)
        return dist.batch_isend_irecv(ops)

    def wait(self, handle: object) -> None:
        assert isinstance(handle, list)
        if self._blocks_host:
            started_s = time.perf_counter()
            for work in handle:
                self._wait_blocking(work)
            self._waited_s += time.perf_counter() - started_s
            return
        before, after = _timing_event(), _timing_event()
        before.record()
        for work in handle:
            work.wait()
        after.record()
        self._marks.append((before, after))

    @property
    def exposed_s(self) -> float:
        """Exposed communication: how long the host (gloo) or the stream (NCCL) has stood still for transfers so far.

        On NCCL only waits that have passed on the device by now are counted.
        """
        while self._marks and self._marks[0][1].query():  # type: ignore[no-untyped-call]
            before, after = self._marks.pop(0)
            self._waited_s += before.elapsed_time(after) / 1e3
        return self._waited_s

    def _wait_blocking(self, work: dist.Work) -> None:
        try:
            work.wait(timedelta(seconds=self.deadline_s))
        except RuntimeError as error:
            rank = dist.get_rank(self.group)
            raise TransferTimeout(
                f"rank {rank} of the context-parallel group gave up a transfer (deadline {self.deadline_s:g} s): "
                f"{str(error).splitlines()[0]}; a peer has failed or is in another call"
            ) from error


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
