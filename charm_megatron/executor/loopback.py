"""All ranks of a group in one process: transfers are copies, and every rank's program advances in turn.

For tests, debugging and measuring on a CPU or on one GPU. *Rendezvous* is the strictest transport there is: a transfer
happens when both ends have posted it, and a rank works through its posts in one ordered queue, or in one inside domains
and one across, a whole post at a time. *Buffered* lets a sender go on at once.
"""

import sys
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from charm_megatron.compile import Plan
from charm_megatron.errors import ScheduleFault
from charm_megatron.executor.attention import Phases, attention_call
from charm_megatron.executor.memory import Memory
from charm_megatron.executor.run import ProgramRun
from charm_megatron.executor.transport import Transfer
from charm_megatron.kernels import BlockKernel
from charm_megatron.topology import Domains


@dataclass(eq=False)
class Flight:
    """A post: what has not been matched yet, and what the sent tensors were when it was made.

    `queue`: its rank, and whether it crosses domains.
    """

    queue: tuple[int, bool]
    sends: list[Transfer]
    recvs: list[Transfer]
    tensors: tuple[Tensor, ...]
    as_posted: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def require_unchanged(self, sent: Tensor) -> None:
        """A device sends what it finds, at any time between post and wait."""
        before = next(copy for x, copy in self.as_posted if x is sent)
        if not torch.equal(_as_bytes(before), _as_bytes(sent)):
            raise ScheduleFault("a tensor has changed while it was being sent")

    @property
    def is_done(self) -> bool:
        return not self.sends and not self.recvs


class LoopbackNetwork:
    """The transfers between the ranks of one process. `watches`: what is sent must not change under way.

    With `domains` a rank has two queues, for posts inside its domain and across, as on two communicators.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        is_buffered: bool = False,
        watches: bool = True,
        domains: Domains | None = None,
    ):
        self.is_buffered, self.watches, self.domains = is_buffered, watches, domains
        self.num_ranks = num_ranks
        self.queues: dict[tuple[int, bool], deque[Flight]] = {
            (rank, crosses): deque()
            for crosses in ([False] if domains is None else [False, True])
            for rank in range(num_ranks)
        }
        self.open: list[list[Flight]] = [[] for _ in range(num_ranks)]
        self._mail: dict[tuple[int, int], deque[Tensor]] = {}

    def transport(self, rank: int) -> "LoopbackTransport":
        """The transport of one rank."""
        return LoopbackTransport(self, rank)

    def post(self, rank: int, sends: Sequence[Transfer], recvs: Sequence[Transfer]) -> Flight:
        for peer, _ in (*sends, *recvs):
            if not 0 <= peer < self.num_ranks or peer == rank:
                raise ScheduleFault(f"rank {rank} has no peer {peer}")
        tensors = tuple(x for _, x in (*sends, *recvs))
        if self.is_buffered:
            for peer, x in sends:
                self._mail.setdefault((rank, peer), deque()).append(x.clone())
            sends = ()
        as_posted = [(x, x.clone()) for _, x in sends] if self.watches else []
        queue = rank, self._crosses(rank, (*sends, *recvs))
        flight = Flight(queue, list(sends), list(recvs), tensors, as_posted)
        self.queues[queue].append(flight)
        self.open[rank].append(flight)
        return flight

    def wait(self, flight: Flight) -> None:
        """Called by a rank that goes on because the transfers of a post are done."""
        assert flight.is_done, "waits for a transfer that nobody drives; use run_together"
        self.open[flight.queue[0]].remove(flight)

    def on(self, rank: int) -> AbstractContextManager[None]:
        """Whatever a rank computes or posts is done inside one of these; here they add nothing."""
        return nullcontext()

    def move(self, data: Tensor, into: Tensor, sender: Flight, receiver: Flight) -> None:
        """Does one transfer between two posts."""
        _copy(data, into)

    def _crosses(self, rank: int, transfers: Sequence[Transfer]) -> bool:
        if self.domains is None:
            return False
        crossing = {self.domains.crosses(rank, peer) for peer, _ in transfers}
        if len(crossing) > 1:
            raise ScheduleFault(f"a post of rank {rank} has transfers inside its domain and across")
        return True in crossing

    def advance(self) -> bool:
        """Does every transfer that can be done; says whether there was any."""
        moved = False
        for (rank, crosses), queue in self.queues.items():
            if queue:
                moved |= self._receive_mail(queue, rank) if self.is_buffered else self._meet(rank, crosses)
            while queue and queue[0].is_done:
                queue.popleft()
                moved = True
        return moved

    def _receive_mail(self, queue: "deque[Flight]", rank: int) -> bool:
        moved = False
        flight = queue[0]
        for transfer in list(flight.recvs):
            mail = self._mail.get((transfer[0], rank))
            if mail:
                _copy(mail.popleft(), transfer[1])
                _remove(flight.recvs, transfer)
                moved = True
        return moved

    def _meet(self, src: int, crosses: bool) -> bool:
        """Moves what the post at the head of `src`'s queue sends to posts at the heads of other queues."""
        moved = False
        out = self.queues[src, crosses][0]
        for transfer in list(out.sends):
            dst, data = transfer
            into = self.queues[dst, crosses][0] if self.queues[dst, crosses] else None
            waiting = [recv for recv in into.recvs if recv[0] == src] if into else []
            if into and waiting:
                if self.watches:
                    out.require_unchanged(data)
                self.move(data, waiting[0][1], out, into)
                _remove(out.sends, transfer)
                _remove(into.recvs, waiting[0])
                moved = True
        return moved


def _copy(data: Tensor, into: Tensor) -> None:
    if data.nbytes != into.nbytes:
        raise ScheduleFault(f"a message has {data.nbytes} bytes where {into.nbytes} are expected")
    _as_bytes(into).copy_(_as_bytes(data))


def _as_bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    return x.view(-1).view(torch.uint8)


def _remove(transfers: list[Transfer], gone: Transfer) -> None:
    """By identity: tensors have no usable equality."""
    del transfers[next(i for i, transfer in enumerate(transfers) if transfer is gone)]


@dataclass
class LoopbackTransport:
    """One rank's end of a `LoopbackNetwork`."""

    network: LoopbackNetwork
    rank: int
    num_bytes_sent: int = 0

    def announce(self, words: str, device: torch.device) -> None:
        """All calls are in one process here, and are known."""

    def post(self, sends: Sequence[Transfer], recvs: Sequence[Transfer]) -> Flight:
        self.num_bytes_sent += sum(x.nbytes for _, x in sends)
        return self.network.post(self.rank, sends, recvs)

    def wait(self, handle: object) -> None:
        assert isinstance(handle, Flight)
        self.network.wait(handle)


class GuardedMemory(Memory):
    """Refuses that a buffer is freed which its rank is still sending or receiving, and spoils what is freed."""

    watches_frees = True

    def __init__(self, device: torch.device, network: LoopbackNetwork, rank: int):
        super().__init__(device, most_idle_bytes=sys.maxsize)
        self.network, self.rank = network, rank

    def freed(self, buffer: Tensor) -> None:
        for flight in self.network.open[self.rank]:
            if any(_overlap(buffer, x) for x in flight.tensors):
                raise ScheduleFault(f"rank {self.rank} frees a buffer that is still in a transfer")
        buffer.fill_(0xFF)  # NaN in every floating-point dtype


def _overlap(a: Tensor, b: Tensor) -> bool:
    first, second = (range(x.data_ptr(), x.data_ptr() + x.nbytes) for x in (a, b))
    return max(first.start, second.start) < min(first.stop, second.stop)


def run_together(runs: Sequence[ProgramRun], network: LoopbackNetwork) -> None:
    """Runs the programs of all ranks to their ends. Raises `ScheduleFault` when none can go on."""
    moved = True
    while moved:
        moved = network.advance()
        for rank, run in enumerate(runs):
            while not run.is_finished and _may_step(run):
                with network.on(rank):
                    run.step()
                moved = True
    stuck = [rank for rank, run in enumerate(runs) if not run.is_finished]
    if stuck:
        raise ScheduleFault(f"deadlock: ranks {stuck} wait for transfers that nobody posts")
    if any(network.queues.values()):
        raise ScheduleFault("transfers are left that nobody has matched")


def _may_step(run: ProgramRun) -> bool:
    handle = run.waits_for
    return not isinstance(handle, Flight) or handle.is_done


def run_phases_together[Result](phases: Sequence[Phases[Result]], network: LoopbackNetwork) -> list[Result]:
    """`run_phases` for all ranks of a group at once."""
    while True:
        runs, results = [], []
        for rank, rank_phases in enumerate(phases):
            try:
                with network.on(rank):
                    runs.append(next(rank_phases))
            except StopIteration as end:
                results.append(end.value)
        if results:
            assert not runs, "ranks have different numbers of phases"
            return results
        run_together(runs, network)


@dataclass(frozen=True)
class LoopbackResult:
    """What attention over the whole sequence gave, in sequence order, and the bytes that each rank sent."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    num_bytes_sent: tuple[int, ...]


class LoopbackGroup:
    """A whole context-parallel group in one process."""

    def __init__(
        self,
        plan: Plan,
        kernel: BlockKernel,
        *,
        softmax_scale: float,
        device: torch.device | None = None,
        is_buffered: bool = False,
        has_two_queues: bool = False,
    ):
        device = device or torch.device("cpu")
        size = plan.problem.cp_size
        self.softmax_scale, self.sharding = softmax_scale, plan.problem.sharding
        domains = plan.problem.domains if has_two_queues else None
        self.network = LoopbackNetwork(size, is_buffered=is_buffered, domains=domains)
        self.transports = [self.network.transport(rank) for rank in range(size)]
        self.calls = [
            attention_call(
                plan, rank, kernel, self.transports[rank], GuardedMemory(device, self.network, rank)
            )
            for rank in range(size)
        ]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> LoopbackResult:
        """Forward and backward over whole tensors [seq, b, heads, width].

        Raises `ScheduleFault` on a deadlock, and whatever a wrong program runs into.
        """
        shards = list(zip(*(self._shards(x) for x in (q, k, v, dout)), strict=True))
        scale = self.softmax_scale
        forward = [
            call.forward_phases(q, k, v, scale) for call, (q, k, v, _) in zip(self.calls, shards, strict=True)
        ]
        results = run_phases_together(forward, self.network)
        backward = [
            call.backward_phases(dout, q, k, v, result, scale)
            for call, (q, k, v, dout), result in zip(self.calls, shards, results, strict=True)
        ]
        grads = run_phases_together(backward, self.network)
        dq, dk, dv = (self._join([grad[i] for grad in grads]) for i in range(3))
        return LoopbackResult(
            self._join([result.out for result in results]),
            self._join([result.lse for result in results]),
            dq,
            dk,
            dv,
            tuple(transport.num_bytes_sent for transport in self.transports),
        )

    def _tokens(self, rank: int) -> Tensor:
        return torch.tensor(self.sharding.tokens_of(rank))

    def _shards(self, x: Tensor) -> list[Tensor]:
        return [x[self._tokens(rank).to(x.device)] for rank in range(len(self.calls))]

    def _join(self, shards: Sequence[Tensor]) -> Tensor:
        whole = torch.empty_like(torch.cat(list(shards)))
        for rank, shard in enumerate(shards):
            whole[self._tokens(rank).to(whole.device)] = shard
        return whole
