"""Other libraries' attention, as the operator benchmark calls it, against unsharded attention in float64.

They are part of the test environment: an absent one fails here.
"""

import sys
from dataclasses import replace
from inspect import signature
from itertools import product

import pytest
import torch
import torch.distributed as dist

from charm_megatron.bench.modelled import ModelledKernel
from charm_megatron.errors import ConfigError
from charm_megatron.kernels import ReferenceKernel
from charm_megatron.peers import flash_attn_on_cpu
from charm_megatron.peers import registry as peers
from charm_megatron.peers.calls import make_call
from charm_megatron.peers.check import PeerCheck, check_peer
from charm_megatron.peers.registry import PEERS, peer_named, tokens_of, why_not
from charm_megatron.workload import CAUSAL, NO_MASK, Mask, Workload
from tests.full_attention import relative_error
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo

TOKENS_PER_RANK = 32
MANY_HEADS, SHARED_HEADS = 8, 4


def workload(size, mask, kv_heads, dtype="bfloat16", heads=8):
    return Workload(2, TOKENS_PER_RANK * size, heads, kv_heads, 16, 16, dtype, mask)


def check_all(rank, size, dtype):
    """What each peer gives for each mask and number of KV heads: its check, or why it cannot."""
    found = {}
    for name, mask, kv_heads in product(PEERS, (NO_MASK, CAUSAL), (MANY_HEADS, SHARED_HEADS)):
        case = workload(size, mask, kv_heads, dtype)
        found[name, str(mask), kv_heads] = why_not(PEERS[name], case, size) or check_peer(
            PEERS[name], dist.group.WORLD, case, TOKENS_PER_RANK
        )
    return found


def split(found):
    ran = {case: result for case, result in found.items() if isinstance(result, PeerCheck)}
    return ran, found.keys() - ran.keys()


CAUSAL_ONLY = ("ringmaster_distflash", "ring_flash_attn_zigzag", "ring_flash_attn_stripe")


def test_every_peer_equals_full_attention_forward_and_backward_within_a_few_roundings():
    first, *others = run_ranks(check_all, 4, "bfloat16")
    assert others == [first] * 3
    ran, refused = split(first)
    assert {case: check.fault for case, check in ran.items() if check.fault} == {}
    assert all(error < 2e-2 for check in ran.values() for error in check.errors.values())
    assert refused == {
        *((name, "none", kv_heads) for name in CAUSAL_ONLY for kv_heads in (MANY_HEADS, SHARED_HEADS)),
        ("ringmaster_distflash", "causal", SHARED_HEADS),
    }


def test_peers_that_take_float32_are_exact_in_it():
    ran, _ = split(run_ranks(check_all, 4, "float32")[0])
    assert {name for name, *_ in ran} == {
        "torch_ring",
        "torch_allgather",
        "ringmaster_ring",
        "ringmaster_allgather",
        "ringmaster_distflash",
        "yunchang_ulysses",
    }
    assert {case: check.fault for case, check in ran.items() if check.fault} == {}
    assert all(max(check.errors.values()) < 5e-6 for check in ran.values())


def test_balanced_rings_on_flash_attn_take_float16():
    ran, _ = split(run_ranks(check_all, 2, "float16")[0])
    assert {case: check.fault for case, check in ran.items() if check.fault} == {}
    assert {name for name, *_ in ran} == PEERS.keys() - {"ring_flash_attn_ring", "yunchang_usp_2"}


def test_peers_run_on_a_number_of_ranks_that_is_no_power_of_two():
    ran, refused = split(run_ranks(check_all, 3, "bfloat16")[0])
    assert {case: check.fault for case, check in ran.items() if check.fault} == {}
    assert {name for name, *_ in ran} == PEERS.keys() - {"yunchang_ulysses", "yunchang_usp_2"}
    assert ("yunchang_usp_2", "causal", MANY_HEADS) in refused


def check_in_float32(rank, size):
    """The ring of ring-flash-attn in a dtype that `why_not` keeps from it."""
    assert why_not(PEERS["ring_flash_attn_ring"], workload(size, CAUSAL, MANY_HEADS, "float32"), size)
    peer = replace(PEERS["ring_flash_attn_ring"], dtypes=("float32",))
    return check_peer(peer, dist.group.WORLD, workload(size, CAUSAL, MANY_HEADS, "float32"))


def test_wrong_gradients_are_named_with_their_error():
    for check in run_ranks(check_in_float32, 4):
        assert check.errors["out"] < 1e-5
        assert max(check.errors.values()) > 0.1
        assert check.fault.startswith("wrong: dq error ")


def results_and_layouts(rank, size):
    """Shapes of a peer's results, and whether repeated passes give the same."""
    found = {}
    for name, peer in PEERS.items():
        case = workload(size, CAUSAL, MANY_HEADS)
        q, k, v, dout = (torch.randn(TOKENS_PER_RANK, 2, 8, 16).bfloat16() for _ in range(4))
        run = make_call(peer, dist.group.WORLD, case).prepare(q, k, v, dout)
        run.forward()
        run.backward()
        first = run.results()
        run.forward()
        run.backward()
        again = run.results()
        found[name] = (
            {(x.shape, x.dtype) for x in first},
            all(torch.equal(a, b) for a, b in zip(first, again, strict=True)),
        )
    return found


def test_results_have_our_layout_and_passes_may_be_repeated():
    expected = {((TOKENS_PER_RANK, 2, 8, 16), torch.bfloat16)}
    for found in run_ranks(results_and_layouts, 4):
        assert found == dict.fromkeys(PEERS, (expected, True))


def modelled_results(rank, size):
    """Largest entry of all results when blocks are waits, which give zeros."""
    found = {}
    for name, peer in PEERS.items():
        case = workload(size, CAUSAL, MANY_HEADS)
        if why_not(peer, case, size, is_modelled=True):
            continue
        kernel = ModelledKernel(float("inf"), float("inf"))
        shard = (torch.randn(TOKENS_PER_RANK, 2, 8, 16).bfloat16() for _ in range(4))
        run = make_call(peer, dist.group.WORLD, case, kernel).prepare(*shard)
        run.forward()
        run.backward()
        found[name] = max(float(x.abs().max()) for x in run.results())
    return found


def test_blocks_can_be_replaced_by_waits_where_a_peer_leaves_them_to_others():
    for found in run_ranks(modelled_results, 4):
        assert found == {name: 0.0 for name in PEERS if not name.startswith("ringmaster")}


def stand_in_errors(rank, size):
    """Errors of the stand-in's functions against the reference kernel, and its functions' arguments."""
    flash_attn_on_cpu.install()
    from flash_attn import __version__, flash_attn_func
    from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

    errors = {}
    for causal, kv_heads in product((False, True), (4, 2)):
        random = torch.Generator().manual_seed(1)
        heads = (4, kv_heads, kv_heads, 4)
        whole = [torch.randn(40, 2, n, 16, generator=random).bfloat16() for n in heads]
        kernel, (q, k, v, dout) = ReferenceKernel(), [x.double() for x in whole]
        out, lse = kernel.forward(q, k, v, causal=causal, softmax_scale=0.2)
        expected = kernel.backward(dout, q, k, v, out, lse, causal=causal, softmax_scale=0.2)
        q, k, v, dout = (x.transpose(0, 1) for x in whole)
        its_out, its_lse, *_ = _flash_attn_forward(q, k, v, 0.0, 0.2, causal=causal)
        buffers = [torch.empty_like(x) for x in (q, k, v)]
        _flash_attn_backward(dout, q, k, v, its_out, its_lse, *buffers, 0.0, 0.2, causal)
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        whole_out = flash_attn_func(*leaves, softmax_scale=0.2, causal=causal)
        gradients = torch.autograd.grad(whole_out, leaves, dout)
        assert torch.equal(whole_out, its_out)
        assert all(torch.equal(a, b) for a, b in zip(gradients, buffers, strict=True))
        errors[causal, kv_heads, "lse"] = relative_error(its_lse.permute(2, 0, 1).double(), lse)
        for name, got, reference in zip(
            ("out", "dq", "dk", "dv"), (its_out, *buffers), (out, *expected), strict=True
        ):
            errors[causal, kv_heads, name] = relative_error(got.transpose(0, 1).double(), reference)
    with pytest.raises(NotImplementedError, match="no dropout"):
        _flash_attn_forward(q, k, v, 0.1, 0.2, False)
    with pytest.raises(NotImplementedError, match="as long as wide, not 40 x 39"):
        _flash_attn_forward(q, k[:, 1:], v[:, 1:], 0.0, 0.2, True)
    return errors, __version__, list(signature(_flash_attn_forward).parameters)


def test_the_stand_in_for_flash_attn_is_right_and_stays_in_its_process():
    ((errors, version, arguments),) = run_ranks(stand_in_errors, 1)
    assert {name: error for name, error in errors.items() if not error < 1e-2} == {}
    assert version >= "2.6.3"
    assert arguments[3:8] == [
        "dropout_p",
        "softmax_scale",
        "causal",
        "window_size_left",
        "window_size_right",
    ]
    assert "flash_attn" not in sys.modules


def test_tokens_of_all_ranks_are_the_sequence():
    case = workload(4, CAUSAL, MANY_HEADS)
    for peer in PEERS.values():
        shards = [tokens_of(peer, case, 4, rank) for rank in range(4)]
        assert {len(shard) for shard in shards} == {TOKENS_PER_RANK}
        assert sorted(token for shard in shards for token in shard) == list(range(case.seq_len))
    assert tokens_of(PEERS["yunchang_usp_2"], case, 4, 1) == tuple(range(96, 128))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("torch_ring", {"mask": Mask(7, 0)}, "takes mask none or causal, not window:7,0"),
        ("ring_flash_attn_stripe", {"mask": NO_MASK}, "takes mask causal, not none"),
        ("yunchang_usp_2", {"dtype": "float32"}, "is right in bfloat16 only, not in float32"),
        ("torch_ring", {"head_dim_v": 8}, "takes v as wide as q and k, not 8 and 16"),
        ("ringmaster_distflash", {"num_kv_heads": 4}, "takes a KV head for each query head, not 4 for 8"),
        ("yunchang_ulysses", {"num_kv_heads": 2}, "shares heads out over 4 ranks, but 2 KV heads"),
        ("ring_flash_attn_zigzag", {"seq_len": 132}, "takes a multiple of 8 tokens, not 132"),
    ],
)
def test_what_a_peer_cannot_do_is_one_sentence(name, change, message):
    case = workload(4, CAUSAL, MANY_HEADS)
    assert why_not(PEERS[name], case, 4) is None
    assert why_not(PEERS[name], replace(case, **change), 4).startswith(message)


def test_a_group_of_one_and_modelled_blocks_of_a_peer_that_computes_itself_are_refused():
    case = workload(4, CAUSAL, MANY_HEADS)
    assert why_not(PEERS["torch_ring"], case, 1) == "runs on 2 ranks or more, not on 1"
    assert "cannot be replaced by waits" in why_not(PEERS["ringmaster_ring"], case, 4, is_modelled=True)
    assert why_not(PEERS["yunchang_usp_2"], case, 4, is_modelled=True) is None


def test_a_missing_package_is_named_with_how_to_get_it(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    case = workload(4, CAUSAL, MANY_HEADS)
    assert why_not(PEERS["yunchang_ulysses"], case, 4) == (
        "yunchang is not installed: pip install 'charm-megatron[peers]'"
    )
    assert why_not(PEERS["torch_ring"], case, 4).startswith("this torch has no module torch.distributed.")


def test_a_flash_attn_that_is_no_stand_in_keeps_it_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", sys)
    assert "takes no CPU tensors" in why_not(PEERS["yunchang_ulysses"], workload(4, CAUSAL, MANY_HEADS), 4)
    with pytest.raises(ConfigError, match="no stand-in for flash_attn"):
        flash_attn_on_cpu.install()


def test_a_misspelt_peer_gets_a_suggestion():
    assert peer_named("torch_ring").version == torch.__version__.split("+")[0]
    with pytest.raises(ConfigError, match="did you mean 'torch_ring'"):
        peer_named("torch_rnig")
