"""The first use of a plan in a model is checked on real tensors; whatever is wrong stops all ranks."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import charm_megatron as cm
from charm_megatron.errors import SelfCheckFailed
from charm_megatron.executor.runtime import AttentionRuntime
from charm_megatron.executor.self_check import CheckedLayer, sample_rows
from charm_megatron.kernels.reference import ReferenceKernel
from charm_megatron.sharding import make_sharding
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo

CASES = [
    {"schedule": "charm", "dtype": "float32", "kv_heads": 2},
    {"schedule": "charm", "dtype": "bfloat16", "kv_heads": 4},
    {"schedule": "ring", "dtype": "float64", "kv_heads": 1, "mask": "window:9,0"},
    {"schedule": "ulysses", "dtype": "float32", "kv_heads": 4, "mask": "none", "layout": "contiguous"},
    {"schedule": "ring", "dtype": "float16", "kv_heads": 2, "mask": "causal+documents:40,88"},
]


def tensors(rank, dtype="float32", kv_heads=2, tokens=32):
    generator = torch.Generator().manual_seed(rank)
    q = torch.randn(tokens, 2, 4, 16, generator=generator)
    k, v = (torch.randn(tokens, 2, kv_heads, 16, generator=generator) for _ in range(2))
    return [x.to(getattr(torch, dtype)).requires_grad_() for x in (q, k, v)]


def attend(rank, runtime, lines, schedule="charm", dtype="float32", kv_heads=2, **words):
    q, k, v = tensors(rank, dtype, kv_heads)
    layer = CheckedLayer("layer 1", lines.append)
    return runtime.attention(q, k, v, group=dist.group.WORLD, checked=layer, **words)


def check_right_plans(rank, size):
    said = []
    for case in CASES:
        settings = cm.CharmConfig(schedule=case["schedule"], domains=2, deadline_s=60)
        runtime, lines = AttentionRuntime(settings), []
        for _ in range(2):
            attend(rank, runtime, lines, **case).sum().backward()
        said.append(lines)
    return said


def test_right_plans_pass_once_for_each_pass_and_say_how_near_they_came():
    for of_rank in run_ranks(check_right_plans, 4):
        for case, lines in zip(CASES, of_rank, strict=True):
            assert len(lines) == 2, case
            assert lines[0].startswith(
                f"self-check: layer 1, schedule {case['schedule']}, forward: 16 rows of each"
            )
            assert lines[0].endswith("; bytes as planned")
            assert lines[1] == f"self-check: layer 1, schedule {case['schedule']}, backward: bytes as planned"


class Sabotaged(ReferenceKernel):
    """Wrong on one rank, in one way; the forward pass of a block."""

    def __init__(self, way):
        self.way = way

    def forward(self, q, k, v, *, causal, softmax_scale, band=None):
        if self.way == "scale":
            softmax_scale = softmax_scale * 1.01
        if self.way == "mask" and causal:
            causal = False
        out, lse = super().forward(q, k, v, causal=causal, softmax_scale=softmax_scale, band=band)[:2]
        if self.way == "lse":
            lse = lse + 0.01
        if self.way == "out":
            out = out * 1.001
        if self.way == "block":
            out, lse = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
        return out, lse


WAYS = ("scale", "mask", "lse", "out", "block")


def sabotage(rank, size):
    said = []
    for way in WAYS:
        runtime, lines = AttentionRuntime(cm.CharmConfig(domains=2, deadline_s=60)), []
        q, k, v = tensors(rank)
        runtime.attention(q, k, v, group=dist.group.WORLD)
        known = runtime._groups[dist.group.WORLD]
        ((key, agreed),) = known.agreed.items()
        if rank == 1:
            known.agreed[key] = replace(agreed, call=replace(agreed.call, kernel=Sabotaged(way)))
        try:
            attend(rank, runtime, lines)
            said.append("")
        except SelfCheckFailed as error:
            said.append(str(error))
    return said


def test_whatever_is_wrong_on_one_rank_stops_all_with_the_same_sentence():
    ranks = run_ranks(sabotage, 4)
    for way, sentences in zip(WAYS, zip(*ranks, strict=True), strict=True):
        assert len(set(sentences)) == 1, way
        assert sentences[0].startswith("self-check failed on "), way
        assert "layer 1, schedule charm, forward: " in sentences[0], way
        assert "over gathered keys and values " in sentences[0], way


def lose_bytes(rank, size):
    runtime, lines = AttentionRuntime(cm.CharmConfig(domains=2, deadline_s=60)), []
    q, k, v = tensors(rank)
    runtime.attention(q, k, v, group=dist.group.WORLD)
    transport = runtime._groups[dist.group.WORLD].transport.transport
    post = transport.post

    def miscounting(sends, recvs):
        transport.num_bytes_sent += rank == 2
        return post(sends, recvs)

    transport.post = miscounting
    try:
        attend(rank, runtime, lines)
    except SelfCheckFailed as error:
        return str(error)
    return ""


def test_bytes_beyond_the_plan_stop_all_ranks():
    for sentence in run_ranks(lose_bytes, 4):
        assert "rank 2, layer 1, schedule charm, forward: " in sentence
        assert "bytes were sent, but " in sentence
        assert "are planned" in sentence


def check_special(rank, size):
    lines = {}
    for name, settings in (("nan", {}), ("off", {"self_check": False})):
        runtime = AttentionRuntime(cm.CharmConfig(domains=2, deadline_s=60, **settings))
        q, k, v = (x.detach() for x in tensors(rank))
        if rank == 3:
            k[0] = torch.nan
        lines[name] = []
        layer = CheckedLayer("layer 7", lines[name].append)
        runtime.attention(q, k, v, group=dist.group.WORLD, checked=layer)
    return lines


def test_values_that_are_not_finite_are_not_judged_and_a_setting_turns_it_off():
    for lines in run_ranks(check_special, 4):
        assert lines["off"] == []
        (line,) = lines["nan"]
        assert "results could not be judged" in line
        assert "not finite" in line


@pytest.mark.parametrize("tokens", [4, 64, 4096])
def test_sampled_rows_hold_the_ends_of_chunks(tokens):
    sharding = make_sharding("zigzag", 2, tokens, ())
    rows = sample_rows(sharding, 1)
    assert {0, tokens // 2 - 1} <= set(rows)
    assert len(rows) == min(16, tokens // 2)
    assert rows == sorted(set(rows))
