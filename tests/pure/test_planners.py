"""Every planner passes the checker wherever it claims to work, and refuses the rest in one sentence."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charm_megatron.errors import PlanError
from charm_megatron.planner import Shape, cut_problem, plan, shipped_planners
from charm_megatron.schedule.problem import Problem
from charm_megatron.sharding import LAYOUTS, make_sharding, refine
from charm_megatron.topology import Domains, even_domains, one_domain
from charm_megatron.verify.programs import check_schedule
from charm_megatron.verify.tables import check_tables
from charm_megatron.workload import CAUSAL, NO_MASK, Mask
from tests.planned import DIRECTIONS, TOKENS_PER_RANK, assert_is_one_sentence, cut, schedules

pytestmark = pytest.mark.pure

PLANNERS = shipped_planners()


def masks(size, layout):
    """Masks of every kind that fit the layout."""
    seq_len = TOKENS_PER_RANK * size
    documents = (2 * size, 4 * size, 2 * size) if layout == "document_zigzag" else (3, seq_len - 3)
    plain = (CAUSAL, NO_MASK, Mask(5, 0), Mask(3, 2))
    return (*plain, Mask(None, 0, documents), Mask(None, None, documents), Mask(4, 1, documents))


def refusal(name, domains, layout, mask):
    """What a planner is expected not to do, and the words that it must say."""
    if name == "tasp" and domains.cp_size in (4, 6):
        return "edge-disjoint Hamiltonian rings"
    if name == "dist_flash" and (layout != "contiguous" or mask.right != 0):
        return "layout contiguous with mask causal or window:LEFT,0 would work"
    return None


def check(name, domains, layout, mask, heads=None, **options):
    """Checks both directions, or that the refusal is one sentence."""
    expected = refusal(name, domains, layout, mask)
    if expected:
        with pytest.raises(PlanError, match=expected) as raised:
            plan(name, cut(name, domains, layout, mask, heads=heads))
        assert_is_one_sentence(raised.value)
        return
    problem = cut(name, domains, layout, mask, heads=heads)
    for direction in DIRECTIONS:
        for made in schedules(name, problem, direction, **options):
            check_schedule(made)


@pytest.mark.parametrize("size", range(1, 34))
@pytest.mark.parametrize("name", PLANNERS)
def test_tables_of_every_planner_pass_with_every_layout_and_mask(name, size, request):
    """For every size up to 16, and samples above. --exhaustive: up to 33, and all programs are run as well."""
    is_exhaustive = request.config.getoption("--exhaustive")
    domains = one_domain(size) if size % 2 else even_domains(size, 2)
    combinations = [(layout, mask) for layout in LAYOUTS for mask in masks(size, layout)]
    if size > 16 and not is_exhaustive:
        combinations = combinations[size % 9 :: 9]
    for layout, mask in combinations:
        if refusal(name, domains, layout, mask):
            continue
        problem = cut(name, domains, layout, mask, heads=(size, size))
        for direction in DIRECTIONS:
            for made in schedules(name, problem, direction):
                check_tables(made)
                if is_exhaustive:
                    check_schedule(made)


GRIDS = [(1, size) for size in range(1, 17)] + [(2, 8), (4, 8), (3, 5), (3, 2), (8, 1), (1, 21), (1, 33)]
ALL_COMBINATIONS = 4
"""Groups of up to so many ranks see every layout with every mask; larger ones a few, different from grid to grid."""


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid[0]}x{grid[1]}")
@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner_passes_the_checker_with_every_layout_and_mask(name, grid):
    num_domains, size = grid[0], grid[0] * grid[1]
    combinations = [(layout, mask) for layout in LAYOUTS for mask in masks(size, layout)]
    first = GRIDS.index(grid) + list(PLANNERS).index(name)
    if size > 16:
        combinations = [(layout, mask) for layout, mask in combinations if not mask.documents]
    if size > ALL_COMBINATIONS:
        picked = range(first, first + (3 if size <= 8 else 2 if size <= 16 else 1))
        combinations = [combinations[5 * i % len(combinations)] for i in picked]
    for number, (layout, mask) in enumerate(combinations, first):
        heads = (2 * size, (1, 2, size, 2 * size)[number % 4]) if size <= 16 else (size, size)
        check(name, even_domains(size, num_domains), layout, mask, heads)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid[0]}x{grid[1]}")
def test_dist_flash_passes_the_checker_with_every_mask_that_it_takes(grid):
    num_domains, size = grid[0], grid[0] * grid[1]
    for mask in masks(size, "contiguous"):
        check("dist_flash", even_domains(size, num_domains), "contiguous", mask)


@given(
    name=st.sampled_from(sorted(PLANNERS)),
    num_domains=st.integers(1, 4),
    per_domain=st.integers(1, 4),
    order=st.randoms(use_true_random=False),
    layout=st.sampled_from(["contiguous", "zigzag", "striped"]),
    left=st.none() | st.integers(0, 40),
    right=st.none() | st.integers(0, 40),
    cuts=st.sets(st.integers(1, 100), max_size=3),
    groups=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    depth=st.integers(1, 3),
    fuse=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_scattered_domains_any_mask_and_any_depth_pass_too(
    name, num_domains, per_domain, order, layout, left, right, cuts, groups, depth, fuse
):
    size = num_domains * per_domain
    domain_of = [domain for domain in range(num_domains) for _ in range(per_domain)]
    order.shuffle(domain_of)
    seq_len = TOKENS_PER_RANK * size
    bounds = [0, *sorted(at for at in cuts if at < seq_len), seq_len]
    documents = tuple(np.diff(bounds).tolist()) if len(bounds) > 2 else ()
    heads = (size * groups[0] * groups[1], size * groups[0])
    mask = Mask(left, right, documents)
    check(name, Domains(tuple(domain_of)), layout, mask, heads, prefetch_depth=depth, fuse=fuse)


UNEQUAL = Domains((0, 1, 1, 0, 1))


@pytest.mark.parametrize("name", PLANNERS)
def test_unequal_domains_are_planned_or_refused_in_one_sentence_that_says_what_would_work(name):
    needs_equal = {"charm", "charm_keep_kv", "charm_per_domain", "charm_together", "double_ring"}
    needs_equal |= {"hierarchical", "hierarchical_ring_inside"}
    if name in needs_equal:
        problem = Problem(make_sharding("contiguous", 5, 40), UNEQUAL)
        with pytest.raises(
            PlanError, match=r"equal size, but they have 2, 3 ranks; .* takes any ranks"
        ) as raised:
            plan(name, problem)
        assert_is_one_sentence(raised.value)
    else:
        check(name, UNEQUAL, "contiguous", CAUSAL)


def test_an_unknown_name_is_refused_with_the_nearest_known_one():
    problem = Problem(make_sharding("contiguous", 2, 8), one_domain(2))
    with pytest.raises(PlanError, match="unknown schedule 'mesh_'; did you mean 'mesh'"):
        plan("mesh_", problem)
    with pytest.raises(PlanError, match="unknown schedule 'mesh_'; did you mean 'mesh'"):
        cut_problem("mesh_", problem.sharding, one_domain(2), num_heads=2, num_kv_heads=2)


def test_every_planner_has_a_reference_and_a_one_line_summary():
    for name, planner in PLANNERS.items():
        assert planner.name == name
        assert planner.reference
        assert len(planner.summary) < 80


# ---------------------------------------------------------------------- shapes


def shape(name, domains, num_heads, num_kv_heads):
    return PLANNERS[name].shape_for(domains, num_heads, num_kv_heads)


def test_planners_that_move_whole_shards_ask_for_no_cut():
    cutting = {"ulysses", "hierarchical", "hierarchical_ring_inside", "tasp"}
    for name in PLANNERS.keys() - cutting:
        assert shape(name, one_domain(8), 8, 8) == Shape()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "groups"),
    [(8, 8, (8, 8)), (32, 32, (8, 8)), (32, 8, (8, 8)), (32, 2, (8, 2)), (8, 1, (8, 1)), (24, 6, (24, 6))],
)
def test_ulysses_asks_for_head_groups_of_which_each_reads_one(num_heads, num_kv_heads, groups):
    made = shape("ulysses", one_domain(8), num_heads, num_kv_heads)
    assert (made.q_head_groups, made.kv_head_groups) == groups
    assert not num_heads % made.q_head_groups
    assert not num_kv_heads % made.kv_head_groups


def test_hierarchical_deals_heads_over_a_domain_and_the_other_order_over_the_domains():
    domains = even_domains(8, 2)
    assert shape("hierarchical", domains, 16, 16) == Shape(4, 4)
    assert shape("hierarchical_ring_inside", domains, 16, 16) == Shape(2, 2)


@pytest.mark.parametrize("name", ["ulysses", "hierarchical"])
def test_heads_that_do_not_divide_are_refused_with_numbers_that_would(name):
    words = "query heads out to 8 ranks, but 12 heads do not divide by 8; they would by 1, 2, 3, 4, 6 or 12"
    with pytest.raises(PlanError, match=words) as raised:
        shape(name, one_domain(8), 12, 12)
    assert_is_one_sentence(raised.value)


def test_uncut_heads_are_refused_with_the_number_of_groups_that_would_work():
    problem = Problem(make_sharding("contiguous", 4, 8), one_domain(4))
    with pytest.raises(PlanError, match="has 1 query head groups; a multiple of 4 would work") as raised:
        plan("ulysses", problem)
    assert_is_one_sentence(raised.value)


@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    size=st.integers(1, 6),
    per_chunk=st.integers(1, 9),
    parts=st.integers(1, 9),
)
def test_refining_keeps_every_shard_and_cuts_chunks_evenly(layout, size, per_chunk, parts):
    whole = make_sharding(layout, size, 2 * size * per_chunk)
    fine = refine(whole, parts)
    for rank in range(size):
        assert fine.tokens_of(rank) == whole.tokens_of(rank)
    assert fine.num_chunks == sum(min(parts, chunk.length) for chunk in whole.chunks)
    lengths = {chunk.length for chunk in fine.chunks}
    assert max(lengths) - min(lengths) <= 1
    if parts == 1:
        assert fine == whole
