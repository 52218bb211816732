"""The critical path of schedules, on cases that can be worked out by hand."""

import re
from collections import defaultdict
from itertools import pairwise

import pytest

from charm_megatron.cost.model import CostModel, Link
from charm_megatron.cost.timeline import evaluate
from charm_megatron.cost.wire import make_wire_format
from charm_megatron.errors import WorkloadError
from charm_megatron.lowering.schedules import make_schedules
from charm_megatron.planner import plan
from charm_megatron.schedule.passes import BACKWARD, FORWARD
from charm_megatron.schedule.payload import KV, OUT, Q
from charm_megatron.schedule.problem import Problem
from charm_megatron.sharding import make_sharding
from charm_megatron.show.draw import COLOURS, COMPUTES, draw_timelines
from charm_megatron.topology import even_domains
from charm_megatron.workload import CAUSAL, NO_MASK, Workload

pytestmark = pytest.mark.pure

# The kind of span behind each colour of a picture; what waits has none.
KIND_OF = {
    colour.lower(): "attend" if kind in COMPUTES else kind.removesuffix(" result")
    for kind, colour in COLOURS.items()
    if kind != "idle"
}
NO_TIME = Link(1e30)
FREE = 1e30
NAMES = (
    "ring",
    "rm_plus",
    "charm",
    "charm_keep_kv",
    "charm_per_domain",
    "charm_together",
    "double_ring",
    "pass_q",
)


def setup(name, num_domains, size, pass_=FORWARD, *, layout="contiguous", mask=NO_MASK):
    problem = Problem(make_sharding(layout, size, 64 * size), even_domains(size, num_domains), mask)
    wire = make_wire_format(Workload(1, 64 * size, 2, 2, 8, 8, "bfloat16", mask), problem)
    (schedule,) = make_schedules(plan(name, problem), pass_.direction)
    return schedule, wire


def makespan(name, num_domains, size, cost, pass_=FORWARD, **options):
    return evaluate(*setup(name, num_domains, size, pass_, **options), cost).makespan_s


@pytest.mark.parametrize("pass_", [FORWARD, BACKWARD])
@pytest.mark.parametrize("name", NAMES)
def test_with_links_that_take_no_time_only_computation_remains(name, pass_):
    schedule, wire = setup(name, 2, 4, pass_, layout="zigzag", mask=CAUSAL)
    timeline = evaluate(schedule, wire, CostModel(1e9, NO_TIME, NO_TIME))
    pairs = wire.workload.seq_len * (wire.workload.seq_len + 1) / 2 / 4
    expected_s = wire.workload.block_flops(pairs, 2, pass_.products) / 1e9
    assert timeline.busy_s == pytest.approx([expected_s] * 4)
    assert timeline.makespan_s == pytest.approx(expected_s)
    assert timeline.exposed_s == pytest.approx(0)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_ring_without_computation_takes_its_hops_one_after_the_other(size):
    _, wire = setup("ring", 1, size)
    link = Link(1e9, latency_s=1e-6)
    hop_s = 1e-6 + wire.piece_bytes(KV, 0, crosses=False) / 1e9
    assert makespan("ring", 1, size, CostModel(FREE, link, link)) == pytest.approx((size - 1) * hop_s)


def test_exchanges_of_rm_plus_wait_for_nobody_unless_their_links_are_shared():
    """4 ranks: KV and Q as one group and KV at once, then out; or all on one link."""
    _, wire = setup("rm_plus", 1, 4)
    kv_s, q_s, out_s = (wire.piece_bytes(payload, 0, crosses=False) / 1e9 for payload in (KV, Q, OUT))
    alone = makespan("rm_plus", 1, 4, CostModel(FREE, Link(1e9), Link(1e9), is_shared=False))
    assert alone == pytest.approx(kv_s + out_s)
    shared = makespan("rm_plus", 1, 4, CostModel(FREE, Link(1e9), Link(1e9)))
    assert shared == pytest.approx(2 * kv_s + q_s + out_s)


@pytest.mark.parametrize("name", ["charm", "charm_together"])
def test_a_slow_crossing_slows_every_hop_of_the_ring_but_only_the_crossings_of_charm(name):
    cost = CostModel(FREE, NO_TIME, Link(1e9))
    _, wire = setup("ring", 2, 8)
    assert makespan("ring", 2, 8, cost) == pytest.approx(7 * wire.piece_bytes(KV, 0, crosses=False) / 1e9)
    crossing_s = sum(wire.piece_bytes(payload, 0, crosses=True) for payload in (Q, OUT)) / 1e9
    assert makespan(name, 2, 8, cost) == pytest.approx(crossing_s)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_excludes_itself_overlaps(name):
    schedule, wire = setup(name, 2, 8, BACKWARD, layout="zigzag", mask=CAUSAL)
    timeline = evaluate(schedule, wire, CostModel(1e8, Link(1e9, 1e-6), Link(1e8, 1e-5)))
    lanes = defaultdict(list)
    for span in timeline.spans:
        lanes[span.kind, span.rank].append(span)
        if span.kind != "attend":
            lanes[span.kind, "into", span.peer].append(span)
    for spans in lanes.values():
        ordered = sorted(spans, key=lambda span: span.start_s)
        assert all(a.end_s <= b.start_s * (1 + 1e-12) for a, b in pairwise(ordered))


def test_a_link_without_a_rate_is_refused():
    with pytest.raises(WorkloadError, match="positive rate"):
        Link(0.0)


def test_a_picture_has_a_bar_as_long_as_each_block_and_each_transfer_takes(tmp_path):
    """Widths of an SVG's rectangles by colour, against seconds by kind: all on one scale."""
    schedule, wire = setup("charm", 2, 4)
    timeline = evaluate(schedule, wire, CostModel(1e8, Link(1e9), Link(1e8)))
    path = tmp_path / "charm.svg"
    draw_timelines([("charm", timeline)], schedule.problem.domains, path, title="charm", phases=[[schedule]])
    axes = path.read_text("utf-8").partition('id="legend_1"')[0]  # whose samples have colours too
    widths = defaultdict(list)
    bar = r'd="M (\S+) \S+ \nL (\S+) [^"]*" clip-path="\S+" style="fill: (#\w+); stroke: #ffffff'
    for left, right, colour in re.findall(bar, axes):
        if colour in KIND_OF:
            widths[KIND_OF[colour]].append(float(right) - float(left))
    seconds = defaultdict(list)
    for span in timeline.spans:
        seconds[span.kind].append(span.end_s - span.start_s)
    assert widths.keys() == seconds.keys() == {"attend", "inside", "across"}
    scale = sum(widths["attend"]) / sum(seconds["attend"])
    for kind, durations_s in seconds.items():
        assert sorted(widths[kind]) == pytest.approx([scale * x for x in sorted(durations_s)], rel=1e-3), kind
