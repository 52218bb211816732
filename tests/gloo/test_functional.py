"""The functions of the package's face, on real ranks over gloo."""

import subprocess
import sys
from itertools import product

import pytest
import torch
import torch.distributed as dist

import charm_megatron as cm
from charm_megatron.errors import InvalidInput, WorkloadError
from charm_megatron.workload import parse_mask
from tests.full_attention import full_attention, relative_error, visible
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo

SEQ_LEN, HEADS, KV_HEADS, WIDTH = 32, 4, 2, 8
DOCUMENTS = (8, 24)


def inputs():
    random = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(SEQ_LEN, 2, h, WIDTH, dtype=torch.float64, generator=random) for h in heads]


def attention_case(rank, size, mask, schedule, layout, documents):
    group = dist.new_group()
    where = {"group": group, "layout": layout, "documents": documents}
    q, k, v, dout = inputs()
    leaves = [cm.shard(x, **where).requires_grad_() for x in (q, k, v)]
    out = cm.context_parallel_attention(
        *leaves, group=group, mask=mask, schedule=schedule, layout=layout, domains=2
    )
    grads = torch.autograd.grad(out, leaves, cm.shard(dout, **where))
    return [cm.unshard(x, **where).numpy() for x in (out, *grads)]


@pytest.mark.parametrize(
    ("mask", "schedule", "layout", "documents"),
    [
        ("causal", "charm", "zigzag", ()),
        ("none", "ulysses", "contiguous", ()),
        (cm.Mask(5, 0, DOCUMENTS), "ring", "document_zigzag", DOCUMENTS),
    ],
)
def test_a_split_sequence_has_the_attention_and_gradients_of_the_whole(mask, schedule, layout, documents):
    q, k, v, dout = inputs()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    whole = {"causal": cm.Mask(), "none": cm.Mask(None, None)}.get(str(mask), mask)
    out, _ = full_attention(*leaves, whole)
    wanted = [out, *torch.autograd.grad(out, leaves, dout)]
    for got in run_ranks(attention_case, 4 if not documents else 2, mask, schedule, layout, documents):
        pairs = zip(map(torch.from_numpy, got), wanted, strict=True)
        assert max(relative_error(a, b) for a, b in pairs) < 1e-12


def positions_case(rank, size):
    tokens = torch.arange(SEQ_LEN)
    cases = (("zigzag", ()), ("striped", ()), ("document_zigzag", DOCUMENTS), ("contiguous", DOCUMENTS))
    return [
        (
            cm.positions(SEQ_LEN, group=None, layout=layout, documents=documents).tolist(),
            cm.shard(tokens, group=None, layout=layout, documents=documents).tolist(),
            cm.shard(tokens[None], group=None, layout=layout, dim=1, documents=documents)[0].tolist(),
            cm.unshard(
                cm.shard(tokens, group=None, layout=layout, documents=documents),
                group=None,
                layout=layout,
                documents=documents,
            ).tolist(),
            documents,
        )
        for layout, documents in cases
    ]


def test_positions_are_those_of_the_shards_tokens_and_unshard_puts_them_back():
    for cases in run_ranks(positions_case, 2):
        for positions, tokens, tokens_along_1, whole, documents in cases:
            start = documents[0] if documents else SEQ_LEN
            assert positions == [token if token < start else token - start for token in tokens]
            assert tokens_along_1 == tokens
            assert whole == list(range(SEQ_LEN))


def refusals_case(rank, size):
    q = torch.zeros(8, 1, 2, 4)
    destroyed = dist.new_group()
    dist.destroy_process_group(destroyed)
    other = dist.new_group([0])
    said = {}

    def call(label, *tensors, **settings):
        try:
            cm.context_parallel_attention(*(tensors or (q, q, q)), **{"group": None, **settings})
        except InvalidInput as error:
            said[label] = str(error)

    call("a mask misspelt", mask="casual")
    call("no mask", mask=None)
    call("a scale of 0", softmax_scale=0.0)
    call("a negative scale", softmax_scale=-0.5)
    call("NaN as scale", softmax_scale=float("nan"))
    call("float8", *[q.to(torch.float8_e4m3fn)] * 3)
    call("a list", q, q, [1.0])
    call("a destroyed group", group=destroyed)
    call("a number as group", group=3)
    call("a setting misspelt", domian=2)
    call("a kernel misspelt", kernel="torhc")
    call("a margin on a CPU", sm_margin=8)
    call("no domain", domains=0)
    call("three dimensions", q[0], q[0], q[0])
    if rank == 1:
        call("a group of others", group=other)
    try:
        cm.Mask(documents=[4, 4])
    except InvalidInput as error:
        said["documents as a list"] = str(error)
    try:
        cm.shard(torch.zeros(7), group=None)
    except InvalidInput as error:
        said["a length that does not divide"] = str(error)
    return said


REFUSALS = {
    "a mask misspelt": "did you mean 'causal'?",
    "no mask": "a mask is a Mask or a word such as 'causal' or 'none', but is NoneType None",
    "a scale of 0": "softmax_scale must be positive and finite, but is 0.0",
    "a negative scale": "softmax_scale must be positive and finite, but is -0.5",
    "NaN as scale": "softmax_scale must be positive and finite, but is nan",
    "float8": "takes tensors of dtype float64, float32, bfloat16 or float16, but they are float8_e4m3fn",
    "a list": "attention takes tensors, but v is list",
    "a destroyed group": "the group was destroyed; make another one with new_group",
    "a number as group": "group is a torch.distributed.ProcessGroup or None, but is int",
    "a setting misspelt": "unknown key 'domian'; did you mean 'domains'?",
    "a kernel misspelt": "unknown kernel 'torhc'; did you mean 'torch'?",
    "a margin on a CPU": "it cannot leave 8 multiprocessors to NCCL (sm_margin); use sm_margin 0",
    "no domain": "domains: input should be 'hosts', 'numa' or 'nvlink', or input should be greater than 0",
    "three dimensions": "attention takes tensors [tokens, batch, heads, width], but got q [1, 2, 4]",
    "documents as a list": "documents are a tuple of lengths in tokens, but are list [4, 4]",
    "a length that does not divide": "must be a multiple of 4, such as 4 or 8",
}


def test_bad_input_is_refused_in_one_sentence_on_every_rank():
    for rank, said in enumerate(run_ranks(refusals_case, 2)):
        wanted = REFUSALS | ({"a group of others": "this process is not in the group"} if rank == 1 else {})
        assert said.keys() == wanted.keys()
        for label, words in wanted.items():
            assert words in said[label], label
            assert "\n" not in said[label]


def forget_case(rank, size):
    runtime = cm.AttentionRuntime(cm.CharmConfig(domains=1, deadline_s=60))
    q = torch.ones(8, 1, 2, 4)
    sent = []
    for _ in range(3):
        group = dist.new_group()
        runtime.attention(q, q, q, group=group)
        sent.append(runtime.num_bytes_sent_to_all)
        runtime.forget(group)
        dist.barrier()
        dist.destroy_process_group(group)
    return sent, runtime.num_bytes_sent_to_all


def test_a_forgotten_group_leaves_nothing_behind():
    for sent, left in run_ranks(forget_case, 2):
        assert sent[0] > 0
        assert sent == [sent[0]] * 3
        assert left == 0


def many_groups_case(rank, size):
    runtime = cm.AttentionRuntime(cm.CharmConfig(domains=1, deadline_s=60))
    q = torch.ones(8, 1, 2, 4)
    seen = []
    for _ in range(12):
        group = dist.new_group()
        runtime.attention(q, q, q, group=group)
        dist.barrier()
        dist.destroy_process_group(group)
        seen.append(runtime.num_bytes_sent_to_all)
    return seen


def test_groups_that_are_destroyed_without_a_word_are_forgotten_when_the_next_one_comes():
    """Each group sends the same, and no more than one is remembered at a time."""
    for seen in run_ranks(many_groups_case, 2):
        assert seen == [seen[0]] * len(seen)


def many_lengths_case(rank, size):
    runtime = cm.AttentionRuntime(cm.CharmConfig(domains=1, deadline_s=60))
    held = []
    for length in [512, *range(8, 512, 8)]:
        q = torch.ones(length, 1, 2, 4)
        runtime.attention(q, q, q, group=None)
        held.append(runtime.num_bytes_held)
    return held


def test_memory_held_for_many_lengths_is_bounded_by_what_the_longest_needs():
    for held in run_ranks(many_lengths_case, 2):
        assert max(held) <= 4 * held[0]


COMPILED = """
import sys, warnings
import torch, torch.distributed as dist
import charm_megatron as cm

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.randn(16, 1, 4, 8).requires_grad_()

def layer(x):
    return cm.context_parallel_attention(x * 2, x, x, group=dist.group.WORLD).sin()

plain = layer(x)
assert "torch._dynamo" not in sys.modules, "the compiler is loaded for nothing"
compiled = torch.compile(layer, backend="eager")
wanted, *found = [(out, *torch.autograd.grad(out.sum(), x)) for out in (plain, compiled(x), compiled(x))]
assert all(torch.equal(a, b) for one in found for a, b in zip(wanted, one, strict=True))
breaks = list(torch._dynamo.utils.counters["graph_break"])
assert breaks and all("compiler.disable" in why for why in breaks), breaks
"""


def test_torch_compile_leaves_attention_alone_and_is_not_loaded_for_it():
    """In a process of its own: that of the tests may have loaded the compiler."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def attention_with_sink(q, k, v, mask, sink):
    """As `full_attention`, with one more logit in each row."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    logits = torch.einsum("sbhd,tbhd->bhst", q, k) * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~visible(mask, q.shape[0]), -torch.inf)
    row = sink[None, :, None, None].expand(*logits.shape[:3], 1)
    return torch.einsum("bhst,tbhd->sbhd", torch.cat([logits, row], -1).softmax(-1)[..., :-1], v)


SINKS = {"learned": [0.5, -3.0, 40.0, -torch.inf], "off by one": [0.0] * HEADS}
SINK_MASKS = ("causal", "none", "window:3,0")


def sink_case(rank, size, schedule):
    group = dist.new_group()
    q, k, v, dout = inputs()
    results = []
    for mask, values in product(SINK_MASKS, SINKS.values()):
        leaves = [cm.shard(x, group=group).requires_grad_() for x in (q, k, v)]
        sink = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        out = cm.context_parallel_attention(
            *leaves, sink=sink, group=group, mask=mask, schedule=schedule, domains=2
        )
        *grads, dsink = torch.autograd.grad(out, [*leaves, sink], cm.shard(dout, group=group))
        dist.all_reduce(dsink, group=group)
        results.append([*(cm.unshard(x, group=group).numpy() for x in (out, *grads)), dsink.numpy()])
    return results


@pytest.mark.parametrize("schedule", ["ring", "charm", "ulysses", "hierarchical", "attention_2d"])
def test_a_sink_is_in_every_softmax_once_whatever_the_schedule(schedule):
    cases = list(product(SINK_MASKS, SINKS.values()))
    for got in run_ranks(sink_case, 4, schedule):
        for (mask, values), tensors in zip(cases, got, strict=True):
            q, k, v, dout = inputs()
            leaves = [x.requires_grad_() for x in (q, k, v)]
            sink = torch.tensor(values, dtype=torch.float64, requires_grad=True)
            out = attention_with_sink(*leaves, parse_mask(mask), sink)
            wanted = [out, *torch.autograd.grad(out, [*leaves, sink], dout)]
            pairs = zip(map(torch.from_numpy, tensors), wanted, strict=True)
            assert max(relative_error(a, b) for a, b in pairs) < 1e-12, (mask, values)


def refused_sinks_case(rank, size):
    x = torch.randn(8, 1, 4, 8)
    said = []
    for sink, schedule in (
        (torch.zeros(4), "ring_self_attention"),
        (torch.zeros(3), "ring"),
        (torch.zeros(4, dtype=torch.int64), "ring"),
        (0.5, "ring"),
        (torch.zeros(4, device="meta"), "ring"),
    ):
        with pytest.raises(WorkloadError) as error:
            cm.context_parallel_attention(x, x, x, sink=sink, group=dist.group.WORLD, schedule=schedule)
        said.append(str(error.value))
    return said


def test_what_is_no_sink_is_refused_in_a_sentence_on_every_rank():
    for said in run_ranks(refused_sinks_case, 2):
        assert said == [
            "ring_self_attention keeps the probabilities of all blocks, which a sink would change; another schedule "
            "would work",
            "a sink has one logit for each of 4 query heads, but has shape [3]",
            "a sink is a tensor of floating point, but is torch.int64; zeros are off-by-one softmax",
            "a sink is a tensor of floating point, but is float; zeros are off-by-one softmax",
            "a sink is where q is, on cpu, but is on meta; sink.to(q.device) would work",
        ]
