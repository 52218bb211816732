"""Grids and reports of schedules, against grids on file and numbers worked out by hand."""

import json
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charm_megatron.compile import rank_program
from charm_megatron.cost.buffers import (
    ALIGNMENT_BYTES,
    Buffers,
    Lifetime,
    arena,
    lifetimes,
    peak_buffers,
    place,
)
from charm_megatron.cost.model import CostModel, Link
from charm_megatron.cost.report import longest_chain, num_pairs, report
from charm_megatron.cost.timeline import evaluate
from charm_megatron.cost.wire import make_wire_format
from charm_megatron.planner import shipped_planners
from charm_megatron.schedule.actions import Piece
from charm_megatron.schedule.passes import FORWARD
from charm_megatron.schedule.schedule import PostOptions
from charm_megatron.schedule.tables import Blocks, Hops
from charm_megatron.schedule.text import parse_program
from charm_megatron.schedule.written import WrittenSchedule, written_schedule
from charm_megatron.show.draw import draw_rank, draw_timelines, one_after_another
from charm_megatron.show.grid import format_grid, num_rows, words
from charm_megatron.show.perfetto import chrome_trace
from charm_megatron.topology import even_domains, one_domain
from charm_megatron.workload import CAUSAL, NO_MASK, Mask, Workload
from tests.planned import cut, schedule, schedules

pytestmark = pytest.mark.pure

PLANNERS = shipped_planners()

KV_BYTES, DKV_BYTES = 128, 256  # 8 tokens, 1 head, 4 + 4 numbers in bfloat16 or float32
Q_BYTES, OUT_BYTES = 128, 192  # 8 tokens, 2 heads, 4 numbers; out with lse
DQ_BYTES = 256  # the same in float32
OUT_SUM_BYTES = 320  # out and lse while they are added up


def wire_of(problem):
    workload = Workload(1, problem.sharding.seq_len, 2, 1, 4, 4, "bfloat16", problem.mask)
    return make_wire_format(workload, problem, grad_return_dtype="float32")


def plain(name, domains, direction="forward", **options):
    """Whole shards of 8 tokens, 2 query heads and 1 KV head."""
    problem = cut(name, domains, heads=(2, 1), **options)
    return schedule(name, problem, direction), wire_of(problem)


# ---------------------------------------------------------------------- grids


@pytest.mark.parametrize("name", ["charm", "charm_keep_kv", "charm_together"])
def test_the_grid_of_charm_over_two_domains(golden, name):
    made = schedule(name, cut(name, even_domains(4, 2), "zigzag", CAUSAL))
    golden(f"{name}_2x2_grid.txt", format_grid(made))


@pytest.mark.parametrize(
    ("name", "file"),
    [("charm_keep_kv", "charm_keep_kv_2x4_grid.txt"), ("charm_together", "charm_together_figure_3_grid.txt")],
)
def test_the_grid_of_figure_3s_ranks_with_what_is_received(golden, name, file):
    made = schedule(name, cut(name, even_domains(8, 2)))
    golden(file, format_grid(made, ranks=range(2, 6), recvs=True))


def test_the_grid_of_a_backward_ring_under_a_window(golden):
    made = schedule("ring", cut("ring", one_domain(3), "zigzag", Mask(9, 0), per_rank=12), "backward")
    golden("ring_3_window_backward_grid.txt", format_grid(made))


def test_a_part_of_the_grid_may_reach_beyond_its_ends():
    made = schedule("ring", cut("ring", one_domain(3)))
    assert format_grid(made, range(-2, 9), range(-1, 5)) == format_grid(made)
    assert format_grid(made, [1], [2]).splitlines() == [
        "step          rank 2",
        "1     attend  q2 kv1",
        "      send    0 kv1",
    ]


def test_blocks_that_are_in_no_table_stand_at_the_last_post_before_them():
    lines = ["attend q0 kv0", "post 2.0 | send 1 kv0 | recv 7 kv1", "attend q0 kv1"]
    programs = (parse_program(lines), ())
    none = [np.zeros(0, dtype=np.int64)] * 6
    tables = Hops(*none[:5]), Blocks(*none)
    made = WrittenSchedule("mine", cut("ring", one_domain(2)), FORWARD, *tables, PostOptions(), programs)
    assert format_grid(made, range(3), recvs=True).splitlines() == [
        "step          rank 0  rank 1",
        "0     attend  q0 kv0",
        "2     attend  q0 kv1",
        "      send    1 kv0",
        "      recv    7 kv1",
    ]


def test_three_or_more_consecutive_chunks_are_one_word():
    chunks = [0, 1, 3, 4, 5, 6, 9]
    assert words([Piece("kv", chunk) for chunk in chunks]) == "kv0 kv1 kv3..kv6 kv9"
    assert words([Piece("q", chunk, 2) for chunk in range(3)]) == "q0.2..q2.2"
    assert words([Piece("q", 0), Piece("q", 1, 1), Piece("q", 2, 2)]) == "q0 q1.1 q2.2"


@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner_has_a_grid(name):
    layout, mask = ("contiguous", CAUSAL) if name == "dist_flash" else ("zigzag", NO_MASK)
    for phase in schedules(name, cut(name, even_domains(8, 2), layout, mask, per_rank=16)):
        lines = format_grid(phase).splitlines()
        assert lines[0].split()[:3] == ["step", "rank", "0"]
        assert [line.split()[0] for line in lines if line[0].isdigit()][-1] == str(num_rows(phase) - 1)


# ---------------------------------------------------------------------- work and traffic


def test_the_numbers_of_a_ring_over_two_domains():
    made, wire = plain("ring", even_domains(4, 2))
    got = report([made], wire)
    assert got.num_blocks.tolist() == [4, 4, 4, 4]
    assert got.flops.tolist() == [4 * 2.0 * 8 * 8 * 2 * (4 + 4)] * 4
    assert got.flops_share.tolist() == [0.25] * 4
    assert got.imbalance == 1
    assert got.traffic.inside_bytes.tolist() == [3 * KV_BYTES, 0, 3 * KV_BYTES, 0]
    assert got.traffic.across_bytes.tolist() == [0, 3 * KV_BYTES, 0, 3 * KV_BYTES]
    assert got.traffic.total_messages.tolist() == [3] * 4
    assert (got.num_comm_steps, got.num_compute_steps, got.longest_chain, got.exposed_steps) == (3, 4, 3, 0)
    assert not got.exposed_bytes.any()


def test_the_last_hop_home_of_a_backward_ring_is_exposed():
    made, wire = plain("ring", one_domain(4), "backward")
    got = report([made], wire)
    assert got.traffic.total_bytes.tolist() == [3 * (KV_BYTES + DKV_BYTES)] * 4
    assert (got.longest_chain, got.exposed_steps) == (4, 1)
    assert got.exposed_bytes.tolist() == [DKV_BYTES] * 4


PASS_STEPS = 3
"""The own block, and those of the two exchanges of four ranks."""


def charm_compute_steps(name, num_domains):
    """Together, one visiting Q arrives per step before the only pass begins; else each has a pass of its own."""
    return num_domains - 1 + PASS_STEPS if name == "charm_together" else num_domains * PASS_STEPS


@pytest.mark.parametrize("num_domains", [2, 3, 4])
@pytest.mark.parametrize("name", ["charm_keep_kv", "charm_per_domain", "charm_together"])
def test_of_charm_only_outputs_that_cross_are_exposed(name, num_domains):
    """One a rank where Qs visit one after the other: the earlier ones went home under later passes."""
    size = 4 * num_domains
    made, wire = plain(name, even_domains(size, num_domains))
    got = report([made], wire)
    num_late = num_domains - 1 if name == "charm_together" else 1
    assert got.num_compute_steps == charm_compute_steps(name, num_domains)
    assert (got.num_comm_steps, got.exposed_steps) == (got.num_compute_steps + 1, 1)
    assert got.exposed_bytes.tolist() == [num_late * OUT_BYTES] * size
    assert got.traffic.across_bytes.tolist() == [(num_domains - 1) * (Q_BYTES + OUT_BYTES)] * size


@pytest.mark.parametrize("name", ["charm_keep_kv", "charm_per_domain", "charm_together"])
def test_of_charms_backward_the_last_partners_kv_gradient_is_exposed_too(name):
    made, wire = plain(name, even_domains(8, 2), "backward")
    got = report([made], wire)
    assert got.num_compute_steps == charm_compute_steps(name, 2)
    assert (got.num_comm_steps, got.exposed_steps) == (got.num_compute_steps + 1, 1)
    assert got.exposed_bytes.tolist() == [DQ_BYTES + DKV_BYTES] * 8


def test_contiguous_causal_work_is_uneven_and_zigzag_is_even():
    made, wire = plain("ring", one_domain(4), mask=CAUSAL)
    pairs = np.array([36, 100, 164, 228])  # 8 * 9 / 2, and 64 more for each rank before
    got = report([made], wire)
    assert got.flops_share.tolist() == (pairs / 528).tolist()
    assert got.imbalance == pytest.approx(228 / 132)
    made, wire = plain("ring", one_domain(4), layout="zigzag", mask=CAUSAL)
    assert report([made], wire).imbalance == 1


def test_phases_add_up():
    problem = cut("ring_self_attention", one_domain(3), heads=(2, 1))
    phases = schedules("ring_self_attention", problem)
    got = report(phases, wire_of(problem))
    assert (got.num_comm_steps, got.num_compute_steps, got.longest_chain) == (4, 6, 4)
    assert got.traffic.total_bytes.tolist() == [2 * KV_BYTES] * 3  # K goes round, then V: half a KV each


@pytest.mark.parametrize("mask", [CAUSAL, NO_MASK, Mask(5, 2), Mask(None, 0, (10, 22))])
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_pairs_of_many_blocks_are_those_of_each(layout, mask):
    problem = cut("ring", one_domain(4), layout, mask)
    q, kv = np.nonzero(problem.unmasked)
    one_by_one = [
        problem.band(a, b).num_pairs(*problem.block_shape(a, b))
        for a, b in zip(q.tolist(), kv.tolist(), strict=True)
    ]
    assert num_pairs(problem, q, kv).tolist() == one_by_one


# ---------------------------------------------------------------------- chains


@pytest.mark.parametrize(
    ("name", "domains", "forward", "backward"),
    [
        ("ring", one_domain(1), 0, 0),
        ("ring", one_domain(8), 7, 8),  # the gradients of KV make one hop more, home
        ("merge", one_domain(8), 1, 2),
        ("rm_plus", one_domain(8), 2, 2),  # Q there, out back
        # Q across, Q to its partner, and outputs the same way back, however many domains there are
        ("charm", even_domains(8, 2), 4, 4),
        ("charm", even_domains(16, 4), 4, 4),
        ("charm_per_domain", even_domains(16, 4), 4, 4),
        ("charm_together", even_domains(8, 2), 4, 4),
        ("charm_keep_kv", even_domains(16, 4), 4, 4),
        ("charm_keep_kv", even_domains(4, 2), 2, 2),  # two ranks swap KV only: Q across and its output back
        ("all_gather", one_domain(5), 1, 2),
    ],
)
def test_longest_chains_of_transfers(name, domains, forward, backward):
    problem = cut(name, domains)
    got = [longest_chain(schedule(name, problem, direction)) for direction in ("forward", "backward")]
    assert got == [forward, backward]


def test_a_chain_goes_through_what_a_result_was_computed_from():
    """Q of rank 0 meets at rank 2 a KV that came in two hops: its output is the third of the chain."""
    problem = cut("ring", one_domain(3))
    programs = [
        parse_program(
            ["post 0.0 | send 1 kv0 | send 2 q0", "wait 0.0", "post 2.0 | recv 2 o0<2", "wait 2.0"]
        ),
        parse_program(["post 0.0 | recv 0 kv0", "wait 0.0", "post 1.0 | send 2 kv0", "wait 1.0"]),
        parse_program(
            [
                "post 0.0 | recv 0 q0",
                "post 1.0 | recv 1 kv0",
                "wait 0.0",
                "wait 1.0",
                "attend q0 kv0",
                "post 2.0 | send 0 o0",
                "wait 2.0",
            ]
        ),
    ]
    assert longest_chain(written_schedule("mine", problem, FORWARD, programs)) == 3


# ---------------------------------------------------------------------- buffers


def test_a_ring_needs_two_kv_at_any_size():
    """One is sent while the next arrives: the own one, packed to be sent, or one that is read and sent on."""
    for size in (3, 4, 9):
        made, wire = plain("ring", one_domain(size))
        got = peak_buffers(made, wire, 1)
        assert (got.peak_buffers, got.peak_bytes) == (2, 2 * KV_BYTES)


def test_buffers_of_pass_q_over_two_ranks():
    """The visiting Q; its output, which leaves as it was written; and the own output that comes back."""
    made, wire = plain("pass_q", one_domain(2))
    got = peak_buffers(made, wire, 0)
    assert got.peak_bytes == 2 * OUT_BYTES  # Q has been given back
    assert got.peak_buffers == 2


def test_one_rank_alone_needs_no_buffers():
    made, wire = plain("ring", one_domain(1))
    assert peak_buffers(made, wire, 0) == Buffers()


def test_one_place_serves_buffers_one_after_the_other():
    unit = ALIGNMENT_BYTES
    spans = [Lifetime(2 * unit, 0, 3), Lifetime(unit, 3, 4), Lifetime(unit - 1, 3, 5), Lifetime(unit, 4, 6)]
    assert sorted(place(spans)) == [0, 0, 0, unit]


@given(
    st.lists(
        st.builds(
            lambda size, first, length: Lifetime(size, first, first + length), *[st.integers(0, 20)] * 3
        ),
        max_size=12,
    )
)
def test_places_never_overlap_in_time_and_memory(spans):
    for (a, begin), (b, start) in combinations(zip(spans, place(spans), strict=True), 2):
        if a.last > b.first and b.last > a.first:
            assert begin + a.num_bytes <= start or start + b.num_bytes <= begin


def test_phases_share_their_memory():
    assert Buffers(30, 3, 25) | Buffers(20, 4, 20) == Buffers(30, 4, 25)


@pytest.mark.parametrize("name", PLANNERS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_buffers_in_use_at_one_time_never_overlap_and_need_little_more_than_their_bytes(name, direction):
    layout, mask = ("contiguous", CAUSAL) if name == "dist_flash" else ("zigzag", CAUSAL)
    problem = cut(name, even_domains(8, 2), layout, mask, per_rank=16, heads=(16, 16))
    wire = make_wire_format(Workload(1, 128, 16, 16, 4, 4, "bfloat16", mask), problem)
    for phase in schedules(name, problem, direction):
        storage = rank_program(phase, 3, wire).storage
        placed = arena(storage, wire)
        spans = lifetimes(storage, wire)
        for (a, begin), (b, start) in combinations(zip(spans, placed.offsets, strict=True), 2):
            if a is None or b is None or a.last <= b.first or b.last <= a.first:
                continue
            assert begin + a.num_bytes <= start or start + b.num_bytes <= begin
        got = peak_buffers(phase, wire, 3)
        assert 0 < got.peak_bytes <= got.pool_bytes < 1.3 * got.peak_bytes + 8 * ALIGNMENT_BYTES


# ---------------------------------------------------------------------- pictures and traces


@pytest.fixture
def timed():
    """charm over 2 x 2 ranks: its schedule, and its timeline."""
    made, wire = plain("charm", even_domains(4, 2), layout="zigzag", mask=CAUSAL)
    return made, evaluate(made, wire, CostModel(1e9, Link(1e9, 1e-8), Link(1e8)))


def test_a_trace_has_every_span_on_a_thread_of_its_rank(timed):
    made, timeline = timed
    events = json.loads(json.dumps(chrome_trace(timeline)))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(timeline.spans)
    for rank in range(4):
        busy_us = sum(event["dur"] for event in slices if event["pid"] == rank and event["tid"] == 0)
        assert busy_us == pytest.approx(timeline.busy_s[rank] * 1e6)
    crossing = [event for event in slices if event["tid"] == 2]
    assert all(event["args"]["from"] // 2 != event["args"]["to"] // 2 for event in crossing)
    named = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"}
    assert named == {(rank, f"rank {rank}") for rank in range(4)}
    assert made.cp_size == 4


def test_arrows_lead_from_transfers_to_blocks_that_begin_after_them(timed):
    _, timeline = timed
    events = chrome_trace(timeline)["traceEvents"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts
    assert starts.keys() == ends.keys()
    blocks = {(event["pid"], event["ts"]) for event in events if event["ph"] == "X" and event["tid"] == 0}
    sends = {(event["pid"], event["tid"], event["ts"]): event for event in events if event["ph"] == "X"}
    for number, end in ends.items():
        start = starts[number]
        send = sends[start["pid"], start["tid"], start["ts"]]
        assert (end["pid"], end["ts"]) in blocks
        assert end["ts"] >= send["ts"] + send["dur"] - 1e-9


def test_phases_one_after_another_begin_where_the_last_one_ended(timed):
    _, timeline = timed
    both = one_after_another([timeline, timeline])
    assert both.makespan_s == 2 * timeline.makespan_s
    assert both.busy_s == tuple(2 * busy_s for busy_s in timeline.busy_s)
    assert both.spans[len(timeline.spans)].start_s == timeline.spans[0].start_s + timeline.makespan_s


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_equal_pictures_are_equal_files(tmp_path, timed, suffix):
    made, timeline = timed
    paths = [tmp_path / f"{name}{suffix}" for name in ("a", "b")]
    for path in paths:
        draw_timelines([("charm", timeline)], made.problem.domains, path, phases=[[made]])
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_rank_alone_is_drawn_with_overlapping_transfers_apart(tmp_path, timed):
    made, _ = timed
    wire = wire_of(made.problem)
    own_links = evaluate(made, wire, CostModel(1e9, Link(1e9), Link(1e8), is_shared=False))
    draw_rank([("charm", own_links)], 0, tmp_path / "rank.svg", phases=[[made]])
    assert "<svg" in (tmp_path / "rank.svg").read_text(encoding="utf-8")
