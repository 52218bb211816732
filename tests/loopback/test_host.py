"""What attention costs beside its blocks, held by counts: launches, bytes, host time, storage that is saved."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from charm_megatron.bench.host import MODELS, counts, measure_host
from charm_megatron.compile import compile_attention
from charm_megatron.config import CharmConfig
from charm_megatron.executor.attention import ContextParallelAttention, attention_call
from charm_megatron.executor.loopback import LoopbackNetwork, run_phases_together
from charm_megatron.executor.memory import Memory
from charm_megatron.kernels import ReferenceKernel
from charm_megatron.schedule.passes import Direction
from charm_megatron.topology import even_domains
from charm_megatron.workload import CAUSAL, Workload

pytestmark = pytest.mark.torch

UNFUSED_GB = {"gpt_350m_64x4096": (5.8, 21.4), "gpt_8b_32k": (2.8, 8.4)}
"""Of charm over 2 x 8 ranks, where every copy, conversion and addition is an operator of torch's own."""
MOST_OF_UNFUSED = 0.4
MOST_LAUNCHES = {Direction.FORWARD: 3, Direction.BACKWARD: 5}
MOST_HOST_US = 3 * 25.0
"""Of one action; three times what a quiet machine needs at most."""
MOST_NCCL_MS = {"gpt_350m_64x4096": (3.1, 6.3), "gpt_8b_32k": (1.85, 4.3)}
"""Of a layer, forward and backward, over 2 x 8 ranks at the rates of an H100."""
HOST_WAITS = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "equal",
    "is_nonzero",
    "masked_select",
    "unique",
    "_unique2",
}
"""Operators of torch whose result a GPU's host would have to wait for."""


@pytest.fixture(scope="module")
def rows():
    return list(measure_host(list(MODELS), ["charm", "charm_keep_kv", "double_ring"], even_domains(16, 2)))


def test_an_attend_and_its_merge_are_few_launches(rows):
    for row in rows:
        assert 2 <= row.launches_per_attend <= MOST_LAUNCHES[row.pass_]


def test_elementwise_work_moves_a_fraction_of_what_unfused_operators_move(rows):
    for row in rows:
        if row.schedule == "double_ring":
            continue  # what was counted is charm
        whole_gb = UNFUSED_GB[row.model][list(Direction).index(row.pass_)]
        assert 0 < row.elementwise_bytes <= MOST_OF_UNFUSED * whole_gb * 1e9


def test_the_host_spends_little_time_on_an_action(rows):
    assert all(0 < row.host_us_per_action <= MOST_HOST_US for row in rows)


def test_charm_keeps_to_its_limits_of_memory_and_time(rows):
    """Modelled times on two communicators, and buffers in shards of q in float32."""
    for row in rows:
        if row.schedule == "charm":
            number = list(Direction).index(row.pass_)
            assert row.buffers_fp32_units <= (6, 18)[number]
            assert row.nccl_ms <= MOST_NCCL_MS[row.model][number]


@pytest.mark.parametrize("schedule", ["charm", "ring", "hierarchical", "attention_2d"])
def test_no_operator_in_the_hot_path_makes_the_host_wait(schedule):
    workload = Workload(1, 128, 16, 16, 8, 8, "bfloat16", CAUSAL)
    plan = compile_attention(
        CharmConfig(schedule=schedule, fuse=False), even_domains(8, 2), workload, "zigzag"
    )
    for count in counts(plan).values():
        assert not count.operators & HOST_WAITS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_saved_for_the_backward_is_q_k_v_out_and_lse_in_storage_of_their_own(dtype):
    workload = Workload(2, 12, 4, 2, 8, 8, str(dtype).removeprefix("torch."), CAUSAL)
    plan = compile_attention(CharmConfig(schedule="ring"), even_domains(1, 1), workload, "zigzag")
    network = LoopbackNetwork(1)
    memory = Memory(torch.device("cpu"), 2**20)
    call = attention_call(plan, 0, ReferenceKernel(), network.transport(0), memory)
    q, k, v = (torch.randn(12, 2, h, 8, dtype=dtype).requires_grad_() for h in (4, 2, 2))
    saved: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out, lse = ContextParallelAttention.apply(q, k, v, call, 1.0)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    assert sum(storages.values()) == sum(x.nbytes for x in (q, k, v, out, lse))


def test_memory_that_is_kept_is_that_of_the_longest_and_at_most_the_setting():
    memory = Memory(torch.device("cpu"), most_idle_bytes=1000)
    for size in (100, 700, 300, 900, 50):
        memory.give(memory.take(size))
    assert memory.num_bytes == 900
    both = [memory.take(900), memory.take(800)]
    for stretch in both:
        memory.give(stretch)
    assert memory.num_bytes == 800  # the one given back last
    memory.give(memory.take(5000))
    assert memory.num_bytes == 0  # more than may lie idle
    memory.lose(memory.take(10))
    assert memory.num_bytes == 0


def test_memory_that_is_not_kept_goes_with_its_run_and_waits_for_no_collection():
    workload = Workload(1, 32, 2, 2, 8, 8, "float32", CAUSAL)
    plan = compile_attention(CharmConfig(schedule="pass_q"), even_domains(2, 1), workload, "zigzag")
    network = LoopbackNetwork(2)
    taken = []

    class Watched(Memory):
        def take(self, num_bytes):
            stretch = super().take(num_bytes)
            taken.append(weakref.ref(stretch))
            return stretch

    calls = [
        attention_call(
            plan, rank, ReferenceKernel(), network.transport(rank), Watched(torch.device("cpu"), 0)
        )
        for rank in range(2)
    ]
    x = torch.randn(16, 1, 2, 8)
    gc.collect()
    gc.disable()
    try:
        run_phases_together([call.forward_phases(x, x, x, 1.0) for call in calls], network)
        assert len(taken) == 2
        assert all(stretch() is None for stretch in taken)
    finally:
        gc.enable()


class Lost(Exception):
    """Raised in the middle of a program."""


class FailingKernel(ReferenceKernel):
    def forward(self, *args, **settings):
        raise Lost


def test_a_program_that_raises_leaves_no_memory_behind():
    workload = Workload(1, 32, 2, 2, 8, 8, "float32", CAUSAL)
    plan = compile_attention(CharmConfig(schedule="ring"), even_domains(2, 1), workload, "zigzag")
    memory = Memory(torch.device("cpu"), 2**20)
    call = attention_call(plan, 0, FailingKernel(), LoopbackNetwork(2).transport(0), memory)
    x = torch.randn(16, 1, 2, 8)
    with pytest.raises(Lost):
        call.forward(x, x, x, 1.0)
    assert memory.num_bytes == 0  # a transfer is under way in it
    alone = compile_attention(
        CharmConfig(schedule="ring"), even_domains(1, 1), replace(workload, seq_len=16), "zigzag"
    )
    memory = Memory(torch.device("cpu"), 2**20)
    call = attention_call(alone, 0, FailingKernel(), LoopbackNetwork(1).transport(0), memory)
    with pytest.raises(Lost):
        call.forward(x, x, x, 1.0)
    assert memory.num_bytes == call.forward_programs[0].bound.num_bytes
