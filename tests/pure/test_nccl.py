"""Schedules on GPUs under NCCL: communicators work in order, a Wait waits for all of a post."""

import pytest

from charm_megatron.compile import compile_attention
from charm_megatron.config import CharmConfig
from charm_megatron.cost.model import CostModel, Link
from charm_megatron.cost.timeline import LAUNCH_S, evaluate
from charm_megatron.cost.wire import make_wire_format
from charm_megatron.errors import PlanError, ScheduleFault
from charm_megatron.planner import shipped_planners
from charm_megatron.schedule.passes import FORWARD
from charm_megatron.schedule.problem import Problem
from charm_megatron.schedule.queues import Queues
from charm_megatron.schedule.text import parse_program
from charm_megatron.schedule.written import written_schedule
from charm_megatron.sharding import make_sharding
from charm_megatron.topology import even_domains
from charm_megatron.verify.programs import check_programs, check_schedule
from charm_megatron.workload import CAUSAL, NO_MASK, Workload

pytestmark = pytest.mark.pure

H100 = CostModel(400e12, Link(350e9, 8e-6), Link(42e9, 15e-6))
MODELS = {
    "350m": Workload(64, 4096, 16, 16, 64, 64, "bfloat16", CAUSAL),
    "8b": Workload(1, 32768, 32, 8, 128, 128, "bfloat16", CAUSAL),
}


def times_ms(model, name, queues, *, fuse):
    """Forward and backward, gradients in float32, over 2 x 8 ranks."""
    config = CharmConfig(schedule=name, fuse=fuse, grad_return_dtype="float32")
    plan = compile_attention(config, even_domains(16, 2), MODELS[model], "zigzag")
    phases = (plan.forward[0], plan.backward[0])
    return [evaluate(phase, plan.wire, H100, queues).makespan_s * 1e3 for phase in phases]


@pytest.mark.parametrize(("model", "forward_ms", "backward_ms"), [("350m", 3.1, 6.3), ("8b", 1.85, 4.3)])
def test_charm_keeps_its_overlap_on_two_communicators(model, forward_ms, backward_ms):
    forward, backward = times_ms(model, "charm", Queues(2), fuse=False)
    assert forward <= forward_ms
    assert backward <= backward_ms


def test_one_communicator_makes_transfers_inside_wait_for_those_across():
    on_one, on_two = (times_ms("350m", "charm", Queues(n), fuse=False) for n in (1, 2))
    assert all(one > 1.2 * two for one, two in zip(on_one, on_two, strict=True))


def test_a_single_hardware_queue_costs_where_computation_dominates():
    free, single = (times_ms("8b", "charm", Queues(1, is_single=s), fuse=True)[1] for s in (False, True))
    assert single > 1.1 * free


@pytest.mark.parametrize("name", shipped_planners())
def test_every_planner_ends_on_every_kind_of_queues(name):
    """With fp32 tensors of two tokens a chunk: what counts is the order."""
    num_run = 0
    for num_domains, per_domain in ((2, 4), (3, 3), (4, 2), (2, 3)):
        size = num_domains * per_domain
        workload = Workload(1, 4 * size, size, size, 4, 4, "float32", CAUSAL)
        layout = "contiguous" if name == "dist_flash" else "zigzag"
        for depth in (1, 3):
            for fuse in (True, False):
                config = CharmConfig(schedule=name, fuse=fuse, prefetch_depth=depth)
                try:
                    plan = compile_attention(config, even_domains(size, num_domains), workload, layout)
                except PlanError:
                    continue
                kinds = [Queues(1), Queues(1, is_single=True)]
                if not fuse:
                    kinds += [Queues(2), Queues(2, is_single=True)]
                for queues in kinds:
                    for schedule in plan.schedules:
                        evaluate(schedule, plan.wire, H100, queues)
                num_run += 1
    assert num_run >= 4


@pytest.mark.parametrize("name", ["charm", "double_ring", "hierarchical", "charm_per_domain"])
def test_the_checker_proves_schedules_on_two_communicators_and_on_one_hardware_queue(name):
    workload = Workload(1, 48, 6, 6, 4, 4, "float32", CAUSAL)
    plan = compile_attention(CharmConfig(schedule=name, fuse=False), even_domains(6, 3), workload, "zigzag")
    for schedule in plan.schedules:
        alone = check_schedule(schedule)
        for queues in (Queues(2), Queues(2, is_single=True), Queues(1, is_single=True)):
            assert check_schedule(schedule, queues) == alone


def test_posts_that_mix_links_are_refused_on_two_communicators():
    workload = Workload(1, 64, 8, 8, 4, 4, "float32", CAUSAL)
    plan = compile_attention(CharmConfig(fuse=True), even_domains(8, 2), workload, "zigzag")
    for run in (lambda s: check_schedule(s, Queues(2)), lambda s: evaluate(s, plan.wire, H100, Queues(2))):
        with pytest.raises(ScheduleFault, match=r"made lane by lane \(fuse: false\)"):
            run(plan.forward[0])


# ---------------------------------------------------------------------- by hand

SWAP = [
    ["post 0.0 | send 1 kv0 | recv 1 kv1", "post 1.0 | send 2 q0 | recv 2 q2", "wait 0.0", "wait 1.0"],
    ["post 0.0 | send 0 kv1 | recv 0 kv0", "wait 0.0"],
    ["post 1.0 | send 0 q2 | recv 0 q0", "wait 1.0"],
    [],
]
"""Over 2 x 2 ranks: the first swap stays inside a domain, the second crosses."""


def swap():
    problem = Problem(make_sharding("contiguous", 4, 16), even_domains(4, 2), NO_MASK)
    wire = make_wire_format(Workload(1, 16, 1, 1, 4, 4, "float32", NO_MASK), problem)
    return written_schedule("swap", problem, FORWARD, [parse_program(lines) for lines in SWAP]), wire


def test_posts_of_one_communicator_run_one_after_the_other_and_those_of_two_together():
    made, wire = swap()
    cost = CostModel(1e12, Link(1e9, 1e-3), Link(1e9, 2e-3))
    kv_s, q_s = 1e-3 + 4 * 8 * 4 / 1e9, 2e-3 + 4 * 4 * 4 / 1e9
    on_one, on_two = (evaluate(made, wire, cost, Queues(n)).makespan_s for n in (1, 2))
    assert on_one == pytest.approx(2 * LAUNCH_S + kv_s + q_s)
    assert on_two == pytest.approx(LAUNCH_S + q_s)


def test_what_waits_in_another_communicator_holds_nothing_up_and_in_one_everything():
    problem = Problem(make_sharding("contiguous", 4, 16), even_domains(4, 2), NO_MASK)
    stuck = [
        ["post 0.0 | recv 2 q2", "post 1.0 | send 1 kv0", "wait 0.0", "wait 1.0"],
        ["post 1.0 | recv 0 kv0", "wait 1.0", "post 2.0 | send 3 q1", "wait 2.0"],
        ["post 3.0 | recv 3 kv3", "wait 3.0", "post 0.0 | send 0 q2", "wait 0.0"],
        ["post 2.0 | recv 1 q1", "wait 2.0", "post 3.0 | send 2 kv3", "wait 3.0"],
    ]
    programs = [parse_program(lines) for lines in stuck]
    made = written_schedule("stuck", problem, FORWARD, programs)
    wire = make_wire_format(Workload(1, 16, 1, 1, 4, 4, "float32", NO_MASK), problem)
    with pytest.raises(ScheduleFault, match=r"deadlock: post 0\.0"):
        check_programs("stuck", problem, FORWARD, programs)
    with pytest.raises(ScheduleFault, match="never gets past"):
        evaluate(made, wire, H100, Queues(1))
    # With two, all posts end; that blocks are missing is another fault.
    with pytest.raises(ScheduleFault, match="blocks are never computed"):
        check_programs("stuck", problem, FORWARD, programs, Queues(2))
    evaluate(made, wire, H100, Queues(2))
