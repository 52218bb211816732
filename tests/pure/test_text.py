"""The text form of schedules reads back."""

import pytest

from charm_megatron.errors import ScheduleSyntaxError
from charm_megatron.lowering.schedules import make_schedules
from charm_megatron.planner import cut_problem, plan, shipped_planners
from charm_megatron.schedule.problem import Problem
from charm_megatron.schedule.text import format_schedule, parse_action, parse_program
from charm_megatron.sharding import make_sharding
from charm_megatron.topology import even_domains
from charm_megatron.workload import CAUSAL, Mask

pytestmark = pytest.mark.pure

PLANNERS = shipped_planners()


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", PLANNERS)
def test_every_action_of_every_schedule_reads_back(name, direction):
    for mask in (CAUSAL, Mask(9, 2)):
        sharding, domains = make_sharding("contiguous", 8, 64), even_domains(8, 2)
        if name == "dist_flash" and mask != CAUSAL:
            continue
        made = cut_problem(name, sharding, domains, mask, num_heads=8, num_kv_heads=8)
        for schedule in make_schedules(plan(name, made), direction):
            for rank in range(8):
                program = schedule.program(rank)
                assert tuple(parse_action(str(action)) for action in program) == program


def test_a_printed_program_reads_back_past_comments():
    made = Problem(make_sharding("zigzag", 2, 8), even_domains(2, 1))
    (schedule,) = make_schedules(plan("ring", made), "forward")
    whole = format_schedule(schedule).split("# rank ")
    assert parse_program(whole[2].splitlines()[1:]) == schedule.program(1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pots 1.0", "unknown action 'pots'; did you mean 'post'?"),
        ("post one", "'one' is not STEP.ORDER"),
        ("post 1.0 | send x q3", "'send x q3' is not send|recv RANK PIECE"),
        ("post 1.0 | send 2", "is not send|recv RANK PIECE"),
        ("attend q3", "attend needs pieces of both sides"),
        ("attend q3 kv?", "'kv?' is not a piece"),
        ("free z3", "'z3' is not a piece"),
        ("free q1 q2", "free takes one piece, but has 2"),
        ("wait 1", "'1' is not STEP.ORDER"),
        ("attend q1 kv2 band 3", "'3' is not LOWEST:HIGHEST"),
        ("attend q1 q2 kv2 band 0:3", "a band is of one block"),
        ("", "unknown action ''"),
    ],
)
def test_what_cannot_be_read_is_named(text, message):
    with pytest.raises(ScheduleSyntaxError) as caught:
        parse_action(text)
    assert message in str(caught.value)
