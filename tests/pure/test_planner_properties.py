"""Each planner's schedule is what its paper says it is."""

from collections import Counter, defaultdict
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charm_megatron.cost.wire import make_wire_format, traffic
from charm_megatron.errors import PlanError
from charm_megatron.planner import plan, shipped_planners
from charm_megatron.planner.grid import hop_order, rows_of
from charm_megatron.planner.hamiltonian import hamiltonian_rings
from charm_megatron.schedule.problem import Problem
from charm_megatron.sharding import make_sharding
from charm_megatron.topology import Domains, even_domains, one_domain
from charm_megatron.verify.programs import check_schedule
from charm_megatron.workload import CAUSAL, NO_MASK, Workload
from tests.planned import DIRECTIONS, assert_is_one_sentence, cut, hops_of, payloads, schedule, schedules

pytestmark = pytest.mark.pure

UNEQUAL = Domains((0, 1, 1, 0, 1))

HEAD_DIM = 16


def sent_bytes(name, domains, direction="forward", *, heads=None, per_rank=32):
    """(traffic, bytes of one rank's queries, bytes of one rank's lse or delta) without a mask, in bf16."""
    size = domains.cp_size
    num_heads, num_kv_heads = heads or (2 * size, 2 * size)
    problem = cut(name, domains, per_rank=per_rank, heads=(num_heads, num_kv_heads))
    workload = Workload(
        1, per_rank * size, num_heads, num_kv_heads, HEAD_DIM, HEAD_DIM, dtype="bfloat16", mask=NO_MASK
    )
    rows = per_rank * num_heads
    made = schedules(name, problem, direction)
    wire = make_wire_format(workload, problem, grad_return_dtype="float32")
    return traffic(*made, wire=wire), rows * HEAD_DIM * 2, rows * 4


def assert_steps_are_matchings(made, payload):
    """In each step a rank sends to at most one other, and gets from the same one."""
    for step in {step for step, *_ in hops_of(made, payload)}:
        pairs = {(src, dst) for at, _, src, dst in hops_of(made, payload) if at == step}
        assert len({src for src, _ in pairs}) == len(pairs)
        assert {(dst, src) for src, dst in pairs} == pairs


@pytest.mark.parametrize("size", [2, 3, 8])
def test_all_gather_has_one_step_and_one_attention_after_it(size):
    made = schedule("all_gather", cut("all_gather", one_domain(size)))
    assert (made.num_comm_steps, made.num_compute_steps) == (1, 2)


@pytest.mark.parametrize("size", [2, 3, 6, 8, 16])
def test_merge_swaps_kv_in_one_matching_a_step_and_no_transfer_waits_for_another(size):
    made = schedule("merge", cut("merge", one_domain(size)))
    assert_steps_are_matchings(made, "kv")
    for step, piece, src, dst in hops_of(made, "kv"):
        assert made.problem.home[piece] == src
        if size & (size - 1) == 0:
            assert dst == src ^ (step + 1)
    assert len(hops_of(made, "kv")) == size * (size - 1)


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_pass_q_moves_queries_and_outputs_and_no_kv(size):
    sent, q_bytes, lse_bytes = sent_bytes("pass_q", one_domain(size))
    assert set(sent.total_bytes) == {(size - 1) * (2 * q_bytes + lse_bytes)}
    made = schedule("pass_q", cut("pass_q", one_domain(size)))
    assert payloads(made) == ({"q", "o"} if size > 1 else set())


def test_burst_backward_moves_kv_forward_and_queries_with_gradients_backward():
    problem = cut("burst_backward", one_domain(4))
    assert payloads(schedule("burst_backward", problem)) == {"kv"}
    assert payloads(schedule("burst_backward", problem, "backward")) == {"g", "dq"}
    sent, q_bytes, stat_bytes = sent_bytes("burst_backward", one_domain(4), "backward")
    assert set(sent.total_bytes) == {3 * (2 * q_bytes + 2 * stat_bytes + 2 * q_bytes)}


def test_ring_self_attention_goes_two_rounds_either_way_and_queries_stay():
    problem = cut("ring_self_attention", one_domain(4), "zigzag", CAUSAL)
    keys, values = schedules("ring_self_attention", problem)
    assert [payloads(keys), payloads(values)] == [{"k"}, {"v"}]
    values, keys = schedules("ring_self_attention", problem, "backward")
    assert [payloads(values), payloads(keys)] == [{"v", "dv"}, {"k", "dk"}]


@pytest.mark.parametrize("grid", [(1, 4), (2, 4), (3, 3), (4, 2), (8, 1)])
def test_double_ring_crosses_once_for_each_other_domain_and_starts_under_the_window_before(grid):
    num_domains, size = grid
    domains = even_domains(num_domains * size, num_domains)
    made = schedule("double_ring", cut("double_ring", domains))
    crossings = Counter(piece for _, piece, src, dst in hops_of(made, "kv") if domains.crosses(src, dst))
    assert set(crossings.values()) == ({num_domains - 1} if num_domains > 1 else set())
    assert {step % size for step, _, src, dst in hops_of(made, "kv") if domains.crosses(src, dst)} <= {0}
    compute_steps = Counter(zip(made.blocks.rank.tolist(), made.blocks.compute_step.tolist(), strict=True))
    assert set(compute_steps.values()) == {1}, "one shard a compute step"
    assert made.num_compute_steps == num_domains * size


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ulysses_sends_four_n_minus_first_parts_of_a_shard(size):
    sent, q_bytes, lse_bytes = sent_bytes("ulysses", one_domain(size))
    assert set(sent.total_bytes) == {(4 * q_bytes + lse_bytes) * (size - 1) // size}


@pytest.mark.parametrize(
    ("size", "num_heads", "num_kv_heads"), [(4, 8, 2), (4, 12, 6), (4, 8, 1), (3, 12, 2)]
)
def test_ulysses_sends_a_kv_head_to_exactly_the_ranks_whose_queries_read_it(size, num_heads, num_kv_heads):
    problem = cut("ulysses", one_domain(size), heads=(num_heads, num_kv_heads))
    made = schedule("ulysses", problem)
    per_rank, per_group = num_heads // size, num_kv_heads // problem.kv_head_groups
    readers = defaultdict(set)
    for head in range(num_heads):
        readers[head * num_kv_heads // num_heads // per_group].add(head // per_rank)
    reached = defaultdict(set)
    for _, piece, src, dst in hops_of(made, "kv"):
        reached[piece % problem.kv_head_groups] |= {src, dst}
    for group in range(problem.kv_head_groups):
        hops = [dst for _, piece, _, dst in hops_of(made, "kv") if piece % problem.kv_head_groups == group]
        assert set(hops) == readers[group]


@pytest.mark.parametrize("grid", [(2, 4), (3, 2), (4, 4)])
def test_hierarchical_orders_deal_heads_in_one_level_and_ring_in_the_other(grid):
    num_domains, size = grid
    domains = even_domains(num_domains * size, num_domains)
    sent, q_bytes, lse_bytes = sent_bytes("hierarchical", domains)
    assert set(sent.inside_bytes) == {(4 * q_bytes + lse_bytes) * (size - 1) // size}
    assert set(sent.across_bytes) == {(num_domains - 1) * 2 * q_bytes}
    sent, q_bytes, lse_bytes = sent_bytes("hierarchical_ring_inside", domains)
    assert set(sent.across_bytes) == {(4 * q_bytes + lse_bytes) * (num_domains - 1) // num_domains}
    assert set(sent.inside_bytes) == {(size - 1) * 2 * q_bytes}


def test_hierarchical_is_ulysses_in_one_domain_and_a_ring_of_domains_with_one_rank_each():
    for domains, other in ((one_domain(4), "ulysses"), (even_domains(4, 4), "ring")):
        made = schedule("hierarchical", cut("hierarchical", domains, "zigzag", CAUSAL))
        same = schedule(other, cut(other, domains, "zigzag", CAUSAL))
        assert len(made.hops.comm_step) == len(same.hops.comm_step)
        assert sorted(zip(made.hops.src, made.hops.dst, strict=True)) == sorted(
            zip(same.hops.src, same.hops.dst, strict=True)
        )


@pytest.mark.parametrize("size", [1, 2, 3, 5, *range(7, 34), 48, 64])
def test_rings_are_hamiltonian_and_use_every_directed_link_once(size):
    rings = hamiltonian_rings(size)
    assert len(rings) == size - 1
    assert all(sorted(ring) == list(range(size)) for ring in rings)
    links = [link for ring in rings for link in zip(ring, ring[1:] + ring[:1], strict=True)]
    assert len(set(links)) == len(links)
    assert len(links) == size * (size - 1)


@pytest.mark.parametrize("size", [4, 6])
def test_tasp_refuses_4_and_6_ranks_which_have_no_such_rings(size):
    with pytest.raises(
        PlanError, match=f"{size} ranks have no {size - 1} edge-disjoint.*ring takes any"
    ) as raised:
        shipped_planners()["tasp"].shape_for(one_domain(size), 8, 8)
    assert_is_one_sentence(raised.value)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 9])
def test_tasp_sends_equally_much_over_every_directed_link_in_every_step(size):
    problem = cut("tasp", one_domain(size), per_rank=2 * (size - 1))
    made = schedule("tasp", problem)
    tokens = Counter()
    for step, piece, src, dst in hops_of(made, "kv"):
        tokens[step, src, dst] += int(problem.lengths[piece])
    assert set(tokens.values()) == {2}
    assert len(tokens) == (size - 1) * size * (size - 1)
    assert made.num_compute_steps == size


def test_tasp_notes_when_a_shard_has_too_few_chunks_for_all_rings():
    problem = Problem(make_sharding("zigzag", 5, 40), one_domain(5))
    assert plan("tasp", problem).method.notes == ("a shard of 2 chunks leaves 2 of 4 rings empty",)
    assert plan("tasp", cut("tasp", one_domain(5), "zigzag", CAUSAL)).method.notes == ()


def test_a_grid_is_the_most_square_one_or_has_equal_domains_as_its_rows():
    assert np.shape(rows_of(one_domain(12))) == (4, 3)
    assert np.shape(rows_of(one_domain(7))) == (7, 1)
    assert rows_of(even_domains(8, 2)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert np.shape(rows_of(even_domains(8, 8))) == (4, 2)
    assert rows_of(Domains((0, 1, 0, 1, 0, 0))) == ((0, 2), (4, 5), (1, 3))
    assert "domains of different sizes cannot be rows" in plan("mesh", cut("mesh", UNEQUAL)).method.notes[0]


@pytest.mark.parametrize("name", ["attention_2d", "mesh"])
@pytest.mark.parametrize("grid", [(1, 16), (1, 12), (2, 4), (4, 2), (1, 7)])
def test_grids_send_q_and_outputs_along_rows_and_kv_along_columns(name, grid):
    domains = even_domains(grid[0] * grid[1], grid[0])
    num_rows, num_columns = np.shape(rows_of(domains))
    sent, q_bytes, lse_bytes = sent_bytes(name, domains)
    q_side = (num_columns - 1) * (2 * q_bytes + lse_bytes)
    kv_side = (num_rows - 1) * 2 * q_bytes
    assert set(sent.total_bytes) == {q_side + kv_side}
    if grid[0] > 1:
        assert set(sent.across_bytes) == {kv_side}


def test_attention_2d_gathers_in_one_step_and_mesh_moves_one_side_a_step():
    made = schedule("attention_2d", cut("attention_2d", one_domain(16)))
    assert {step for payload in ("q", "kv") for step, *_ in hops_of(made, payload)} == {0}
    made = schedule("mesh", cut("mesh", one_domain(16)))
    steps = [{step for step, *_ in hops_of(made, payload)} for payload in ("q", "kv")]
    assert steps == [{1, 3, 5}, {0, 2, 4}]
    sends = Counter((step, src) for payload in ("q", "kv") for step, _, src, _ in hops_of(made, payload))
    assert set(sends.values()) == {1}


@given(num_columns=st.integers(1, 9), num_rows=st.integers(1, 9))
def test_hop_order_takes_every_hop_once_and_ends_with_the_longer_side(num_columns, num_rows):
    q_steps, kv_steps = hop_order(num_columns, num_rows)
    assert (len(q_steps), len(kv_steps)) == (num_columns - 1, num_rows - 1)
    assert sorted(q_steps + kv_steps) == list(range(num_columns + num_rows - 2))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 16])
def test_dist_flash_takes_half_the_rounds_of_a_ring_and_balances_blocks(size):
    problem = cut("dist_flash", one_domain(size), "contiguous", CAUSAL)
    made = schedule("dist_flash", problem)
    assert made.num_compute_steps == size // 2 + 1
    assert schedule("ring", problem).num_compute_steps == size
    blocks = np.bincount(made.blocks.rank, minlength=size)
    assert blocks.max() - blocks.min() <= 1
    compute_steps = Counter(zip(made.blocks.rank.tolist(), made.blocks.compute_step.tolist(), strict=True))
    assert set(compute_steps.values()) == {1}, "one block a rank and compute step"


# ---------------------------------------------------------------------- charm, one domain's queries at a time

PER_DOMAIN = ("charm_per_domain", "charm_keep_kv")


def exchange_bytes(q_bytes, stat_bytes, direction):
    """(one KV exchange, one Q exchange), outputs returned in bf16 and gradients in fp32."""
    if direction == "forward":
        return 2 * q_bytes, 2 * q_bytes + stat_bytes
    return (2 + 2 * 2) * q_bytes, 2 * q_bytes + 2 * stat_bytes + 2 * q_bytes


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("grid", [(1, 4), (2, 2), (2, 4), (3, 4), (4, 2), (2, 8)])
def test_bytes_of_charm_with_kv_sent_again_or_kept_equal_the_formulas(grid, direction):
    num_domains, size = grid
    for name, num_kv_exchanges in zip(PER_DOMAIN, (num_domains, 1), strict=True):
        sent, *unit = sent_bytes(name, even_domains(num_domains * size, num_domains), direction)
        kv, q = exchange_bytes(*unit, direction)
        assert set(sent.across_bytes) == {(num_domains - 1) * q}
        inside = num_kv_exchanges * (size // 2) * kv + num_domains * (size // 2 - 1) * q
        assert set(sent.inside_bytes) == {inside}


def peak(name, num_domains, direction):
    made = schedule(name, cut(name, even_domains(4 * num_domains, num_domains)), direction)
    return check_schedule(made).peak_pieces


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", PER_DOMAIN)
def test_what_charm_holds_does_not_grow_with_the_domains_as_that_of_charm_together_does(name, direction):
    assert len({peak(name, num_domains, direction) for num_domains in (4, 5, 8)}) == 1
    together = [peak("charm_together", num_domains, direction) for num_domains in (2, 4, 8)]
    assert together[1] > 1.5 * together[0]
    assert together[2] > 1.5 * together[1]
    assert peak(name, 8, direction) < together[2]


@pytest.mark.parametrize("name", PER_DOMAIN)
def test_the_next_queries_cross_under_each_pass_and_outputs_under_the_pass_after_theirs(name):
    num_domains, size = 4, 4
    domains = even_domains(num_domains * size, num_domains)
    made = schedule(name, cut(name, domains))
    length = 3  # two exchanges, and the blocks of the last one
    for step, piece, src, dst in hops_of(made, "q"):
        distance = (domains.domain_of[dst] - piece // size) % num_domains
        assert step // length == (distance - 1 if domains.crosses(src, dst) else distance)
    for step, piece, src, dst in hops_of(made, "o"):
        distance = (domains.domain_of[src] - piece // size) % num_domains
        if domains.crosses(src, dst):
            assert step // length == distance + 1
    blocks = made.blocks
    domain = np.asarray(domains.domain_of)
    passes = (domain[blocks.rank] - domain[made.problem.home[blocks.q]]) % num_domains
    assert (blocks.compute_step // length == passes).all()
    compute_steps = Counter(zip(blocks.rank.tolist(), blocks.compute_step.tolist(), strict=True))
    assert set(compute_steps.values()) == {1, 2}, "the own block or those of one exchange"


@pytest.mark.parametrize("name", PER_DOMAIN)
def test_inside_a_domain_each_step_of_charm_is_a_matching_on_either_side(name):
    domains = even_domains(16, 2)
    made = schedule(name, cut(name, domains))
    for payload in ("q", "kv"):
        inside = [hop for hop in hops_of(made, payload) if not domains.crosses(*hop[2:])]
        for step in {hop[0] for hop in inside}:
            pairs = {(src, dst) for at, _, src, dst in inside if at == step}
            assert {(dst, src) for src, dst in pairs} == pairs
            assert len({src for src, _ in pairs}) == len(pairs)


@pytest.mark.parametrize(
    ("name", "num_domains"), list(product(("charm", *PER_DOMAIN, "charm_together"), (1, 8)))
)
def test_with_one_domain_or_one_rank_in_each_charm_is_rm_plus(name, num_domains):
    domains = even_domains(8, num_domains)
    for direction in DIRECTIONS:
        made, flat = (schedule(other, cut(other, domains), direction) for other in (name, "rm_plus"))
        assert [made.program(rank) for rank in range(8)] == [flat.program(rank) for rank in range(8)]


# ---------------------------------------------------------------------- charm, visits between its own exchanges


def test_visits_of_charm_come_one_after_the_other_between_its_own_exchanges():
    num_domains, size = 3, 4
    domains = even_domains(num_domains * size, num_domains)
    made = schedule("charm", cut("charm", domains, "zigzag", NO_MASK))
    numbering = made.problem.numbering("kv")
    steps = {distance: Counter() for distance in range(num_domains)}
    for step, chunk, src, dst in hops_of(made, "q"):
        if not domains.crosses(src, dst):
            home = made.problem.sharding.home[chunk]
            steps[(domains.domain_of[dst] - domains.domain_of[home]) % num_domains][step] += 1
    for step, piece, _, _ in hops_of(made, "kv"):
        steps[piece // numbering.num_first][step] += 1
    own, *visits = (sorted(found) for found in steps.values())
    assert [len(found) for found in (own, *visits)] == [size - 1] * num_domains, "an exchange a step"
    assert own[0] < visits[0][0]
    assert all(a[-1] < b[0] for a, b in pairwise(visits))
    assert visits[-1][-1] < own[-1]


def test_each_q_crosses_under_the_visit_before_its_own_and_outputs_go_home_before_the_end():
    domains = even_domains(12, 3)
    made = schedule("charm", cut("charm", domains, "zigzag", NO_MASK))
    crossing = sorted({hop[0] for hop in hops_of(made, "q") if domains.crosses(*hop[2:])})
    returning = sorted({hop[0] for hop in hops_of(made, "o") if domains.crosses(*hop[2:])})
    assert len(crossing) == len(returning) == 2
    assert crossing[0] == 0
    assert crossing[1] < returning[0] < returning[1] < made.num_compute_steps
