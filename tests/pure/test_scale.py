"""Large groups are planned, and proved. How long it takes is for `charm-megatron bench planning`."""

import pytest

from charm_megatron.bench.planning import measure_planning
from charm_megatron.lowering.schedules import make_schedules
from charm_megatron.planner import cut_problem, plan
from charm_megatron.sharding import make_sharding
from charm_megatron.topology import even_domains
from charm_megatron.verify.programs import check_schedule
from charm_megatron.verify.tables import check_tables

pytestmark = pytest.mark.pure


def schedules(name, num_domains, per_domain, direction):
    size = num_domains * per_domain
    domains = even_domains(size, num_domains)
    problem = cut_problem(name, make_sharding("zigzag", size, 4 * size), domains, num_heads=8, num_kv_heads=8)
    return make_schedules(plan(name, problem), direction)


@pytest.mark.parametrize("name", ["charm", "charm_together", "hierarchical"])
def test_128_ranks_pass_the_whole_check(name):
    for schedule in schedules(name, 16, 8, "backward"):
        check_schedule(schedule)
        check_tables(schedule)


@pytest.mark.parametrize("name", ["charm", "charm_per_domain", "charm_together"])
def test_1024_ranks_are_planned_proved_and_give_any_ranks_program(name):
    (schedule,) = schedules(name, 128, 8, "backward")
    check_tables(schedule)
    program = schedule.program(777)
    partners = {message.peer for action in program if hasattr(action, "sends") for message in action.sends}
    inside = {peer for peer in partners if peer // 8 == 777 // 8}
    assert len(inside) == 7
    assert {peer % 8 for peer in partners - inside} == {777 % 8}


def test_the_benchmark_measures_what_it_says():
    (row,) = measure_planning(["charm"], [16])
    assert row.cp_size == 16
    assert row.num_hops > 0
    assert row.check_s is not None
    assert row.ready_s >= row.plan_s > 0
