"""However late ranks come, outputs and gradients are bitwise what they are without delays, and memory stays flat."""

import gc
import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import charm_megatron as cm
from charm_megatron.executor import runtime as executor_runtime
from charm_megatron.executor.transport import GroupTransport, Transport
from charm_megatron.workload import CAUSAL, NO_MASK, Mask
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo

NUM_STEPS = 20
"""Where --soak does not say how many."""

NUM_WARM_UP = 100
"""Steps after which memory is looked at first; of a short run, half of them."""

MOST_DELAY_S, CHANCE_OF_DELAY = 0.004, 0.3
MOST_GROWTH_BYTES = 16 * 2**20
CP_SIZE, BATCH, HEADS, KV_HEADS, WIDTH = 4, 2, 4, 2, 16

CASES = [
    ("zigzag", 64, CAUSAL),
    ("contiguous", 96, NO_MASK),
    ("zigzag", 160, Mask(17, 0)),
    ("striped", 128, Mask(None, 0, (30, 98))),
    ("document_zigzag", 80, Mask(None, 0, (16, 64))),
]
"""Layout, length and mask, in turn."""

SCHEDULES = ["ring", "charm", "charm_together", "double_ring"]


@dataclass
class LateTransport:
    """A transport that sleeps now and then before it posts and before it waits, while `is_late`."""

    inner: Transport
    chance: random.Random
    is_late: bool = False
    num_delays: int = 0

    @property
    def num_bytes_sent(self):
        return self.inner.num_bytes_sent

    @property
    def across(self):
        return self.inner.across

    def exchange(self, what):
        return self.inner.exchange(what)

    def announce(self, words, device):
        self.inner.announce(words, device)

    def verify(self):
        self.inner.verify()

    def post(self, sends, recvs):
        self.sleep()
        return self.inner.post(sends, recvs)

    def wait(self, handle):
        self.sleep()
        self.inner.wait(handle)

    def sleep(self):
        if self.is_late and self.chance.random() < CHANCE_OF_DELAY:
            self.num_delays += 1
            time.sleep(self.chance.uniform(0, MOST_DELAY_S))


def late_runtimes(rank):
    """A runtime for each schedule, and the transports that they make, one each."""
    transports = []

    def make(group, deadline_s, **words):
        transports.append(LateTransport(GroupTransport(group, deadline_s, **words), random.Random(rank)))
        return transports[-1]

    executor_runtime.GroupTransport = make  # a rank is a process of its own
    configs = [cm.CharmConfig(schedule=name, domains=2, deadline_s=60) for name in SCHEDULES]
    return [cm.AttentionRuntime(config) for config in configs], transports


def step_inputs(step, rank, seq_len):
    """q, k, v and dout of one rank's shard."""
    generator = torch.Generator().manual_seed(step * CP_SIZE + rank)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(seq_len // CP_SIZE, BATCH, h, WIDTH, generator=generator) for h in heads]


def results(runtime, layout, mask, q, k, v, dout):
    """Out, lse and the gradients."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = runtime.attention_with_lse(*leaves, group=dist.group.WORLD, layout=layout, mask=mask)
    return out.detach(), lse, *torch.autograd.grad(out, leaves, dout)


def resident_bytes():
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("utf-8").splitlines())
    return int(status["VmRSS"].split()[0]) * 1024


def soaked(rank, size, num_steps):
    """Steps whose results differ from those without delays, number of delays, resident bytes after warm-up and last."""
    runtimes, transports = late_runtimes(rank)
    differing, resident = [], []
    for step in range(num_steps):
        layout, seq_len, mask = CASES[step % len(CASES)]
        runtime, shard = runtimes[step % len(SCHEDULES)], step_inputs(step, rank, seq_len)
        pair = []
        for is_late in (False, True):
            for transport in transports:
                transport.is_late = is_late
            if is_late:
                transports[0].sleep()
            pair.append(results(runtime, layout, mask, *shard))
        if not all(torch.equal(a, b) for a, b in zip(*pair, strict=True)):
            differing.append(step)
        if step + 1 in (min(NUM_WARM_UP, num_steps // 2), num_steps):
            resident.append(resident_bytes())
    return differing, sum(transport.num_delays for transport in transports), resident


@pytest.mark.timeout(3600)
def test_results_are_bitwise_the_same_however_late_ranks_are_and_memory_stays_flat(request):
    num_steps = request.config.getoption("--soak") or NUM_STEPS
    for differing, num_delays, resident in run_ranks(soaked, CP_SIZE, num_steps, timeout_s=3600):
        growth = resident[-1] - resident[0]
        print(f"{num_steps} steps, {num_delays} delays, {growth / 2**20:+.1f} MiB resident")
        assert differing == []
        assert num_delays > num_steps
        assert growth <= MOST_GROWTH_BYTES
