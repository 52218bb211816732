"""The checker finds each kind of fault, and names the first."""

import pytest

from charm_megatron.errors import ScheduleFault
from charm_megatron.lowering.decisions import Decisions, owner_by_homes, shard_routes
from charm_megatron.lowering.schedules import make_schedule, make_schedules
from charm_megatron.planner import plan
from charm_megatron.schedule.passes import BACKWARD, FORWARD
from charm_megatron.schedule.problem import Problem
from charm_megatron.schedule.text import parse_action, parse_program
from charm_megatron.schedule.written import written_schedule
from charm_megatron.sharding import make_sharding
from charm_megatron.topology import even_domains
from charm_megatron.verify.programs import check_programs, check_schedule
from charm_megatron.workload import NO_MASK

pytestmark = pytest.mark.pure

PROBLEM = Problem(make_sharding("contiguous", 2, 8), even_domains(2, 1), NO_MASK)

PAIR = [
    """
    post 0.0 | send 1 kv0 | recv 1 kv1
    attend q0 kv0
    wait 0.0
    attend q0 kv1
    free kv1
    """,
    """
    post 0.0 | send 0 kv1 | recv 0 kv0
    attend q1 kv1
    wait 0.0
    attend q1 kv0
    free kv0
    """,
]
"""The ring of two ranks, written by hand."""


def check(*texts, pass_=FORWARD):
    return check_programs("by hand", PROBLEM, pass_, [parse_program(text.splitlines()) for text in texts])


def test_a_schedule_written_by_hand_passes_and_is_counted():
    report = check(*PAIR)
    assert report.num_messages == 2
    assert report.num_pieces_sent == {"kv": 2}
    assert report.peak_pieces == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("wait 0.0", "", "kv1 is not here yet"),
        ("attend q0 kv1", "", "1 blocks are never computed"),
        ("attend q0 kv1", "attend q0 kv1\nattend q0 kv1", r"block \(q0, kv1\) is computed twice"),
        ("attend q0 kv1", "attend q0 kv1 causal", "the same ascending chunks on both sides"),
        ("attend q0 kv0", "attend q0 kv0 causal", r"block \(q0, kv0\) has the wrong mask"),
        ("free kv1", "", "kv1 is left behind"),
        ("free kv1", "free kv1\nfree kv1", "kv1 is not here"),
        ("free kv1", "free kv1\nfree kv0", "kv0 is at home here"),
        ("send 1 kv0", "send 1 q0", "sends 1 q0 where rank 1 expects 0 kv0"),
        ("send 1 kv0 | ", "", "deadlock"),
        ("recv 1 kv1", "recv 2 kv1", "there is no peer 2"),
        ("attend q0 kv0\n", "attend q0 kv0\npost 0.0 | send 1 q0\n", "posts what is still under way"),
        ("free kv1", "wait 3.0\nfree kv1", "waits for what is not in flight"),
        ("attend q0 kv0\n", "attend g0 kv0\n", "g0 is not here"),
        ("attend q0 kv0\n", "accumulate o0<1\nattend q0 kv0\n", "o0<1 is not here"),
        ("attend q0 kv0\n", "attend q0 kv0\naccumulate o0\n", "o0 is not a received partial result"),
    ],
)
def test_each_fault_is_found_and_named(old, new, message):
    assert old in PAIR[0]
    with pytest.raises(ScheduleFault, match=message):
        check(PAIR[0].replace(old, new), PAIR[1])


Q_SIDE = [
    """
    post 0.0 | send 1 q0 | recv 1 q1
    attend q0 kv0
    wait 0.0
    attend q1 kv0
    free q1
    post 2.0 | send 1 o1 | recv 1 o0<1
    wait 2.0
    free o1
    accumulate o0<1
    free o0<1
    """,
    """
    post 0.0 | send 0 q1 | recv 0 q0
    attend q1 kv1
    wait 0.0
    attend q0 kv1
    free q0
    post 2.0 | send 0 o0 | recv 0 o1<0
    wait 2.0
    free o0
    accumulate o1<0
    free o1<0
    """,
]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("accumulate o0<1", "", "result o0<1 would be lost"),
        ("accumulate o0<1", "accumulate o0<1\naccumulate o0<1", "o0<1 is accumulated twice"),
        ("wait 2.0\n    free o1", "free o1\nwait 2.0", "o1 is still being sent"),
        ("post 2.0 | send 1 o1 | recv 1 o0<1", "free o1", "result o1 would be lost"),
        (
            "attend q1 kv0\n    free q1\n    post 2.0 | send 1 o1",
            "post 2.0 | send 1 o1",
            "o1 is not here yet",
        ),
    ],
)
def test_results_come_home_once_and_complete(old, new, message):
    assert old in Q_SIDE[0]
    check(*Q_SIDE)
    with pytest.raises(ScheduleFault, match=message):
        check(Q_SIDE[0].replace(old, new), Q_SIDE[1])


def test_a_result_that_is_added_to_after_it_left_is_found():
    early = Q_SIDE[0].replace("attend q1 kv0\n    free q1\n", "")
    early = early.replace("wait 2.0", "attend q1 kv0\nfree q1\nwait 2.0", 1)
    with pytest.raises(ScheduleFault, match="o1 is not here yet"):
        check(early, Q_SIDE[1])


def test_the_message_shows_rank_action_and_surroundings():
    with pytest.raises(ScheduleFault) as caught:
        check(PAIR[0], PAIR[1].replace("wait 0.0", ""))
    assert "by hand forward, rank 1, action 2 (attend q1 kv0): kv0 is not here yet" in str(caught.value)
    assert "-->    2 attend q1 kv0" in str(caught.value)


def test_the_fault_of_a_whole_schedule_shows_the_grid_around_it():
    (schedule,) = make_schedules(
        plan("ring", Problem(make_sharding("contiguous", 6, 12), even_domains(6, 1))), "forward"
    )
    programs = [schedule.program(rank) for rank in range(6)]
    programs[4] = tuple(a for a in programs[4] if str(a) != "attend q4 kv2")
    broken = written_schedule("broken", schedule.problem, FORWARD, programs)
    with pytest.raises(ScheduleFault, match="blocks are never computed"):
        check_schedule(broken)
    programs[4] = tuple(a for a in schedule.program(4) if str(a) != "wait 1.1")
    broken = written_schedule("broken", schedule.problem, FORWARD, programs)
    with pytest.raises(ScheduleFault) as caught:
        check_schedule(broken)
    assert caught.value.rank == 4
    message = str(caught.value)
    assert "broken forward, rank 4" in message
    assert "rank 3" in message.split("\n\n")[1]
    assert "rank 0" not in message.split("\n\n")[1]


def test_a_missing_program_is_found():
    with pytest.raises(ScheduleFault, match="1 programs for 2 ranks"):
        check(PAIR[0])


@pytest.mark.parametrize("name", ["charm", "charm_together"])
def test_no_single_dropped_action_of_charm_goes_unnoticed(name):
    made = Problem(make_sharding("zigzag", 4, 16), even_domains(4, 2))
    for pass_ in (FORWARD, BACKWARD):
        (schedule,) = make_schedules(plan(name, made), pass_.direction)
        programs = [schedule.program(rank) for rank in range(4)]
        for rank, program in enumerate(programs):
            for i in range(len(program)):
                mutant = [*programs]
                mutant[rank] = program[:i] + program[i + 1 :]
                with pytest.raises(ScheduleFault):
                    check_programs("mutant", made, pass_, mutant)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("kv", 0, (0, 1), (0,)), ("kv", 0, (0, 1), (1,))], "reaches a rank twice"),
        ([("kv", 1, (0, 1), (0,))], "leaves a rank before it has arrived"),
        ([], "never reaches the block's owner"),
        ([("kv", 0, (0, 1, 2), (1, 1))], "still arriving"),
    ],
)
def test_routes_that_contradict_each_other_are_refused(rows, message):
    made = Problem(make_sharding("contiguous", 3, 6), even_domains(3, 1), NO_MASK)
    owner = owner_by_homes(made, [[0, 1, 2], [1, 1, 1], [2, 2, 2]])
    routes = tuple(shard_routes(made, side, [path], steps, home=[home]) for side, home, path, steps in rows)
    with pytest.raises(ScheduleFault, match=message):
        make_schedule("wrong", Decisions(made, owner, routes), FORWARD)


def test_the_program_checker_and_the_parser_agree_on_words():
    (schedule,) = make_schedules(plan("rm_plus", PROBLEM), "backward")
    assert check_schedule(schedule).num_pieces_sent == {
        "kv": 2,
        "dkv": 2,
    }
    assert str(parse_action("free kv1")) == "free kv1"
