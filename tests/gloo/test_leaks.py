"""Groups that come and go, and calls of many lengths, leave no thread, socket, descriptor or memory behind."""

import gc
import random
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import charm_megatron as cm
from charm_megatron.executor.runtime import MOST_PLANS
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo

NUM_GROUPS, NUM_LENGTHS = 10, 20
"""Where --leaks does not say how many of either."""

WARM_UP = 5
"""After so many groups or lengths, whatever is made once for all is there."""

MOST_GROWTH_BYTES = 32 * 2**20
"""Of resident memory, from the warm-up to the end: allocators keep pages as they like."""

HEADS, WIDTH, TOKENS = 4, 16, 8
PROCESS = Path("/proc/self")


class Held(NamedTuple):
    """What a process holds of each kind; of memory, what is resident."""

    threads: int
    descriptors: int
    sockets: int
    tensors: int
    resident_bytes: int


def held():
    gc.collect()
    links = []
    for path in (PROCESS / "fd").iterdir():
        with suppress(FileNotFoundError):  # the one by which the folder is listed
            links.append(str(path.readlink()))
    status = dict(line.split(":", 1) for line in (PROCESS / "status").read_text("utf-8").splitlines())
    return Held(
        threads=len(list((PROCESS / "task").iterdir())),
        descriptors=len(links),
        sockets=sum(link.startswith("socket:") for link in links),
        tensors=sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()),
        resident_bytes=int(status["VmRSS"].split()[0]) * 1024,
    )


def call(attention, length, group):
    """One call, forward and backward."""
    leaves = [torch.ones(length, 1, HEADS, WIDTH, requires_grad=True) for _ in range(3)]
    attention(*leaves, group=group).sum().backward()


def groups_case(rank, size, way, num_groups):
    """What is held after the warm-up and at the end, and the bytes that the runtime keeps then."""
    runtime = cm.AttentionRuntime(cm.CharmConfig(domains=1, deadline_s=60))
    attention = runtime.attention
    if way == "function":
        attention = partial(cm.context_parallel_attention, domains=1, deadline_s=60)
    seen = []
    for number in range(1, num_groups + 1):
        group = dist.new_group()
        call(attention, TOKENS, group)
        if way == "forget":
            runtime.forget(group)
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        if number in (WARM_UP, num_groups):
            seen.append((held(), runtime.num_bytes_held))
    return seen


def lengths_case(rank, size, num_lengths):
    """As `groups_case`, and the number of plans kept; then what is held more than before when all is forgotten.

    The longest call comes first, the others in no order.
    """
    tensors_before = held().tensors  # a fork has those of the process it comes from
    runtime = cm.AttentionRuntime(cm.CharmConfig(domains=1, deadline_s=60))
    longest, *others = (TOKENS * (number + 1) for number in reversed(range(num_lengths)))
    random.Random(0).shuffle(others)
    warm_up = MOST_PLANS if num_lengths > MOST_PLANS else WARM_UP
    seen = []
    for number, length in enumerate([longest, *others], 1):
        call(runtime.attention, length, None)
        if number in (1, warm_up, num_lengths):
            (num_plans,) = (len(known.agreed) for known in runtime._groups.values())
            seen.append((held(), runtime.num_bytes_held, num_plans))
    runtime.forget(None)
    return seen, held().tensors - tensors_before, runtime.num_bytes_held


def assert_no_more(before, after):
    for kind in ("threads", "descriptors", "sockets", "tensors"):
        assert getattr(after, kind) <= getattr(before, kind), (kind, before, after)
    growth = after.resident_bytes - before.resident_bytes
    print(f"{before} -> {after}: {growth / 2**20:+.1f} MiB resident")
    assert growth <= MOST_GROWTH_BYTES


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", ["function", "runtime", "forget"])
def test_groups_that_are_used_once_and_destroyed_leave_nothing_behind(way, request):
    """Told to forget them or not: without a word, one destroyed group is kept until the next one comes."""
    num_groups = request.config.getoption("--leaks") or NUM_GROUPS
    for (before, bytes_before), (after, bytes_after) in run_ranks(
        groups_case, 2, way, num_groups, timeout_s=1200
    ):
        assert bytes_after == bytes_before
        assert (bytes_after == 0) == (way != "runtime")
        assert_no_more(before, after)


@pytest.mark.timeout(1200)
def test_calls_of_many_lengths_keep_plans_up_to_a_number_and_buffers_of_the_longest(request):
    num_lengths = request.config.getoption("--leaks") or NUM_LENGTHS
    for seen, tensors_left, bytes_left in run_ranks(lengths_case, 2, num_lengths, timeout_s=1200):
        (_, bytes_of_longest, _), (before, _, _), (after, bytes_after, num_plans) = seen
        assert num_plans == min(num_lengths, MOST_PLANS)
        assert 0 < bytes_after <= bytes_of_longest
        assert_no_more(before, after._replace(tensors=0))  # more buffers, though not larger ones, may be kept
        assert (tensors_left, bytes_left) == (0, 0)
