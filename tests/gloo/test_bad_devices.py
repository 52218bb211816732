"""GPUs that are set up wrongly, and what their users are told. There is no GPU: groups and tensors are stand-ins."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import charm_megatron as cm
from charm_megatron.errors import (
    ConfigError,
    InvalidInput,
    ScheduleDisagreement,
    TopologyError,
    WorkloadError,
)
from charm_megatron.executor import agreement, discovery, runtime
from charm_megatron.executor.groups import nccl_version, obstacle
from charm_megatron.kernels import BlockSizes, Selection, select_kernel
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BOTH = "make it with backend 'cpu:gloo,cuda:nccl'"


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone, without threads: tests of the same process fork ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.fixture
def pair(world, monkeypatch):
    """The same, which says that it has two ranks; sets its backends and torch's NCCL."""

    def of(backends, version=(2, 30, 7), has_nccl=True):
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
        monkeypatch.setattr(dist, "get_backend_config", lambda group=None: backends)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
        return world

    return of


@pytest.mark.parametrize(
    ("device", "backends", "settings", "told"),
    [
        (
            CUDA,
            "cpu:gloo,cuda:gloo",
            {},
            f"tensors are on cuda:0, which a group of backend cpu:gloo,cuda:gloo does not send from; {BOTH}",
        ),
        (
            CUDA,
            "cpu:gloo",
            {},
            f"tensors are on cuda:0, which a group of backend cpu:gloo does not send from; {BOTH}",
        ),
        (
            CPU,
            "cuda:nccl",
            {},
            "tensors are on cpu, which a group of backend cuda:nccl does not send from; move them to the GPU, or "
            f"{BOTH}",
        ),
        (
            CUDA,
            "cpu:gloo,cuda:gloo",
            {"has_nccl": False},
            "tensors are on cuda:0, and this torch has no NCCL to send them; install a torch built with NCCL, or move "
            "them to the CPU",
        ),
        (
            CUDA,
            "cuda:nccl",
            {"version": (2, 7, 8)},
            "groups of sends and receives need NCCL 2.8 or newer, but torch runs with 2.7.8; upgrade it",
        ),
        (CUDA, "cuda:nccl", {"version": (2, 8, 3)}, None),
        (CUDA, "cpu:gloo,cuda:nccl", {}, None),
        (CPU, "cpu:gloo,cuda:nccl", {"has_nccl": False}, None),
        (CUDA, "cuda:ucc", {"has_nccl": False}, None),
        (CPU, "cpu:gloo,cuda:gloo", {}, None),
    ],
)
def test_a_group_that_cannot_send_from_a_device_is_told_what_would_work(
    pair, device, backends, settings, told
):
    assert obstacle(pair(backends, **settings), device) == told


def test_a_group_of_one_rank_sends_nothing_and_may_have_any_backend(world):
    assert obstacle(world, CUDA) is None


def test_the_version_of_nccl_is_none_without_nccl(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert nccl_version() is None


def placed(device):
    """A tensor that says that it is on a device."""

    class Placed(torch.Tensor):
        pass

    Placed.device = torch.device(device)
    return torch.zeros(8, 1, 2, 8).as_subclass(Placed)


@pytest.mark.parametrize(
    "devices", [("cuda:0", "cuda:1", "cuda:0"), ("cpu", "cuda:0", "cuda:0"), ("cuda:0", "cuda:0", "cpu")]
)
def test_tensors_on_several_devices_are_refused_with_all_of_them(world, devices):
    q, k, v = (placed(device) for device in devices)
    with pytest.raises(WorkloadError) as error:
        cm.context_parallel_attention(q, k, v, group=None)
    assert str(error.value) == (
        "q, k and v must share dtype and device, but are torch.float32 torch.float32 torch.float32 on "
        f"{' '.join(devices)}; k.to(q) and v.to(q) would work"
    )


def _on_odd_ranks(rank: int, size: int, odd: str) -> list[str]:
    """What a rank is told whose first, or only, call is on another device than those of even ranks."""
    device = torch.device(odd if rank % 2 else "cpu")
    runtime = cm.AttentionRuntime(cm.CharmConfig(domains=1, deadline_s=30))
    told = []
    for of in (device, torch.device(odd)):
        try:
            runtime.receipt(dist.group.WORLD, cm.Workload(1, 32, 2, 2, 8, 8), device=of)
        except InvalidInput as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_ranks_on_different_kinds_of_devices_are_told_so_alike_and_none_waits(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)  # in ranks too, which are forked
    expected = [
        "TopologyError: the ranks of a context-parallel group must have tensors on one kind of device, but rank 1 has "
        "tensors on cuda, the others cpu; move all to one kind",
        "TopologyError: on context-parallel rank 0 tensors are on cuda:0, which a group of backend cpu:gloo,cuda:gloo "
        f"does not send from; {BOTH}",
    ]
    assert run_ranks(_on_odd_ranks, 2, "cuda:0", timeout_s=60) == [expected] * 2


def test_a_second_device_that_the_group_cannot_send_from_is_refused_too(pair, monkeypatch):
    group = pair("cpu:gloo,cuda:gloo")
    monkeypatch.setattr(agreement, "gather", lambda group, value: [value] * 2)
    monkeypatch.setattr(discovery, "gather", agreement.gather)
    runtime = cm.AttentionRuntime(cm.CharmConfig(domains=1, check_calls=False))
    workload = cm.Workload(1, 32, 2, 2, 8, 8)
    runtime.receipt(group, workload, device=CPU)
    with pytest.raises(TopologyError, match="tensors are on cuda:0, which a group of backend"):
        runtime.receipt(group, workload, device=CUDA)


def test_parts_on_a_device_that_the_group_cannot_send_from_are_not_gathered(pair):
    pair("cuda:nccl")
    with pytest.raises(
        TopologyError, match="tensors are on cpu, which a group of backend cuda:nccl does not"
    ):
        cm.unshard(torch.zeros(8), group=None)


@pytest.mark.parametrize("kernel", ["auto", "torch", "reference"])
def test_a_gpu_without_bfloat16_says_that_float16_works_and_it_does(kernel):
    sizes = BlockSizes("cuda", torch.bfloat16, 64, 64, 7)
    with pytest.raises(ConfigError) as error:
        select_kernel(kernel, sizes)
    assert str(error.value) == (
        "a GPU of compute capability 7 has no bfloat16, which came with 8; float16 would work with kernel 'reference', "
        "which holds all logits of a block"
    )
    assert select_kernel("reference", sizes._replace(dtype=torch.float16)).kernel.name == "reference"


def test_float16_on_an_old_gpu_is_referred_to_the_kernel_that_takes_it():
    with pytest.raises(ConfigError) as error:
        select_kernel("auto", BlockSizes("cuda", torch.float16, 64, 64, 7))
    assert str(error.value) == (
        "kernel 'auto' cannot be used: torch's flash attention needs a GPU of compute capability 8, not 7; use "
        "'reference', which holds all logits of a block"
    )


def _whose_kernel_is_refused(rank: int, size: int, ranks: tuple[int, ...]) -> str:
    """What a rank raises where the devices of `ranks` have no kernel."""

    def select(name: str, sizes: BlockSizes) -> Selection:
        if rank in ranks:
            raise ConfigError("kernel 'auto' cannot be used: it is too old")
        return select_kernel(name, sizes)

    runtime.select_kernel = select  # type: ignore[assignment]
    x = torch.randn(4, 1, 2, 8)
    with pytest.raises((ConfigError, ScheduleDisagreement)) as error:
        cm.context_parallel_attention(x, x, x, group=dist.group.WORLD)
    return str(error.value)


def test_a_kernel_that_one_rank_has_not_is_told_on_all_of_them():
    for ranks, told in (
        ((1,), "must have the same kernel, but rank 1 has kernel none (kernel 'auto' cannot be used: it is"),
        ((0, 1), "kernel 'auto' cannot be used: it is too old"),
    ):
        for said in run_ranks(_whose_kernel_is_refused, 2, ranks):
            assert told in said
