"""The link between two ranks, measured over a group of these two alone, so that no other link can disturb it."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from charm_megatron.doctor.stores import Store
from charm_megatron.errors import shortened

NUM_PINGS = 20
REPETITIONS = 3
REPETITIONS_S = 1.0
"""How long all repetitions of a pair may take together, after the first."""
THREAD_S = 2.0
"""How much later than its deadline a conversation is given up: gloo looks at the clock now and then."""
THREAD = "charm-doctor-link"
NCCL_TIMEOUT = timedelta(hours=1)
"""Far behind every deadline here: torch ends the process after it."""
MOST_PROBLEM_CHARACTERS = 120


@dataclass(frozen=True)
class LinkPlan:
    """What is sent, and how long a pair may take."""

    size_bytes: int
    deadline_s: float


@dataclass
class Told:
    """What one end tells of a pair: the fields fill as the conversation goes on."""

    latency_s: float | None = None
    """Half a round trip of a small message, the best of some."""
    bytes_per_s: float | None = None
    """What this end has sent, by the other's answer that all has come; the best of some."""
    problem: str | None = None


class _Line(Protocol):
    """Both directions of a link; each call returns when the tensor is sent or there."""

    def send(self, tensor: torch.Tensor) -> None: ...
    def recv(self, tensor: torch.Tensor) -> None: ...
    def close(self) -> None: ...


class _GlooLine:
    def __init__(self, store: Store, end: int, deadline_s: float) -> None:
        self._peer, self._deadline_s = 1 - end, deadline_s
        self._group: Any = dist.ProcessGroupGloo(store, end, 2, self._left())

    def send(self, tensor: torch.Tensor) -> None:
        self._group.send([tensor], self._peer, 0).wait(self._left())

    def recv(self, tensor: torch.Tensor) -> None:
        self._group.recv([tensor], self._peer, 0).wait(self._left())

    def close(self) -> None:
        """The connection ends with the group."""

    def _left(self) -> timedelta:
        return timedelta(seconds=max(0.01, self._deadline_s - time.monotonic()))


class _NcclLine:
    """Calls of NCCL and CUDA do not look at the clock: `measure` gives up the thread that waits in them."""

    def __init__(self, store: Store, end: int, device: torch.device) -> None:
        torch.cuda.set_device(device)  # of this thread
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = NCCL_TIMEOUT
        self._peer = 1 - end
        self._group: Any = dist.ProcessGroupNCCL(store, end, 2, options)

    def send(self, tensor: torch.Tensor) -> None:
        self._group.send([tensor], self._peer, 0).wait()
        torch.cuda.synchronize()

    def recv(self, tensor: torch.Tensor) -> None:
        self._group.recv([tensor], self._peer, 0).wait()
        torch.cuda.synchronize()

    def close(self) -> None:
        self._group.abort()


def measure(store: Store, end: int, plan: LinkPlan, device: torch.device) -> Told:
    """Holds this end's part (0 or 1) of a conversation that both ends hold at the same time; `store` is theirs alone.

    Returns after the deadline at the latest, also where the other end does not come.
    """
    told = Told()
    deadline_s = time.monotonic() + plan.deadline_s

    def open_line() -> _Line:
        return _NcclLine(store, end, device) if device.type == "cuda" else _GlooLine(store, end, deadline_s)

    args = (told, open_line, end, plan, device)
    thread = threading.Thread(target=_converse, args=args, name=THREAD, daemon=True)
    thread.start()
    thread.join(plan.deadline_s + THREAD_S)
    if thread.is_alive():
        return Told(told.latency_s, told.bytes_per_s, f"no answer within {plan.deadline_s:g} s")
    return told


def is_stuck() -> bool:
    """Whether a conversation of this process still waits, past its deadline, in calls that nothing ends."""
    return any(thread.name == THREAD for thread in threading.enumerate())


def _converse(
    told: Told, open_line: Callable[[], _Line], end: int, plan: LinkPlan, device: torch.device
) -> None:
    try:
        line = open_line()
        told.latency_s = _ping(line, end, torch.zeros(1, device=device))
        block = torch.zeros(plan.size_bytes, dtype=torch.uint8, device=device)
        started_s = time.perf_counter()
        _both_ways(told, line, end, block)
        again = torch.tensor([_repetitions(time.perf_counter() - started_s)], device=device)
        line.send(again) if end == 0 else line.recv(again)  # end 0 decides
        for _ in range(int(again.item())):
            _both_ways(told, line, end, block)
        with suppress(RuntimeError):
            line.close()
    except Exception as error:
        words = next(iter(str(error).splitlines()), "") or type(error).__name__
        told.problem = shortened(words.rpartition("] ")[2], MOST_PROBLEM_CHARACTERS)


def _ping(line: _Line, end: int, token: torch.Tensor) -> float:
    best_s = float("inf")
    for _ in range(NUM_PINGS):
        started_s = time.perf_counter()
        if end == 0:
            line.send(token)
            line.recv(token)
        else:
            line.recv(token)
            line.send(token)
        best_s = min(best_s, time.perf_counter() - started_s)
    return best_s / 2


def _both_ways(told: Told, line: _Line, end: int, block: torch.Tensor) -> None:
    """The block to end 1, then to end 0; whoever sends it counts the time until the other has answered."""
    answer = torch.zeros(1, device=block.device)
    for sender in (0, 1):
        if end != sender:
            line.recv(block)
            line.send(answer)
            continue
        started_s = time.perf_counter()
        line.send(block)
        line.recv(answer)
        rate = block.numel() / (time.perf_counter() - started_s)
        told.bytes_per_s = max(rate, told.bytes_per_s or 0.0)


def _repetitions(first_s: float) -> int:
    """How many more there are, after the first has taken so long."""
    return min(REPETITIONS - 1, int(REPETITIONS_S / max(first_s, 1e-9)))
