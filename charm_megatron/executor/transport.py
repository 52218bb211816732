"""Point-to-point transfers of a group, started together and waited for together."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from charm_megatron.errors import TransferTimeout
from charm_megatron.executor.call_check import CallCheck, DeviceCallCheck, neighbours
from charm_megatron.executor.lost import TransferLost, wait_on_host
from charm_megatron.liveness.standing import Exchange, Waiting

Transfer = tuple[int, Tensor]
"""A rank of the group, and a contiguous tensor that goes to it or comes from it, bytes or numbers."""


class Transport(Protocol):
    """Starts groups of transfers, and ends them.

    Between two ranks transfers match in the order in which they were posted.
    """

    @property
    def num_bytes_sent(self) -> int:
        """Bytes posted so far."""
        ...

    def announce(self, words: str, device: torch.device) -> None:
        """Says that this rank now makes the call of these words, on tensors of a device."""
        ...

    def post(self, sends: Sequence[Transfer], recvs: Sequence[Transfer]) -> object:
        """Starts transfers together and returns a handle. Their tensors must not be touched until `wait`."""
        ...

    def wait(self, handle: object) -> None:
        """Returns when the transfers are done, or, on a GPU, when the current stream will see them done.

        Raises `ScheduleDisagreement` where a neighbour is known to make another call.
        """
        ...


@dataclass(frozen=True)
class Way:
    """One transfer of a post. `number` is how many with this peer, of this kind, were posted before it."""

    peer: int
    is_recv: bool
    number: int


@dataclass(frozen=True)
class Posted:
    """Transfers under way. `blocks_host`: waiting for them stops the host, not a stream."""

    works: Sequence[dist.Work]
    ways: Sequence[Way]
    blocks_host: bool


class GroupTransport:
    """Transfers over a torch process group.

    On gloo each transfer runs on its own and `wait` blocks the host for at most `deadline_s`. On NCCL a post is one
    ncclGroup, `wait` orders the current stream after it, and the deadline is that of the process group's own watchdog.
    `checks_calls`: ranks tell each other which call they make (`call_check`). `across` carries what a peer in
    `far_peers` sends or gets: then a post has either near or far peers, and its transfers wait for none of the others.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        deadline_s: float,
        *,
        checks_calls: bool = True,
        across: dist.ProcessGroup | None = None,
        far_peers: frozenset[int] = frozenset(),
    ):
        self.group, self.deadline_s = group, deadline_s
        self.across, self._far_peers = across, far_peers
        self.num_bytes_sent = 0
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._sends, self._recvs = [0] * len(self._ranks), [0] * len(self._ranks)
        self._waits_for: Way | None = None
        self._checks_calls = checks_calls and len(self._ranks) > 1
        self._checks: dict[torch.device, CallCheck | DeviceCallCheck] = {}
        self._check: CallCheck | DeviceCallCheck | None = None
        """Of the notice that is not verified yet."""
        self._notice: Way | None = None
        self._tag = 0
        self._connected: set[tuple[int, bool]] = set()
        """(peer, whether to it)."""

    def announce(self, words: str, device: torch.device) -> None:
        """Tells the next rank which call this one makes. What the previous one says is read at the first wait.

        Raises `TransferTimeout` where a neighbour was silent since the last call.
        """
        if not self._checks_calls:
            return
        if device not in self._checks:
            self._checks[device] = (
                DeviceCallCheck(self.group, device)
                if device.type == "cuda"
                else CallCheck(self.group, self.deadline_s)
            )
        after, before = neighbours(self.group)
        with _as_timeout():
            self._verify()
            self._check = self._checks[device]
            self._tag = self._check.announce(words)
        self._notice = self._way(before, is_recv=True)
        self._way(after, is_recv=False)

    def verify(self) -> None:
        """Raises `ScheduleDisagreement` now where the previous rank makes another call, `TransferTimeout` for none."""
        with _as_timeout():
            self._verify()

    def _verify(self) -> None:
        if self._check is not None:
            self._waits_for = self._notice
            self._check.verify()
            self._check = self._waits_for = None

    def post(self, sends: Sequence[Transfer], recvs: Sequence[Transfer]) -> Posted:
        group = self._group_for(sends, recvs)
        ops = [self._op(dist.irecv, group, peer, x) for peer, x in recvs]
        ops += [self._op(dist.isend, group, peer, x) for peer, x in sends]
        self.num_bytes_sent += sum(x.nbytes for _, x in sends)
        ways = [self._way(peer, is_recv=True) for peer, _ in recvs]
        ways += [self._way(peer, is_recv=False) for peer, _ in sends]
        works = dist.batch_isend_irecv(ops)
        # By the tensors, since a group may have a backend for each kind of device.
        return Posted(works, ways, not any(x.is_cuda for _, x in (*recvs, *sends)))

    def _group_for(self, sends: Sequence[Transfer], recvs: Sequence[Transfer]) -> dist.ProcessGroup:
        if self.across is None:
            return self.group
        are_far = {peer in self._far_peers for peer, _ in (*sends, *recvs)}
        assert len(are_far) == 1, "a post over two communicators has either near or far peers"
        return self.across if are_far.pop() else self.group

    def connect(self, posts: Iterable[tuple[Sequence[int], Sequence[int]]], device: torch.device) -> None:
        """Makes the connections that these posts, (peers to send to, peers to receive from), will need.

        NCCL makes each at its first use, for which it stops the host. All ranks do this together, with posts in the
        order of their keys, as in a program.
        """
        for to, from_ in posts:
            sends, recvs = (
                [
                    (peer, torch.zeros(1, dtype=torch.uint8, device=device))
                    for peer in peers
                    if (peer, is_send) not in self._connected
                ]
                for peers, is_send in ((to, True), (from_, False))
            )
            if sends or recvs:
                self._connected.update((peer, True) for peer, _ in sends)
                self._connected.update((peer, False) for peer, _ in recvs)
                sent = self.num_bytes_sent
                self.wait(self.post(sends, recvs))
                self.num_bytes_sent = sent

    def _op(
        self, kind: Callable[..., Any], group: dist.ProcessGroup, peer: int, tensor: Tensor
    ) -> dist.P2POp:
        return dist.P2POp(kind, tensor, group=group, group_peer=peer, tag=self._tag)

    def _way(self, peer: int, *, is_recv: bool) -> Way:
        counts = self._recvs if is_recv else self._sends
        way = Way(peer, is_recv, counts[peer])
        counts[peer] += 1
        return way

    def wait(self, handle: object) -> None:
        """Raises `TransferLost` for a transfer on the host that does not end in time or fails.

        The first wait of a call raises `ScheduleDisagreement` where the previous rank makes another call.
        """
        assert isinstance(handle, Posted)
        self._verify()
        if not handle.blocks_host:
            for work in handle.works:
                work.wait()
            return
        started_s = time.monotonic()
        for work, way in zip(handle.works, handle.ways, strict=True):
            self._waits_for = way
            wait_on_host(work, way.peer, way.is_recv, started_s, self.deadline_s)
        self._waits_for = None

    def exchange(self, what: Callable[[int, bool], str]) -> Exchange:
        """What was posted, and what is waited for; `what(peer, is_recv)` puts that in words.

        On NCCL the host does not wait, so nothing is said of that.
        """
        way = self._waits_for
        waiting = None
        if way is not None:
            words = "word of its call" if way is self._notice else what(way.peer, way.is_recv)
            waiting = Waiting(self._ranks[way.peer], way.is_recv, way.number, words)
        return Exchange(self._ranks, tuple(self._sends), tuple(self._recvs), waiting)


@contextmanager
def _as_timeout() -> Iterator[None]:
    """Outside of a schedule's actions, which would say more."""
    try:
        yield
    except TransferLost as error:
        raise TransferTimeout(
            f"rank {error.peer} of the context-parallel group has not said in {error.waited_s:.1f} s which call it "
            f"makes: {error.why}; it has failed, or is elsewhere"
        ) from error
