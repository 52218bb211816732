"""The text form of schedules reads back."""

import pytest

from charm_megatron.errors import ScheduleSyntaxError
from charm_megatron.planner import PLANNERS, plan
from charm_megatron.schedule.decisions import Problem
from charm_megatron.schedule.passes import BACKWARD, FORWARD
from charm_megatron.schedule.schedule import make_schedule
from charm_megatron.schedule.text import format_schedule, parse_action, parse_program
from charm_megatron.sharding import make_sharding
from charm_megatron.topology import even_domains

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("pass_", [FORWARD, BACKWARD])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2)])
@pytest.mark.parametrize("name", PLANNERS)
def test_every_action_of_every_schedule_reads_back(name, heads, pass_):
    made = Problem(make_sharding("zigzag", 8), even_domains(8, 2), True, *heads)
    schedule = make_schedule(plan(name, made), pass_)
    for rank in range(8):
        program = schedule.program(rank)
        assert tuple(parse_action(str(action)) for action in program) == program


def test_a_printed_program_reads_back_past_comments():
    made = Problem(make_sharding("zigzag", 2), even_domains(2, 1))
    schedule = make_schedule(plan("ring", made), FORWARD)
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
        ("", "unknown action ''"),
    ],
)
def test_what_cannot_be_read_is_named(text, message):
    with pytest.raises(ScheduleSyntaxError) as caught:
        parse_action(text)
    assert message in str(caught.value)
