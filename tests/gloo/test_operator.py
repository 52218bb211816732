"""Context-parallel attention on real ranks against fp64 attention on one process."""

import json
import time
from itertools import product

import pytest
import torch
import torch.distributed as dist

from charm_megatron.config import CharmConfig
from charm_megatron.errors import (
    PlanError,
    ScheduleDisagreement,
    TopologyError,
    TransferTimeout,
    WorkloadError,
)
from charm_megatron.executor import AttentionRuntime
from charm_megatron.lowering.schedules import make_schedules
from charm_megatron.planner import plan, shipped_planners
from charm_megatron.schedule.json_form import to_json
from charm_megatron.schedule.passes import DIRECTIONS
from charm_megatron.schedule.problem import Problem
from charm_megatron.sharding import make_sharding
from charm_megatron.topology import even_domains
from charm_megatron.verify.programs import check_schedule
from charm_megatron.workload import CAUSAL, NO_MASK, Mask, Workload
from tests.full_attention import full_attention, relative_error
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo

PLANNERS = shipped_planners()

BATCH, HEADS, HEAD_DIM, TOKENS_PER_CHUNK = 2, 4, 8, 6
TENSORS = ("out", "lse", "dq", "dk", "dv")


def inputs(seq_len, kv_heads, head_dim_v, dtype=torch.float64, heads=HEADS):
    """q, k, v and dout of the whole sequence, the same on every rank."""
    random = torch.Generator().manual_seed(seq_len + kv_heads)
    widths = ((heads, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, head_dim_v), (heads, head_dim_v))
    made = [
        torch.randn(seq_len, BATCH, *w, dtype=torch.float64, generator=random).to(dtype).double()
        for w in widths
    ]
    return *(x.requires_grad_() for x in made[:3]), made[3]


def run_case(
    runtime,
    rank,
    size,
    *,
    layout="zigzag",
    mask=CAUSAL,
    heads=HEADS,
    kv_heads=HEADS,
    head_dim_v=HEAD_DIM,
    dtype=torch.float64,
):
    """Errors of one rank's shard relative to full attention, by tensor."""
    seq_len = 2 * size * TOKENS_PER_CHUNK
    q, k, v, dout = inputs(seq_len, kv_heads, head_dim_v, dtype, heads)
    out, lse = full_attention(q, k, v, mask)
    expected = (out, lse, *torch.autograd.grad(out, (q, k, v), dout))
    mine = torch.tensor(make_sharding(layout, size, seq_len, mask.documents).tokens_of(rank))
    shard = [x.detach()[mine].to(dtype).requires_grad_() for x in (q, k, v)]
    got, got_lse = runtime.attention_with_lse(*shard, group=dist.group.WORLD, mask=mask, layout=layout)
    grads = torch.autograd.grad(got, shard, dout[mine].to(dtype))
    values = (got, got_lse, *grads)
    return {
        name: relative_error(value.double(), reference[mine])
        for name, value, reference in zip(TENSORS, values, expected, strict=True)
    }


def all_cases(rank, size):
    """Worst error of every planner on every way to split `size` into domains; None where it refuses."""
    worst = {}
    counts = sorted({count for count in (1, 2, size) if size % count == 0})
    for schedule, domains, (layout, mask, group) in product(
        PLANNERS, counts, (("zigzag", CAUSAL, 1), ("contiguous", NO_MASK, 2))
    ):
        runtime = AttentionRuntime(CharmConfig(schedule=schedule, domains=domains, deadline_s=60))
        sizes = {"heads": 2 * size, "kv_heads": 2 * size // group}
        try:
            errors = run_case(runtime, rank, size, layout=layout, mask=mask, **sizes)
        except PlanError:
            worst[schedule, domains, layout, str(mask)] = None
            continue
        worst[schedule, domains, layout, str(mask)] = max(errors.values())
    return worst


@pytest.mark.parametrize("size", range(1, 9))
def test_every_schedule_equals_full_attention_forward_and_backward(size):
    for worst in run_ranks(all_cases, size):
        ran = {case: error for case, error in worst.items() if error is not None}
        assert {case: error for case, error in ran.items() if not error < 1e-10} == {}
        refused = {case[0] for case, error in worst.items() if error is None}
        assert refused <= {"dist_flash", "tasp"}
        assert {case[0] for case in ran} >= set(PLANNERS) - refused


def core_cases(rank, size):
    worst = {}
    for schedule, domains in (("ring", 1), ("rm_plus", 1), ("charm", 1), ("charm", 2), ("charm_together", 2)):
        runtime = AttentionRuntime(CharmConfig(schedule=schedule, domains=domains, deadline_s=60))
        for mask, kv_heads in product((CAUSAL, NO_MASK), (HEADS, 1)):
            errors = run_case(runtime, rank, size, mask=mask, kv_heads=kv_heads)
            worst[schedule, domains, str(mask), kv_heads] = max(errors.values())
    return worst


@pytest.mark.parametrize("size", [4, 8])
def test_ring_and_charm_are_exact_with_shared_kv_heads_too(size):
    for worst in run_ranks(core_cases, size):
        assert {case: error for case, error in worst.items() if not error < 1e-10} == {}


def mask_cases(rank, size):
    worst = {}
    seq_len = 2 * size * TOKENS_PER_CHUNK
    documents = (4, seq_len - 9, 5)
    for layout, mask in (
        ("zigzag", Mask(7, 0)),
        ("contiguous", Mask(9, 4)),
        ("striped", CAUSAL),
        ("striped", Mask(11, 0, documents)),
        ("zigzag", Mask(None, 0, documents)),
        ("document_zigzag", Mask(None, 0, (2 * size, seq_len - 2 * size))),
    ):
        runtime = AttentionRuntime(CharmConfig(schedule="charm", domains=2, deadline_s=60))
        errors = run_case(runtime, rank, size, layout=layout, mask=mask, kv_heads=2)
        worst[layout, str(mask)] = max(errors.values())
    return worst


def test_windows_documents_and_other_layouts_are_exact():
    for worst in run_ranks(mask_cases, 4):
        assert {case: error for case, error in worst.items() if not error < 1e-10} == {}


def written_case(rank, size, path):
    runtime = AttentionRuntime(CharmConfig(schedule=path, domains=2, deadline_s=60))
    return max(run_case(runtime, rank, size).values())


def test_a_schedule_from_a_file_runs(tmp_path):
    size = 4
    sharding = make_sharding("zigzag", size, 2 * size * TOKENS_PER_CHUNK)
    method = plan("charm", Problem(sharding, even_domains(size, 2)))
    path = tmp_path / "mine.json"
    schedules = [phase for way in ("forward", "backward") for phase in make_schedules(method, way)]
    path.write_text(json.dumps(to_json("mine", schedules)), encoding="utf-8")
    assert max(run_ranks(written_case, size, str(path))) < 1e-10


def settings_cases(rank, size):
    errors = {}
    for depth, fuse, kernel in product((1, 3), (True, False), ("torch", "reference")):
        config = CharmConfig(domains=2, prefetch_depth=depth, fuse=fuse, kernel=kernel, deadline_s=60)
        found = run_case(AttentionRuntime(config), rank, size, kv_heads=2, head_dim_v=6)
        errors[depth, fuse, kernel] = max(found.values())
    return errors


def test_prefetch_separate_lanes_kernels_and_unequal_head_widths_change_nothing():
    for errors in run_ranks(settings_cases, 4):
        assert {case: error for case, error in errors.items() if not error < 1e-10} == {}


def byte_counts(rank, size):
    rows = []
    for schedule in (
        "ring",
        "rm_plus",
        "charm",
        "charm_keep_kv",
        "charm_per_domain",
        "charm_together",
        "ulysses",
        "attention_2d",
    ):
        runtime = AttentionRuntime(CharmConfig(schedule=schedule, domains=2, deadline_s=60))
        run_case(runtime, rank, size, kv_heads=2, dtype=torch.bfloat16)
        workload = Workload(BATCH, 2 * size * TOKENS_PER_CHUNK, HEADS, 2, HEAD_DIM, HEAD_DIM, "bfloat16")
        receipt = runtime.receipt(dist.group.WORLD, workload)
        for phase in receipt.plan.schedules:
            check_schedule(phase)
        planned = sum(receipt.plan.traffic(direction).total_bytes[rank] for direction in DIRECTIONS)
        rows.append((schedule, runtime.num_bytes_sent(dist.group.WORLD), int(planned)))
    return rows


def test_bytes_posted_equal_the_plan_and_the_checker_passes_what_ran():
    for rows in run_ranks(byte_counts, 4):
        assert [(name, planned) for name, _, planned in rows] == [(name, posted) for name, posted, _ in rows]
        assert all(posted > 0 for _, posted, _ in rows)


def bfloat16_case(rank, size, dtype):
    config = CharmConfig(domains=2, out_return_dtype=dtype, grad_return_dtype=dtype, deadline_s=60)
    runtime = AttentionRuntime(config)
    return run_case(runtime, rank, size, kv_heads=2, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", ["model", "float32"])
def test_bfloat16_stays_within_a_few_roundings(dtype):
    for errors in run_ranks(bfloat16_case, 4, dtype):
        assert all(error < 2e-2 for error in errors.values()), errors


def repeated_run(rank, size):
    runtime = AttentionRuntime(CharmConfig(domains=2, deadline_s=60))
    q, k, v, _ = (x.detach().float() for x in inputs(2 * size * TOKENS_PER_CHUNK, 2, HEAD_DIM))
    tokens = 2 * TOKENS_PER_CHUNK
    shard = [x[rank * tokens : (rank + 1) * tokens].clone().requires_grad_() for x in (q, k, v)]
    results = []
    for _ in range(3):
        out = runtime.attention(*shard, group=dist.group.WORLD)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), shard)))
    return all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_results_are_bitwise_repeatable():
    assert run_ranks(repeated_run, 4) == [True] * 4


def over_two_communicators(rank, size):
    """Errors; whether out, dq, dk, dv are bitwise those of one communicator; bytes sent with each."""
    results, sent = [], []
    for settings in ({"communicators": "two"}, {"communicators": "one", "fuse": False}):
        runtime = AttentionRuntime(CharmConfig(domains=2, deadline_s=60, **settings))
        errors = run_case(runtime, rank, size, kv_heads=2)
        workload = Workload(BATCH, 2 * size * TOKENS_PER_CHUNK, HEADS, 2, HEAD_DIM, HEAD_DIM)
        posts = runtime.call(dist.group.WORLD, workload).posts
        (known,) = runtime._groups.values()
        before = runtime.num_bytes_sent_to_all
        known.transport.transport.connect(posts, torch.device("cpu"))
        q, k, v, _ = (x.detach().float() for x in inputs(2 * size * TOKENS_PER_CHUNK, 2, HEAD_DIM))
        tokens = 2 * TOKENS_PER_CHUNK
        shard = [x[rank * tokens : (rank + 1) * tokens].clone().requires_grad_() for x in (q, k, v)]
        out = runtime.attention(*shard, group=dist.group.WORLD)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), shard)))
        sent.append(runtime.num_bytes_sent_to_all - before)
        num_groups = len(dist.distributed_c10d._world.pg_map)
        runtime.forget(None)
        dist.barrier()
        sent.append(num_groups - len(dist.distributed_c10d._world.pg_map))
    return max(errors.values()), all(torch.equal(a, b) for a, b in zip(*results, strict=True)), sent


def test_two_communicators_give_what_one_gives_and_the_second_goes_with_the_group():
    for error, is_equal, (sent_over_two, groups_gone, sent_over_one, none_gone) in run_ranks(
        over_two_communicators, 6
    ):
        assert error < 1e-6
        assert is_equal
        assert sent_over_two == sent_over_one > 0
        assert (groups_gone, none_gone) == (1, 0)


def memory_sizes(rank, size):
    runtime = AttentionRuntime(CharmConfig(schedule="ring", deadline_s=60))
    for _ in range(3):
        run_case(runtime, rank, size, mask=NO_MASK, kv_heads=HEADS)
    (known,) = runtime._groups.values()
    return sum(memory.num_bytes for memory in known.memories.values())


def test_buffers_of_the_ring_do_not_grow_with_the_number_of_ranks():
    assert set(run_ranks(memory_sizes, 4)) == set(run_ranks(memory_sizes, 8))


def disagreeing(rank, size):
    runtime = AttentionRuntime(CharmConfig(schedule="ring" if rank else "rm_plus", deadline_s=60))
    try:
        run_case(runtime, rank, size, kv_heads=4)
    except ScheduleDisagreement as error:
        return str(error)


def test_ranks_with_different_schedules_say_so_before_the_first_transfer():
    for message in run_ranks(disagreeing, 2):
        assert "rank 0: rm_plus forward" in message
        assert "rank 1: ring forward" in message


def waiting(rank, size):
    runtime = AttentionRuntime(CharmConfig(schedule="ring", deadline_s=60))
    runtime.time_waits()
    run_case(runtime, rank, size)
    before_s = runtime.exposed_s
    if rank:
        time.sleep(0.5)
    run_case(runtime, rank, size)
    return before_s, runtime.exposed_s


def test_time_spent_waiting_for_a_late_peer_is_counted_as_exposed():
    (before_s, after_s), (late_before_s, late_after_s) = run_ranks(waiting, 2)
    assert before_s > 0
    assert after_s - before_s > 0.2
    assert late_after_s > late_before_s


def deserted(rank, size, folder):
    runtime = AttentionRuntime(CharmConfig(schedule="ring", deadline_s=1, flight_folder=folder))
    run_case(runtime, rank, size, kv_heads=4)
    if rank == 0:
        try:
            run_case(runtime, rank, size, kv_heads=4)
        except TransferTimeout as error:
            return str(error)
    time.sleep(3)
    return None


def test_a_rank_whose_peers_do_not_come_gives_up_at_its_deadline_and_says_what_it_waited_for(tmp_path):
    message, _ = run_ranks(deserted, 2, tmp_path)
    record = tmp_path / "flight_record_0.json"
    assert message.startswith("rank 0 of the context-parallel group gave up kv1 kv2 from rank 1 after 1.")
    assert "ring forward, action " in message
    assert "(wait 0." in message
    assert message.endswith(f"flight record: {record}")
    written = json.loads(record.read_text("utf-8"))
    assert (written["rank"], written["schedule"], written["peer"]) == (0, "ring", 1)
    assert written["last_actions"][-1]["action"] == written["action"]
    assert len(written["last_actions"]) > len({"post", "attend", "wait"})
    assert not (tmp_path / "flight_record_1.json").exists()


def bad_calls(rank, size):
    group = dist.group.WORLD
    ok = torch.zeros(4, 1, 2, 8)
    calls = {
        "odd": lambda rt: rt.attention(ok[:3], ok[:3], ok[:3], group=group),
        "heads": lambda rt: rt.attention(torch.zeros(4, 1, 3, 8), ok, ok, group=group),
        "dims": lambda rt: rt.attention(ok[0], ok[0], ok[0], group=group),
        "dtype": lambda rt: rt.attention(ok, ok.double(), ok, group=group),
    }
    messages = {}
    for name, call in calls.items():
        with pytest.raises(WorkloadError) as caught:
            call(AttentionRuntime(CharmConfig(deadline_s=60)))
        messages[name] = str(caught.value)
    with pytest.raises(TopologyError, match="2 context-parallel ranks do not split into 3 equal domains"):
        AttentionRuntime(CharmConfig(domains=3)).attention(ok, ok, ok, group=group)
    return messages


def test_shapes_that_do_not_fit_are_refused_with_what_would_work():
    messages = run_ranks(bad_calls, 2)[0]
    assert "must be a multiple of 4, such as 4 or 8" in messages["odd"]
    assert "3 query heads cannot share 2 KV heads evenly" in messages["heads"]
    assert "[tokens, batch, heads, width]" in messages["dims"]
    assert "must share dtype and device" in messages["dtype"]
