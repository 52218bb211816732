"""Every call says to a neighbour which call it is, so that ranks in different calls find out and do not compute on.

A rank tells the next one of the group, and hears from the one before it. What differs is so found by the rank that is
in another call and by the one after it; the others lose them as peers. A notice is posted before the first transfer
of a call and read at its first wait, so that its way is hidden behind that transfer.

On gloo it is `NOTICE_BYTES` and holds words. Transfers bear a tag that is made of the notice: those of different calls
never meet, where gloo would end the process for a size that it does not expect. On NCCL, which knows no tags, a word of
64 bits is compared on the device and the outcome read in a later call: it finds what has the same sizes and differs,
such as a mask or a scale; different sizes are a hang, which the watchdog of the process group ends.
"""

import hashlib
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from charm_megatron.errors import ScheduleDisagreement
from charm_megatron.executor.lost import wait_on_host

NOTICE_BYTES = 256
DIGEST_BYTES = 8
NOTICE_TAG = 0
"""Of notices on gloo. Those of data are never it."""
MOST_TAG = 2**31 - 1
NEXT_HEARS_S = 5.0
MOST_NOTICES = 256
"""Kept, of calls that differ."""


@dataclass
class _Pending:
    """A notice under way on gloo."""

    words: str
    theirs: Tensor
    recv: dist.Work


def neighbours(group: dist.ProcessGroup) -> tuple[int, int]:
    """The ranks of the group after and before this one."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return (rank + 1) % size, (rank - 1) % size


class CallCheck:
    """Compares the calls of a group's ranks over gloo."""

    def __init__(self, group: dist.ProcessGroup, deadline_s: float):
        self.group, self.deadline_s = group, deadline_s
        self._next, self._previous = neighbours(group)
        self._pending: _Pending | None = None
        self._sent: dist.Work | None = None

    def announce(self, words: str) -> int:
        """Says that this rank now makes the call of these words, and returns the tag of its transfers.

        The announcement before it is verified. Raises `TransferLost` where the next rank has not heard that one.
        """
        notice, tag = _notice(words)
        ours = torch.frombuffer(bytearray(notice), dtype=torch.uint8)
        if self._sent is not None:
            wait_on_host(self._sent, self._next, False, time.monotonic(), self.deadline_s)
        theirs = torch.empty(NOTICE_BYTES, dtype=torch.uint8)
        recv = dist.irecv(theirs, group=self.group, group_src=self._previous, tag=NOTICE_TAG)
        self._sent = dist.isend(ours, group=self.group, group_dst=self._next, tag=NOTICE_TAG)
        assert recv is not None, "this rank is in the group"
        self._pending = _Pending(words, theirs, recv)
        return tag

    def verify(self) -> None:
        """Raises `ScheduleDisagreement` where the previous rank makes another call, `TransferLost` where none.

        Does nothing where the last announcement was verified.
        """
        if (pending := self._pending) is None:
            return
        wait_on_host(pending.recv, self._previous, True, time.monotonic(), self.deadline_s)
        self._pending = None
        if bytes(pending.theirs.tolist()) != _notice(pending.words)[0]:
            self._let_next_hear()
            raise ScheduleDisagreement(
                f"the ranks of a context-parallel group make different calls: rank {self._previous} "
                f"{_words(pending.theirs)}; the rank after it {pending.words}"
            )

    def _let_next_hear(self) -> None:
        """The next rank may come a little later, and should not find a closed connection in place of the notice."""
        if self._sent is not None:
            with suppress(RuntimeError):
                self._sent.wait(timedelta(seconds=min(NEXT_HEARS_S, self.deadline_s)))


@lru_cache(maxsize=MOST_NOTICES)
def _notice(words: str) -> tuple[bytes, int]:
    """The bytes of a notice, and the tag of its call."""
    digest = _digest(words)
    text = words.encode()[: NOTICE_BYTES - DIGEST_BYTES].ljust(NOTICE_BYTES - DIGEST_BYTES)
    tag = NOTICE_TAG + 1 + int.from_bytes(digest, "little") % (MOST_TAG - NOTICE_TAG)
    return digest + text, tag


def _digest(words: str) -> bytes:
    return hashlib.sha256(words.encode()).digest()[:DIGEST_BYTES]


def _words(notice: Tensor) -> str:
    return bytes(notice[DIGEST_BYTES:].tolist()).decode(errors="replace").strip()


class DeviceCallCheck:
    """Compares the calls of a group's ranks over NCCL, or whatever else its tensors are sent over.

    Two words of 64 bits are sent a call, in one group of transfers, and two small kernels compare them. The outcome
    comes to the host beside the computation, and is read by the first call that finds it there.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = group, device
        self._next, self._previous = neighbours(group)
        self._words_to_send: dict[str, Tensor] = {}
        self._mine = torch.zeros(1, dtype=torch.int64, device=device)
        self._theirs = torch.zeros(1, dtype=torch.int64, device=device)
        self._differs = torch.zeros(1, dtype=torch.bool, device=device)
        self._on_host = torch.zeros(1, dtype=torch.bool, pin_memory=device.type == "cuda")
        self._copied: torch.cuda.Event | None = None
        self._works: list[dist.Work] = []
        self._words = self._words_before = ""

    def announce(self, words: str) -> int:
        """Says that this rank now makes the call of these words. The tag that it returns has no meaning on NCCL.

        Raises `ScheduleDisagreement` where an earlier call is known to have differed.
        """
        if not _is_captured(self.device):
            self._read()
            self._words_before, self._words = self._words, words
            self._mine = self._word(words)
            ops = [
                dist.P2POp(dist.irecv, self._theirs, group=self.group, group_peer=self._previous),
                dist.P2POp(dist.isend, self._mine, group=self.group, group_peer=self._next),
            ]
            self._works = dist.batch_isend_irecv(ops)
        return NOTICE_TAG

    def verify(self) -> None:
        """Compares on the device; the host does not wait where the transfers do not make it wait."""
        if not self._works:
            return
        for work in self._works:
            work.wait()
        self._works = []
        self._differs |= self._theirs != self._mine
        self._on_host.copy_(self._differs, non_blocking=True)
        if self.device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def _word(self, words: str) -> Tensor:
        """The digest on the device, int64 [1]; kept, since to send it there takes longer than to send it on."""
        if words not in self._words_to_send:
            if len(self._words_to_send) == MOST_NOTICES:
                self._words_to_send.clear()
            value = int.from_bytes(_digest(words), "little", signed=True)
            self._words_to_send[words] = torch.tensor([value], dtype=torch.int64, device=self.device)
        return self._words_to_send[words]

    def _read(self) -> None:
        if self._copied is not None and not self._copied.query():  # type: ignore[no-untyped-call]
            return
        if self._on_host.item():
            raise ScheduleDisagreement(
                f"the ranks of a context-parallel group make different calls: this one made {self._words_before!r} and "
                f"then {self._words!r}, and rank {self._previous} another one than one of these"
            )


def _is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph records what is launched: it would replay one call's notice for others."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
