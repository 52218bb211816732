"""Schedules as JSON: what is written reads back, and what is not a schedule is one sentence."""

import copy
import json

import pytest

from charm_megatron.errors import InvalidInput, ScheduleFault, ScheduleSyntaxError
from charm_megatron.lowering.schedules import make_schedules
from charm_megatron.planner import cut_problem, plan, shipped_planners
from charm_megatron.schedule.json_form import from_json, load_schedule, to_json
from charm_megatron.sharding import make_sharding
from charm_megatron.topology import even_domains
from charm_megatron.verify.programs import check_schedule
from charm_megatron.workload import NO_MASK, Mask

pytestmark = pytest.mark.pure

PLANNERS = shipped_planners()


def written(name, size=3, mask=NO_MASK, layout="contiguous"):
    sharding, domains = make_sharding(layout, size, 6 * size, mask.documents), even_domains(size, 1)
    problem = cut_problem(name, sharding, domains, mask, num_heads=12, num_kv_heads=12)
    method = plan(name, problem)
    schedules = [phase for way in ("forward", "backward") for phase in make_schedules(method, way)]
    return schedules, to_json(name, schedules)


@pytest.mark.parametrize("name", [name for name in PLANNERS if name != "dist_flash"])
def test_every_schedule_reads_back_with_its_tables(name):
    for layout, mask in (
        ("contiguous", NO_MASK),
        ("zigzag", Mask(4, 0)),
        ("striped", Mask(None, 0, (7, 11))),
    ):
        schedules, data = written(name, mask=mask, layout=layout)
        loaded = from_json(json.loads(json.dumps(data)), "a test")
        assert loaded.problem == schedules[0].problem
        for theirs, ours in zip(loaded.schedules, schedules, strict=True):
            assert [theirs.program(rank) for rank in range(3)] == [ours.program(rank) for rank in range(3)]
            assert theirs.num_comm_steps == ours.num_comm_steps
            assert len(theirs.hops.comm_step) == len(ours.hops.comm_step)
            assert len(theirs.blocks.rank) == len(ours.blocks.rank)
            check_schedule(theirs)
        assert to_json(name, loaded.schedules) == data


def changed(**changes):
    _, data = written("ring", 2)
    data = copy.deepcopy(data)
    for path, value in changes.items():
        *parents, last = path.split("__")
        inner = data
        for parent in parents:
            inner = inner[int(parent) if parent.isdigit() else parent]
        inner[last] = value
    return data


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "something"}, "its format is 'something'"),
        ({"version": 9}, "version 9"),
        ({"problem__layout": "zigzg"}, "did you mean 'zigzag'"),
        ({"problem__mask": "casual"}, "did you mean 'causal'"),
        ({"problem__seq_len": 7}, "must be a multiple of 2"),
        ({"problem__cp_size": 0}, "greater than or equal to 1"),
        ({"problem__domain_of": [0]}, "domain_of is for 1 ranks, but cp_size is 2"),
        ({"phases__0__pass": "forwards"}, "did you mean 'forward'"),
        ({"phases__0__programs": [["post 0.0"]]}, "1 programs for 2 ranks"),
        ({"phases__0__programs": [["jump"], []]}, "unknown action 'jump'"),
        ({"phases__0__programs": [["free q9"], ["attend q9 kv0"]]}, "there is no q9"),
        ({"phases__0__programs": [["attend g0 kv0"], []]}, "g0 is no payload of pass forward"),
        ({"phases": []}, "phases"),
        ({"surplus": 1}, "surplus"),
    ],
)
def test_what_is_not_a_schedule_is_named(changes, message):
    with pytest.raises((InvalidInput, ScheduleFault)) as caught:
        from_json(changed(**changes), "a test")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_missing_or_not_json_are_one_line(tmp_path):
    with pytest.raises(ScheduleSyntaxError, match=r"cannot read schedule .*: No such file"):
        load_schedule(tmp_path / "absent.json")
    path = tmp_path / "torn.json"
    path.write_text('{"format": "charm', encoding="utf-8")
    with pytest.raises(ScheduleSyntaxError, match="is not JSON"):
        load_schedule(path)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(ScheduleSyntaxError, match="not a JSON object but list"):
        load_schedule(path)
