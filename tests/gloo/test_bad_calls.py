"""What programs get wrong when they call attention, and what they are told: a table, on every rank alike."""

import pytest
import torch
import torch.distributed as dist

import charm_megatron as cm
from charm_megatron.errors import InvalidInput
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo

DENSE = "attention takes dense tensors, but q is "
DTYPES = "attention takes tensors of dtype float64, float32, bfloat16 or float16, but they are "
SCALE = "softmax_scale is a number, but is "
REACH = "a window reaches a whole number of tokens, or None, but is "
LAYOUT = "a layout is one of contiguous, zigzag, striped, document_zigzag, but is "
DIM = "is no dimension of a tensor of shape "
NO_GROUP = "group is a torch.distributed.ProcessGroup or None, but is "


def table():
    """Calls, each with what it is told."""
    q, line = torch.zeros(8, 1, 2, 4), torch.zeros(8)

    def call(*tensors, **settings):
        return lambda: cm.context_parallel_attention(*(tensors or (q, q, q)), **{"group": None, **settings})

    runtime = cm.AttentionRuntime(cm.CharmConfig(domains=1, deadline_s=60))
    return {
        "no tokens": (call(q[:0], q[:0], q[:0]), "seq_len must be at least 1, but is 0"),
        "no heads": (call(*[q[:, :, :0]] * 3), "num_heads must be at least 1, but is 0"),
        "no KV heads": (call(q, q[:, :, :0], q[:, :, :0]), "num_kv_heads must be at least 1, but is 0"),
        "no batch": (call(*[q[:, :0]] * 3), "batch must be at least 1, but is 0"),
        "no width": (call(q[..., :0], q[..., :0], q), "head_dim must be at least 1, but is 0"),
        "integers": (call(*[q.int()] * 3), f"{DTYPES}int32"),
        "complex": (call(*[q.cfloat()] * 3), f"{DTYPES}complex64"),
        "numpy": (call(q.numpy(), q, q), "attention takes tensors, but q is ndarray"),
        "no query": (call(None, q, q), "attention takes tensors, but q is NoneType"),
        "meta": (call(*[q.to("meta")] * 3), f"{DENSE}without data (meta)"),
        "sparse": (call(*[q.to_sparse()] * 3), f"{DENSE}torch.sparse_coo"),
        "scale as text": (call(softmax_scale="0.5"), f"{SCALE}str '0.5'; None is 1 / sqrt(head_dim)"),
        "scale as a switch": (call(softmax_scale=True), f"{SCALE}bool True; None is 1 / sqrt(head_dim)"),
        "complex scale": (call(softmax_scale=1j), f"{SCALE}complex 1j; None is 1 / sqrt(head_dim)"),
        "mask as a switch": (
            call(mask=True),
            "a mask is a Mask or a word such as 'causal' or 'none', but is bool True",
        ),
        "documents too short": (
            call(mask="causal+documents:5,6"),
            "documents have 11 tokens, the sequence has 16",
        ),
        "half a token": (lambda: cm.Mask(2.5, 0), f"{REACH}float 2.5"),
        "reach as text": (lambda: cm.Mask("3", 0), f"{REACH}str '3'"),
        "half a document": (
            lambda: cm.Mask(documents=(1.5, 2)),
            "documents are whole numbers of tokens, but are (1.5, 2)",
        ),
        "no layout": (call(layout=None), f"{LAYOUT}NoneType None"),
        "layouts": (call(layout=["zigzag"]), f"{LAYOUT}list ['zigzag']"),
        "no schedule": (
            call(schedule=None),
            "context_parallel_attention: schedule: input should be a valid string, but is None",
        ),
        "three domains": (
            call(domains=3),
            "2 context-parallel ranks do not split into 3 equal domains; domains may be 1 or 2",
        ),
        "no deadline": (
            call(deadline_s=0),
            "context_parallel_attention: deadline_s: input should be greater than 0, but is 0",
        ),
        "group by name": (call(group="cp"), f"{NO_GROUP}str"),
        "group of numbers": (call(group=[0, 1]), f"{NO_GROUP}list"),
        "forget a number": (lambda: runtime.forget(3), f"{NO_GROUP}int"),
        "no member": (
            call(group=dist.GroupMember.NON_GROUP_MEMBER),
            "this process is not in the group, whose ranks alone may call",
        ),
        "settings as a dict": (
            lambda: cm.AttentionRuntime({"schedule": "ring"}),
            "a runtime takes a CharmConfig, but got dict {'schedule': 'ring'}; "
            "AttentionRuntime(CharmConfig(schedule=..)) would work",
        ),
        "shard along no dimension": (lambda: cm.shard(line, group=None, dim=1), f"dim 1 {DIM}[8]"),
        "shard a number": (lambda: cm.shard(torch.tensor(1.0), group=None), f"dim 0 {DIM}[]"),
        "shard by name": (lambda: cm.shard(line, group=None, dim="s"), f"dim 's' {DIM}[8]"),
        "shard a list": (
            lambda: cm.shard([1, 2, 3, 4], group=None),
            "a sequence to split is a tensor, but is list",
        ),
        "unshard along no dimension": (lambda: cm.unshard(line, group=None, dim=1), f"dim 1 {DIM}[8]"),
        "negative length": (
            lambda: cm.positions(-8, group=None),
            "sequence length -8 does not divide over 2 ranks in zigzag layout: it must be a multiple of 4, "
            "such as 4",
        ),
        "length as a float": (
            lambda: cm.positions(8.0, group=None),
            "seq_len is a whole number of tokens, but is float 8.0",
        ),
        "workload of halves": (
            lambda: cm.Workload(1, 8.5, 2, 2, 4, 4),
            "seq_len must be a whole number, but is float 8.5",
        ),
        "workload with a word": (
            lambda: cm.Workload(1, 8, 2, 2, 4, 4, mask="causal"),
            "the mask of a workload is a Mask, but is str 'causal'; parse_mask reads words",
        ),
    }


def refusals(rank, size):
    said = {}
    for label, (call, _) in table().items():
        try:
            said[label] = f"returned {type(call()).__name__}"
        except InvalidInput as error:
            said[label] = str(error)
    return said


def test_bad_calls_are_refused_with_a_sentence_on_every_rank():
    for said in run_ranks(refusals, 2, timeout_s=60):
        assert said == {label: sentence for label, (_, sentence) in table().items()}
