"""Exposed communication, measured: how long a rank stands still for transfers."""

import time
from collections import deque
from collections.abc import Sequence

import torch

from charm_megatron.executor.transport import GroupTransport, Posted, Transfer


class Stopwatch:
    """A transport whose waits are timed while `is_running`; otherwise it costs nothing.

    On gloo the host waits, and its clock is read; on NCCL the stream waits, between two events. Events that have passed
    are read and dropped at the next wait, so that they do not pile up where nobody asks.
    """

    def __init__(self, transport: GroupTransport, *, is_running: bool = False):
        self.transport, self.is_running = transport, is_running
        self._waited_s = 0.0
        self._marks: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @property
    def num_bytes_sent(self) -> int:
        return self.transport.num_bytes_sent

    def announce(self, words: str, device: torch.device) -> None:
        self.transport.announce(words, device)

    def post(self, sends: Sequence[Transfer], recvs: Sequence[Transfer]) -> object:
        return self.transport.post(sends, recvs)

    def wait(self, handle: object) -> None:
        if not self.is_running:
            self.transport.wait(handle)
        elif isinstance(handle, Posted) and handle.blocks_host:
            started_s = time.perf_counter()
            self.transport.wait(handle)
            self._waited_s += time.perf_counter() - started_s
        else:
            self._read_marks()
            before, after = _timing_event(), _timing_event()
            before.record()
            self.transport.wait(handle)
            after.record()
            self._marks.append((before, after))

    @property
    def exposed_s(self) -> float:
        """How long the host (gloo) or the stream (NCCL) has stood still so far.

        On NCCL only waits that have passed on the device by now are counted.
        """
        self._read_marks()
        return self._waited_s

    def _read_marks(self) -> None:
        while self._marks and self._marks[0][1].query():  # type: ignore[no-untyped-call]
            before, after = self._marks.popleft()
            self._waited_s += before.elapsed_time(after) / 1e3


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
