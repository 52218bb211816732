"""What `gpu-check` does on a GPU only, without one: stand-ins for streams know what comes before what."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from charm_megatron.bench import card_group, streams
from charm_megatron.bench.card_group import DOMAINS, attention_on, draw_shards
from charm_megatron.bench.card_parts import ON_CPU, SCHEDULES
from charm_megatron.bench.host import zero_shard
from charm_megatron.bench.streams import StreamedNetwork, random_pauses
from charm_megatron.compile import compile_attention
from charm_megatron.config import CharmConfig
from charm_megatron.executor.loopback import LoopbackNetwork
from charm_megatron.executor.memory import Memory

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


class Stream:
    """Counts what is launched on it; `seen` says how much of each stream it comes after."""

    def __init__(self, device=None):
        self.seen = {self: 0}

    def launch(self):
        self.seen[self] += 1

    def record_event(self):
        self.launch()
        return dict(self.seen)

    def wait_event(self, event):
        for stream, count in event.items():
            self.seen[stream] = max(self.seen.get(stream, 0), count)

    def is_after(self, stream, count):
        return self.seen.get(stream, 0) >= count


@pytest.fixture
def cuda(monkeypatch):
    """Streams and `_sleep` of torch.cuda as `streams` sees them."""
    stack, slept = [Stream()], []

    @contextmanager
    def current(stream):
        stack.append(stream)
        yield
        stack.pop()

    def sleep(cycles):
        slept.append((stack[-1], cycles))
        stack[-1].launch()

    fake = SimpleNamespace(Stream=Stream, Event=dict, stream=current, _sleep=sleep)
    monkeypatch.setattr(streams, "torch", SimpleNamespace(cuda=fake, device=torch.device))
    return SimpleNamespace(slept=slept, current=lambda: stack[-1])


class Watched(StreamedNetwork):
    """Notes every launch of a rank that a transfer, or a rank after its wait, would have to come after and does not."""

    def __init__(self, cuda, pause):
        super().__init__(DOMAINS.cp_size, DOMAINS, CPU, pause)
        self.cuda, self.faults, self.num_moves = cuda, [], 0
        self.launched, self.ends = {}, {}

    def post(self, rank, sends, recvs):
        flight = super().post(rank, sends, recvs)
        assert self.cuda.current() is self.computing[rank]
        self.launched[flight] = self.computing[rank].seen[self.computing[rank]]
        return flight

    def move(self, data, into, sender, receiver):
        super().move(data, into, sender, receiver)
        carrier = self.carrying[sender.queue]
        self.num_moves += 1
        for flight in (sender, receiver):
            if not carrier.is_after(self.computing[flight.queue[0]], self.launched[flight]):
                self.faults.append("moved before the post")
            self.ends.setdefault(flight, []).append((carrier, carrier.seen[carrier]))

    def wait(self, flight):
        super().wait(flight)
        if not all(self.computing[flight.queue[0]].is_after(*end) for end in self.ends.pop(flight, [])):
            self.faults.append("went on before the transfer")


def plan_and_shards(schedule):
    workload = card_group._workload(DOMAINS.cp_size, 16)
    plan = compile_attention(CharmConfig(schedule=schedule, fuse=False), DOMAINS, workload, "zigzag")
    return plan, draw_shards(CPU, workload, DOMAINS.cp_size)


@pytest.mark.parametrize("schedule", ["ring", "charm"])
def test_transfers_follow_both_posts_and_ranks_follow_what_they_have_waited_for(cuda, schedule):
    plan, shards = plan_and_shards(schedule)
    network = Watched(cuda, random_pauses(1))
    got = attention_on(network, plan, shards)
    assert network.num_moves > 10
    assert network.faults == []
    assert {stream for stream, _ in cuda.slept} >= {*network.computing}
    assert {stream for stream, _ in cuda.slept} & {*network.carrying.values()}
    assert all(0 < cycles < streams.MOST_PAUSE_CYCLES for _, cycles in cuda.slept)
    expected = attention_on(LoopbackNetwork(DOMAINS.cp_size, domains=DOMAINS), plan, shards)
    assert len(got) == 5 * DOMAINS.cp_size
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("lost", "fault"), [("_posted", "moved before the post"), ("_moved", "went on before the transfer")]
)
def test_an_order_that_the_network_does_not_keep_is_noticed(cuda, lost, fault):
    """The network without the events of posts, or of transfers."""
    plan, shards = plan_and_shards("charm")
    network = Watched(cuda, lambda: None)

    class Without(dict):
        def __missing__(self, flight):
            return {} if lost == "_posted" else []

        def __setitem__(self, flight, events):
            super().__setitem__(flight, type(events)())

    setattr(network, lost, Without())
    attention_on(network, plan, shards)
    assert set(network.faults) == {fault}


def test_pauses_are_the_same_for_a_seed_and_others_for_another(cuda):
    def cycles(seed):
        cuda.slept.clear()
        pause = random_pauses(seed)
        for _ in range(50):
            pause()
        return [cycles for _, cycles in cuda.slept]

    first = cycles(3)
    assert 5 < len(first) < 45
    assert cycles(3) == first != cycles(4)


@pytest.fixture
def on_gpu(cuda, monkeypatch):
    """A device of type cuda whose tensors are on the CPU."""
    modes = [0]
    monkeypatch.setattr(card_group, "NUM_SEEDS", 3)
    monkeypatch.setattr(card_group, "draw_shards", lambda device, *args: draw_shards(CPU, *args))
    monkeypatch.setattr(card_group, "zero_shard", lambda *args: zero_shard(*args[:2], CPU))
    monkeypatch.setattr(card_group, "Memory", lambda device, most_idle_bytes: Memory(CPU, most_idle_bytes))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return torch.device("cuda")


def test_results_that_delays_change_are_counted(on_gpu, monkeypatch):
    rows = list(card_group.stream_fuzz(on_gpu, ON_CPU))
    assert [(row.value, row.unit, row.is_right) for row in rows] == [(0, "of 3", True)] * len(SCHEDULES)
    assert not torch.are_deterministic_algorithms_enabled()

    class Late(StreamedNetwork):
        """Of each seed but the first, one transfer brings something else."""

        num_made = 0

        def __init__(self, *args):
            super().__init__(*args)
            Late.num_made += 1
            self.is_late = Late.num_made > 1

        def move(self, data, into, sender, receiver):
            super().move(data, into, sender, receiver)
            if self.is_late:
                into.view(-1).view(torch.uint8).zero_()
                self.is_late = False

    monkeypatch.setattr(card_group, "StreamedNetwork", Late)
    row = next(card_group.stream_fuzz(on_gpu, ON_CPU))
    assert (row.value, row.is_right) == (2, False)


def test_what_makes_the_host_wait_is_looked_for_in_groups_and_through_autograd(on_gpu, monkeypatch):
    rows = list(card_group.synchronisation(on_gpu, ON_CPU))
    assert [row.what.partition(":")[0] for row in rows] == [
        "ring, 4 ranks",
        "charm, 4 ranks",
        "one rank, through autograd",
    ]
    assert [(row.value, row.is_right) for row in rows] == [(0, True)] * 3


def test_on_a_gpu_the_host_is_timed_with_kernels_and_launches_are_those_of_its_profiler(on_gpu, monkeypatch):
    monkeypatch.setattr(card_group, "_launches_on", lambda device, plan, direction: "no CUPTI")
    rows = list(card_group.host(on_gpu, ON_CPU))
    assert all(row.value > 0 for row in rows if row.unit == "us per action")
    launches = [row for row in rows if row.unit == "per action"]
    assert [(row.value, row.note) for row in launches] == [(None, "no CUPTI")] * 4
    monkeypatch.setattr(card_group, "_launches_on", lambda device, plan, direction: 1)
    assert all(0 < row.value < 0.1 for row in card_group.host(on_gpu, ON_CPU) if row.unit == "per action")
