"""The loopback as on GPUs under NCCL: ranks compute on streams of their own, and transfers run on others.

What a program may count on is ordered here, and nothing else: a transfer follows what both ends had launched when they
posted it, and a rank that has waited goes on after the transfers of that post. Random pauses on all streams then bring
out what a program counts on without a post or a wait.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random

import torch
from torch import Tensor

from charm_megatron.executor.loopback import Flight, LoopbackNetwork
from charm_megatron.executor.transport import Transfer
from charm_megatron.topology import Domains

MOST_PAUSE_CYCLES = 400_000
"""Some 0.2 ms at 2 GHz, which is longer than most kernels of the check take."""


def random_pauses(seed: int) -> Callable[[], None]:
    """What holds up the current stream at random: half of the times not at all."""
    random = Random(seed)

    def pause() -> None:
        cycles = random.randrange(-MOST_PAUSE_CYCLES, MOST_PAUSE_CYCLES)
        if cycles > 0:
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]

    return pause


class StreamedNetwork(LoopbackNetwork):
    """Ranks on one GPU, each with a stream to compute on, and one for each queue of its posts.

    `pause` is called before every action, on its rank's stream, and before and after every transfer, on the
    transfer's. The current stream is to be idle at the beginning; `torch.cuda.synchronize` ends a run.
    """

    def __init__(self, num_ranks: int, domains: Domains, device: torch.device, pause: Callable[[], None]):
        super().__init__(num_ranks, watches=False, domains=domains)
        self.pause = pause
        self.computing = [_stream(device) for _ in range(num_ranks)]
        self.carrying = {queue: _stream(device) for queue in self.queues}
        self._posted: dict[Flight, torch.cuda.Event] = {}
        self._moved: defaultdict[Flight, list[torch.cuda.Event]] = defaultdict(list)

    @contextmanager
    def on(self, rank: int) -> Iterator[None]:
        """The rank's stream is the current one."""
        with torch.cuda.stream(self.computing[rank]):
            self.pause()
            yield

    def post(self, rank: int, sends: Sequence[Transfer], recvs: Sequence[Transfer]) -> Flight:
        flight = super().post(rank, sends, recvs)
        self._posted[flight] = self.computing[rank].record_event()
        return flight

    def move(self, data: Tensor, into: Tensor, sender: Flight, receiver: Flight) -> None:
        stream = self.carrying[sender.queue]
        for flight in (sender, receiver):
            stream.wait_event(self._posted[flight])
        with torch.cuda.stream(stream):
            self.pause()
            super().move(data, into, sender, receiver)
            self.pause()
        done = stream.record_event()
        for flight in (sender, receiver):
            self._moved[flight].append(done)

    def wait(self, flight: Flight) -> None:
        super().wait(flight)
        del self._posted[flight]
        for done in self._moved.pop(flight, []):
            self.computing[flight.queue[0]].wait_event(done)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
