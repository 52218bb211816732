"""The check of tables accepts no schedule that the check of programs refuses."""

import random
from dataclasses import fields, replace

import numpy as np
import pytest

from charm_megatron.errors import ScheduleFault
from charm_megatron.lowering.schedules import make_schedules
from charm_megatron.planner import cut_problem, plan, shipped_planners
from charm_megatron.schedule.tables import Hops
from charm_megatron.sharding import make_sharding
from charm_megatron.topology import even_domains
from charm_megatron.verify.programs import check_schedule
from charm_megatron.verify.tables import check_tables
from charm_megatron.workload import CAUSAL, NO_MASK, Mask

pytestmark = pytest.mark.pure

PLANNERS = shipped_planners()


def schedules(name, num_domains, size, direction, layout="contiguous", mask=CAUSAL):
    sharding, domains = make_sharding(layout, size, 4 * size), even_domains(size, num_domains)
    problem = cut_problem(name, sharding, domains, mask, num_heads=size, num_kv_heads=size)
    return make_schedules(plan(name, problem), direction)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", [name for name in PLANNERS if name != "tasp"])
def test_tables_of_every_planner_pass(name, direction):
    for num_domains, size in ((1, 5), (2, 6), (8, 8)):
        for schedule in schedules(name, num_domains, size, direction):
            check_tables(schedule)
            check_schedule(schedule)


def mutate(schedule, chance):
    """Drops, doubles or changes one hop."""
    rows = np.stack([getattr(schedule.hops, column.name) for column in fields(Hops)], axis=1)
    at = chance.randrange(len(rows))
    kind = chance.choice(["drop", "double", "step", "src", "dst", "piece"])
    if kind == "drop":
        rows = np.delete(rows, at, axis=0)
    elif kind == "double":
        rows = np.insert(rows, at, rows[at], axis=0)
    else:
        column = {"step": 0, "piece": 2, "src": 3, "dst": 4}[kind]
        rows = rows.copy()
        rows[at, column] = chance.randrange(int(rows[:, column].max()) + 1)
    return replace(schedule, hops=Hops(*rows.T))


def passes(check, schedule):
    try:
        check(schedule)
    except (ScheduleFault, KeyError):
        return False
    return True


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "name",
    [
        "ring",
        "charm",
        "charm_keep_kv",
        "charm_per_domain",
        "charm_together",
        "double_ring",
        "hierarchical",
        "attention_2d",
    ],
)
def test_mutated_tables_that_pass_have_programs_that_pass(name, direction):
    (schedule,) = schedules(name, 2, 4, direction, "zigzag", Mask(9, 0))
    chance = random.Random(f"{name} {direction}")
    num_refused = 0
    for _ in range(60):
        mutant = mutate(schedule, chance)
        if passes(check_tables, mutant):
            assert passes(check_schedule, mutant)
        else:
            num_refused += 1
    assert num_refused > 30


@pytest.mark.parametrize(
    ("column", "message"), [("rank", "before it has arrived"), ("compute_step", "before it has arrived")]
)
def test_blocks_that_come_too_early_or_elsewhere_are_refused(column, message):
    (schedule,) = schedules("ring", 1, 4, "forward", mask=NO_MASK)
    changed = getattr(schedule.blocks, column).copy()
    late = int(np.argmax(schedule.blocks.compute_step))
    changed[late] = 0 if column == "compute_step" else (changed[late] + 1) % 4
    with pytest.raises(ScheduleFault, match=message):
        check_tables(replace(schedule, blocks=replace(schedule.blocks, **{column: changed})))


def test_a_missing_block_is_named():
    (schedule,) = schedules("ring", 1, 2, "forward")
    kept = {
        column.name: getattr(schedule.blocks, column.name)[1:] for column in fields(type(schedule.blocks))
    }
    with pytest.raises(ScheduleFault, match=r"block \(q0, kv0\) of head group 0 is computed 0 times, not 1"):
        check_tables(replace(schedule, blocks=type(schedule.blocks)(**kept)))
