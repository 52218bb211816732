"""Ranks that make different calls are told so at once, whatever is different, and nobody computes on."""

import pytest
import torch
import torch.distributed as dist

import charm_megatron as cm
from charm_megatron.errors import ScheduleDisagreement, TransferTimeout
from charm_megatron.executor.call_check import DeviceCallCheck
from charm_megatron.executor.runtime import AttentionRuntime
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo

DEADLINE_S = 2
"""What a rank waits whose neighbour is in the same call, here where those that know better stay."""

DIFFERENCES = {
    "1 x 48 tokens": {"tokens": 16},
    "mask none": {"mask": "none"},
    "scale 0.5": {"softmax_scale": 0.5},
    "contiguous": {"layout": "contiguous"},
    "for the first time": {"tokens": 16, "is_known": False},
}
"""What one rank does differently, by words that the others are told."""


def settings(**changes):
    return cm.CharmConfig(**{"domains": 1, "deadline_s": DEADLINE_S, **changes})


def attend(runtime, group, tokens=8, **words):
    q, k, v = (torch.randn(tokens, 1, 2, 8, requires_grad=True) for _ in range(3))
    return runtime.attention(q, k, v, group=group, **words)


def differ(rank, size):
    """Both calls are known to all ranks, but where it says so; then rank 1 makes the odd one. How each rank ends."""
    ends = []
    for odd in DIFFERENCES.values():
        group, runtime = dist.new_group(), AttentionRuntime(settings())
        words = {name: value for name, value in odd.items() if name != "is_known"}
        attend(runtime, group)
        if odd.get("is_known", True):
            attend(runtime, group, **words)
        ends.append(how_it_ends(lambda: attend(runtime, group, **(words if rank == 1 else {}))))  # noqa: B023
        dist.barrier()
    return ends


def how_it_ends(call):
    try:
        call()
    except (ScheduleDisagreement, TransferTimeout) as error:
        return type(error).__name__, str(error)
    return "well", ""


def test_a_rank_in_another_call_is_told_so_and_so_is_the_next():
    """By each other, and not by a deadline; the one before it loses it as a peer."""
    before, odd, after = run_ranks(differ, 3)
    for number, words in enumerate(DIFFERENCES):
        assert odd[number][0] == after[number][0] == "ScheduleDisagreement", words
        assert before[number][0] == "TransferTimeout", words
        told = after[number][1].partition("; the rank after it")[0]
        assert told.startswith("the ranks of a context-parallel group make different calls: rank 1 ")
        assert words in told


def differ_in_the_backward_pass(rank, size):
    """The same forward calls; then one rank goes back where the others go on."""
    runtime = AttentionRuntime(settings())
    group = dist.new_group()
    out = attend(runtime, group)
    end = how_it_ends(lambda: out.sum().backward() if rank == 1 else attend(runtime, group))
    dist.barrier()
    return end[1]


def test_a_rank_in_the_other_pass_is_told_so():
    said = run_ranks(differ_in_the_backward_pass, 3)
    assert "rank 1 makes charm backward of 1 x 24 tokens" in said[2]
    assert "the rank after it makes charm forward of 1 x 24 tokens" in said[2]
    assert all(said)


def stay_away(rank, size):
    runtime = AttentionRuntime(settings())
    group = dist.new_group()
    attend(runtime, group)
    end = how_it_ends(lambda: attend(runtime, group, tokens=24) if rank == 0 else None)
    dist.barrier()
    return end


def test_a_rank_whose_neighbour_makes_no_call_is_told_at_the_deadline():
    """Also where the ranks would first have to agree on a plan."""
    (kind, words), *others = run_ranks(stay_away, 3)
    assert kind == "TransferTimeout"
    assert words.startswith("rank 2 of the context-parallel group has not said in 2.")
    assert " which call it makes: " in words
    assert [end[0] for end in others] == ["well"] * 2


def count_notices(rank, size, checks):
    """Sends of a forward and a backward call beyond the two transfers that a ring of two has in each; their tags."""
    runtime = AttentionRuntime(settings(check_calls=checks, schedule="ring", deadline_s=60))
    attend(runtime, dist.group.WORLD)
    tags = []
    post = dist.batch_isend_irecv

    def recording(ops):
        tags.append({op.tag for op in ops})
        return post(ops)

    def num_sends():
        return sum(sum(one.sends) for one in runtime.standing.exchanges)

    dist.batch_isend_irecv = recording
    try:
        counts = [num_sends()]
        out = attend(runtime, dist.group.WORLD)
        counts.append(num_sends())
        out.sum().backward()
        counts.append(num_sends())
    finally:
        dist.batch_isend_irecv = post
    return counts[1] - counts[0], counts[2] - counts[1], tags


def test_a_call_costs_one_notice_and_none_where_that_is_turned_off():
    with_notice = run_ranks(count_notices, 2, True)
    without = run_ranks(count_notices, 2, False)
    for (forward, backward, tags), (bare_forward, bare_backward, bare_tags) in zip(
        with_notice, without, strict=True
    ):
        assert (forward, backward) == (bare_forward + 1, bare_backward + 1)
        assert all(of_post == {0} for of_post in bare_tags)
        assert len(set.union(*tags)) == 2  # one for each pass
        assert 0 not in set.union(*tags)


def compare_on_the_device(rank, size):
    check = DeviceCallCheck(dist.group.WORLD, torch.device("cpu"))
    try:
        for words in ("one", "two", "odd" if rank == 1 else "three"):
            check.announce(words)
            check.verify()
        check.announce("four")
    except ScheduleDisagreement as error:
        return str(error)
    return ""


def test_a_comparison_on_the_device_is_read_by_the_next_call():
    """As on NCCL, on a device whose outcome is there at once."""
    said = run_ranks(compare_on_the_device, 3)
    assert said[0] == ""  # its neighbour before it, rank 2, made the same calls
    assert "this one made 'two' and then 'three', and rank 1 another one" in said[2]
    assert "this one made 'two' and then 'odd', and rank 0 another one" in said[1]
