"""Planners and lowering: every schedule passes the checker, and is the schedule that the paper describes."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charm_megatron.cost.wire import make_wire_format, traffic
from charm_megatron.errors import PlanError, WorkloadError
from charm_megatron.lowering.schedules import make_schedules
from charm_megatron.planner import plan
from charm_megatron.planner.matchings import exchanges
from charm_megatron.schedule.actions import Attend, Post
from charm_megatron.schedule.passes import BACKWARD, FORWARD
from charm_megatron.schedule.payload import KV
from charm_megatron.schedule.problem import Problem
from charm_megatron.schedule.schedule import PostOptions
from charm_megatron.schedule.text import format_schedule
from charm_megatron.sharding import make_sharding
from charm_megatron.topology import Domains, even_domains
from charm_megatron.verify.programs import check_schedule
from charm_megatron.workload import CAUSAL, NO_MASK, Mask, Workload

pytestmark = pytest.mark.pure


def problem(num_domains, per_domain, *, layout="zigzag", mask=CAUSAL, seq_len=None):
    size = num_domains * per_domain
    sharding = make_sharding(layout, size, seq_len or 8 * size, mask.documents)
    return Problem(sharding, even_domains(size, num_domains), mask)


def schedule(name, made, pass_=FORWARD, **options):
    (made_schedule,) = make_schedules(plan(name, made), pass_.direction, PostOptions(**options))
    return made_schedule


NAMES = ("ring", "rm_plus", "charm", "charm_keep_kv", "charm_together")
"""The rest are in test_planners."""

CHARMS = ("charm", "charm_keep_kv", "charm_per_domain", "charm_together")

GRIDS = [(1, n) for n in range(1, 10)] + [
    (2, 1),
    (2, 2),
    (2, 3),
    (2, 4),
    (3, 2),
    (3, 3),
    (4, 4),
    (8, 1),
    (2, 8),
]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", NAMES)
def test_every_planner_passes_the_checker(name, grid):
    for (layout, mask), pass_, depth, fuse in product(
        (("zigzag", CAUSAL), ("zigzag", NO_MASK), ("contiguous", CAUSAL), ("contiguous", NO_MASK)),
        (FORWARD, BACKWARD),
        (1, 2),
        (True, False),
    ):
        made = problem(*grid, layout=layout, mask=mask)
        check_schedule(schedule(name, made, pass_, prefetch_depth=depth, fuse=fuse))


@given(
    name=st.sampled_from(sorted(NAMES)),
    order=st.permutations(range(6)),
    num_domains=st.sampled_from([1, 2, 3, 6]),
    mask=st.sampled_from(
        [CAUSAL, NO_MASK, Mask(9, 0), Mask(5, 3), Mask(None, 0, (7, 40, 1)), Mask(4, 4, (20, 28))]
    ),
    layout=st.sampled_from(["contiguous", "zigzag", "striped"]),
    depth=st.integers(1, 4),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
)
@settings(max_examples=60, deadline=None)
def test_domains_of_scattered_ranks_and_head_groups_pass_too(
    name, order, num_domains, mask, layout, depth, heads
):
    domains = Domains(tuple(rank % num_domains for rank in order))
    made = Problem(make_sharding(layout, 6, 48, mask.documents), domains, mask, *heads)
    for pass_ in (FORWARD, BACKWARD):
        check_schedule(schedule(name, made, pass_, prefetch_depth=depth))


@pytest.mark.parametrize("size", range(1, 34))
def test_exchanges_meet_every_pair_once_in_perfect_matchings(size):
    met = set()
    for kv_partners, q_partners in exchanges(size):
        for partners in (kv_partners, q_partners or (None,) * size):
            for x, y in enumerate(partners):
                if y is not None:
                    assert partners[y] == x
                    assert (x, y) not in met
                    met.add((x, y))
            assert sum(y is None for y in partners) in (0, size % 2, size)
    assert len(met) == size * (size - 1)


def test_partners_of_a_power_of_two_are_those_of_the_papers_example():
    """Appendix A: GPU 0 exchanges KV with 2 and Q with 3, GPU 1 KV with 3 and Q with 2, GPU 3 KV with 1, Q with 0."""
    (level_1, nothing), (kv_partners, q_partners) = exchanges(4)
    assert level_1 == (1, 0, 3, 2)
    assert nothing is None
    assert kv_partners == (2, 3, 0, 1)
    assert q_partners == (3, 2, 1, 0)


@pytest.mark.parametrize("grid", [(1, 4), (1, 6), (1, 8), (2, 4), (4, 4), (3, 6)])
@pytest.mark.parametrize("name", CHARMS)
def test_inside_a_domain_each_step_has_at_most_one_kv_and_one_q_partner(name, grid):
    made = problem(*grid, layout="contiguous", mask=NO_MASK)
    hops = schedule(name, made).hops
    domain = np.asarray(made.domains.domain_of)
    inside = domain[hops.src] == domain[hops.dst]
    for side in ("q", "kv"):
        payload = FORWARD.payloads.index(FORWARD.down(side))
        rows = inside & (hops.payload == payload)
        pairs = set(zip(hops.comm_step[rows], hops.src[rows], hops.dst[rows], strict=True))
        for end in (1, 2):
            assert len({(pair[0], pair[end]) for pair in pairs}) == len(pairs)


def test_figure_3_of_the_paper_is_the_program_of_rank_3(golden):
    """8 ranks, 2 domains: own block while Q7 arrives; K1 V1 with Q0 Q4; K2 V2; outputs home."""
    made = problem(2, 4, layout="contiguous", mask=NO_MASK)
    program = schedule("charm_together", made).program(3)
    golden("charm_together_figure_3_rank_3.txt", "\n".join(map(str, program)) + "\n")


def test_the_program_of_rank_3_with_one_visiting_q_at_a_time(golden):
    """8 ranks, 2 domains: Q0, K1 V1, K2 V2 for the own Q while Q7 arrives; Q4 for Q7 against KV that is kept."""
    made = problem(2, 4, layout="contiguous", mask=NO_MASK)
    program = schedule("charm_keep_kv", made).program(3)
    golden("charm_keep_kv_2x4_rank_3.txt", "\n".join(map(str, program)) + "\n")


def test_the_program_of_rank_3_with_a_visit_between_its_own_exchanges(golden):
    """8 ranks, 2 domains: K2 V2; then Q7 visits, with K2 V2, K1 V1 and rank 0; then K1 V1 and the own Q to rank 0."""
    made = problem(2, 4, mask=NO_MASK)
    golden("charm_2x4_rank_3.txt", "\n".join(map(str, schedule("charm", made).program(3))) + "\n")


@pytest.mark.parametrize("pass_", [FORWARD, BACKWARD])
def test_whole_schedules_stay_as_they_are(golden, pass_):
    for name in NAMES:
        _, programs = format_schedule(schedule(name, problem(2, 2), pass_)).split(
            "\n", 1
        )  # the header has a digest
        golden(f"{name}_2x2_{pass_.name}.txt", programs)


UNIT = Workload(
    batch=1,
    seq_len=64 * 64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    head_dim_v=16,
    dtype="bfloat16",
    mask=NO_MASK,
)
"""No mask, so that nothing is cut and the formulas hold exactly."""


def sent_bytes(name, grid, pass_, *, group=1):
    made = problem(*grid, layout="contiguous", mask=NO_MASK, seq_len=UNIT.seq_len)
    workload = Workload(**{**UNIT.__dict__, "num_kv_heads": UNIT.num_heads // group})
    wire = make_wire_format(workload, made, grad_return_dtype="float32")
    rows = UNIT.seq_len // made.cp_size * UNIT.num_heads
    return traffic(schedule(name, made, pass_), wire=wire), rows


def exchange_bytes(rows, group, pass_):
    """(one KV exchange, one Q exchange): algorithm's table with returned out in bf16, gradients and lse in fp32."""
    q_unit, scalar = rows * 16 * 2, rows * 4
    if pass_ is FORWARD:
        return 2 * q_unit // group, q_unit + q_unit + scalar
    return (2 + 2 * 2) * q_unit // group, 2 * q_unit + 2 * scalar + 2 * q_unit


@pytest.mark.parametrize("pass_", [FORWARD, BACKWARD])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_bytes_of_ring_and_rm_plus_equal_the_formulas(size, group, pass_):
    sent, rows = sent_bytes("ring", (1, size), pass_, group=group)
    kv, q = exchange_bytes(rows, group, pass_)
    assert set(sent.total_bytes) == {(size - 1) * kv}
    sent, _ = sent_bytes("rm_plus", (1, size), pass_, group=group)
    assert set(sent.total_bytes) == {size // 2 * kv + (size // 2 - 1) * q}


@pytest.mark.parametrize("pass_", [FORWARD, BACKWARD])
@pytest.mark.parametrize("grid", [(2, 2), (2, 4), (4, 4), (4, 2), (2, 8)])
@pytest.mark.parametrize("name", ["charm_keep_kv", "charm_together"])
def test_bytes_of_charm_equal_the_formulas_inside_and_across(name, grid, pass_):
    """KV is sent once, whether the visiting Qs meet it all at once or one after the other."""
    num_domains, size = grid
    sent, rows = sent_bytes(name, grid, pass_)
    kv, q = exchange_bytes(rows, 1, pass_)
    assert set(sent.across_bytes) == {(num_domains - 1) * q}
    assert set(sent.inside_bytes) == {size // 2 * kv + num_domains * (size // 2 - 1) * q}


@pytest.mark.parametrize("pass_", [FORWARD, BACKWARD])
@pytest.mark.parametrize("grid", [(2, 2), (2, 4), (4, 4), (4, 2), (2, 8)])
def test_charm_sends_kv_again_for_each_visiting_q(grid, pass_):
    num_domains, size = grid
    sent, rows = sent_bytes("charm", grid, pass_)
    kv, q = exchange_bytes(rows, 1, pass_)
    assert set(sent.across_bytes) == {(num_domains - 1) * q}
    assert set(sent.inside_bytes) == {num_domains * (size // 2 * kv + (size // 2 - 1) * q)}


@pytest.mark.parametrize("pass_", [FORWARD, BACKWARD])
def test_under_a_causal_mask_charm_exchanges_half_of_one_side_during_a_visit(pass_):
    """Half of Q where KV comes later, half of KV where it comes earlier."""
    made = problem(2, 8)
    hops = schedule("charm", made, pass_).hops
    domain = np.asarray(made.domains.domain_of)
    is_down = np.isin(hops.payload, [pass_.payloads.index(pass_.down(side)) for side in ("q", "kv")])
    is_q = hops.payload == pass_.payloads.index(pass_.down("q"))
    inside = is_down & (domain[hops.src] == domain[hops.dst])
    for side, is_side in (("q", is_q), ("kv", ~is_q)):
        numbers = made.numbering(side)
        rows = inside & is_side
        home = made.home[numbers.chunk(hops.piece[rows] % numbers.num_first)]
        at = domain[hops.dst[rows]]
        first = hops.piece[rows] < numbers.num_first
        visiting = domain[home] != at if side == "q" else ~first
        assert set(at[visiting].tolist()) == {1 if side == "q" else 0}
        per_rank = np.bincount(hops.src[rows][visiting], minlength=16)
        assert set(per_rank[np.isin(domain, at[visiting])].tolist()) == {7}, "one half to each other rank"


def test_a_causal_ring_with_contiguous_chunks_sends_less_than_its_formula():
    full = schedule("ring", problem(1, 4, layout="contiguous", mask=NO_MASK))
    cut = schedule("ring", problem(1, 4, layout="contiguous"))
    assert len(cut.hops.comm_step) < len(full.hops.comm_step)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_the_backward_ring_is_as_long_as_the_forward_one_and_holds_as_little(size):
    made = problem(1, size)
    backward = schedule("ring", made, BACKWARD)
    assert backward.num_comm_steps == size + 1
    # the kv being read and the one arriving; the dkv being added to, the one leaving, the one arriving
    assert check_schedule(backward).peak_pieces <= 5 * 2


@pytest.mark.parametrize("name", NAMES)
def test_transfers_of_a_step_start_before_the_blocks_that_hide_them(name):
    made = schedule(name, problem(2, 4))
    for rank in range(made.cp_size):
        program = made.program(rank)
        first_attend = next(i for i, action in enumerate(program) if isinstance(action, Attend))
        assert isinstance(program[0], Post)
        assert not any(type(action).__name__ == "Wait" for action in program[:first_attend])


def test_a_shard_meets_itself_in_one_causal_rectangle():
    attends = [a for a in schedule("ring", problem(1, 4)).program(1) if isinstance(a, Attend)]
    assert str(attends[0]) == "attend q1 q6 kv1 kv6 causal"
    assert len(attends) == 4


@pytest.mark.parametrize("name", CHARMS)
def test_with_one_rank_a_domain_charm_is_rm_plus_across(name):
    lone, flat = schedule(name, problem(8, 1)), schedule("rm_plus", problem(8, 1))
    assert [lone.program(r) for r in range(8)] == [flat.program(r) for r in range(8)]


@pytest.mark.parametrize("name", CHARMS)
def test_charm_refuses_domains_of_different_sizes_and_says_what_works(name):
    made = Problem(make_sharding("zigzag", 3, 6), Domains((0, 0, 1)))
    with pytest.raises(PlanError, match="equal size, but they have 2, 1 ranks; rm_plus takes any ranks"):
        plan(name, made)


def test_an_unknown_schedule_names_the_nearest():
    with pytest.raises(PlanError, match="unknown schedule 'charmed'; did you mean 'charm'"):
        plan("charmed", problem(1, 2))


def test_the_digest_tells_schedules_apart_and_nothing_else():
    made = problem(2, 2)
    digests = {
        schedule(name, made, pass_, prefetch_depth=depth, fuse=fuse).digest
        for name, pass_, depth, fuse in product(NAMES, (FORWARD, BACKWARD), (1, 2), (True, False))
    }
    assert len(digests) == len(NAMES) * 8
    assert schedule("charm", made).digest == schedule("charm", problem(2, 2)).digest


def test_heads_that_do_not_split_into_groups_are_refused():
    made = Problem(make_sharding("zigzag", 2, UNIT.seq_len), even_domains(2, 1), NO_MASK, 3, 3)
    with pytest.raises(WorkloadError, match="4 query heads do not split into 3"):
        make_wire_format(UNIT, made)


def test_gradients_are_wide_inside_domains_and_narrow_across_unless_told_otherwise():
    made = problem(2, 2, layout="contiguous", mask=NO_MASK, seq_len=UNIT.seq_len)
    backward = schedule("charm", made, BACKWARD)
    sent = {
        dtype: traffic(backward, wire=make_wire_format(UNIT, made, **dtype_of(dtype)))
        for dtype in ("default", "float32", "model")
    }
    assert sent["default"].inside_bytes.tolist() == sent["float32"].inside_bytes.tolist()
    assert sent["default"].across_bytes.tolist() == sent["model"].across_bytes.tolist()
    assert (sent["float32"].across_bytes > sent["model"].across_bytes).all()
    assert (sent["float32"].inside_bytes > sent["model"].inside_bytes).all()


def dtype_of(name):
    return {} if name == "default" else {"grad_return_dtype": name}


def test_kv_pieces_are_two_tensors_wide():
    wire = make_wire_format(UNIT, problem(1, 2, layout="contiguous", mask=NO_MASK, seq_len=UNIT.seq_len))
    assert wire.piece_bytes(KV, 0, crosses=True) == 2048 * 4 * (16 + 16) * 2
