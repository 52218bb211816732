"""The operator benchmark gives whole rows, whatever the times are."""

import json
from dataclasses import replace
from itertools import product

import pytest
from typer.testing import CliRunner

from charm_megatron.bench.operator import Network, OperatorCase, as_json, planned, run_case
from charm_megatron.bench.picture import draw_speed_up
from charm_megatron.bench.ranks import run_on_ranks
from charm_megatron.cli.main import app
from charm_megatron.errors import LaunchError
from charm_megatron.schedule.wire import traffic
from charm_megatron.workload import CAUSAL, NO_MASK, Workload

pytestmark = pytest.mark.gloo

NETWORK = Network(2, 2)
CASE = OperatorCase(
    Workload(1, 4 * 32, 4, 2, 8, 8, "float32", CAUSAL), ("ring", "charm", "ulysses"), repetitions=3
)


@pytest.mark.parametrize("ccr", [None, 0.5])
def test_each_schedule_has_a_row_a_pass_with_its_planned_bytes(ccr):
    case = replace(CASE, ccr=ccr)
    rows = run_case(case, NETWORK)
    assert [(row.schedule, row.direction) for row in rows] == [
        (name, direction) for name in case.schedules for direction in ("forward", "backward")
    ]
    for row in rows:
        schedules, wire = planned(case, NETWORK, row.schedule)
        assert row.bytes_planned == traffic(*schedules[row.direction], wire=wire).total_bytes.max()
        assert 0 < row.min_s <= row.median_s <= row.max_s
        assert row.is_modelled == (ccr is not None)
        assert row.ccr == pytest.approx(ccr) if ccr else row.ccr > 0
        assert row.bound_s is None
        assert row.bytes_wire is None
        assert as_json(row)["compute"] == ("modelled" if ccr else "real")
    assert [row.ratio_to_first for row in rows[:2]] == [1.0, 1.0]


def test_with_known_rates_two_bounds_stand_beside_each_time():
    network = replace(NETWORK, inside_bytes_per_s=1e9, across_bytes_per_s=1e8)
    case = replace(CASE, ccr=0.1, schedules=("ring", "charm"))
    for row in run_case(case, network):
        assert row.bound_s >= row.busiest_s * 0.999
        assert row.fraction_of_bound == row.bound_s / row.median_s


def test_the_picture_is_written(tmp_path):
    rows = [row for ccr in (0.2, 0.5) for row in run_case(replace(CASE, ccr=ccr, repetitions=1), NETWORK)]
    draw_speed_up(rows, tmp_path / "speed.png", "on loopback")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def fail_on_one(rank, num_ranks):
    if rank == 1:
        raise ValueError("no luck")


def test_a_rank_that_fails_ends_the_benchmark_with_its_words():
    with pytest.raises(LaunchError, match=r"(?s)rank 1 failed: .*no luck"):
        run_on_ranks(fail_on_one, NETWORK)


def test_masks_without_work_for_some_ranks_are_timed_too():
    workload = replace(CASE.workload, mask=NO_MASK)
    rows = run_case(replace(CASE, workload=workload, layout="contiguous", repetitions=1), NETWORK)
    assert len(rows) == 6


def run_command(*arguments):
    return CliRunner().invoke(app, ["bench", "operator", *arguments])


def test_the_command_writes_rows_for_people_and_for_programs(tmp_path):
    path = tmp_path / "rows.json"
    sizes = ("--tokens-per-rank", "32", "--heads", "2", "--head-dim", "8", "--repetitions", "1")
    result = run_command(*sizes, "--schedules", "ring,charm", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "loopback" in result.output
    rows = json.loads(path.read_text("utf-8"))
    assert {(row["schedule"], row["pass"]) for row in rows} == set(
        product(("ring", "charm"), ("forward", "backward"))
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--schedules", "chram"), "did you mean 'charm'"),
        (("--ccr", "fast"), "is not a list of numbers"),
        (("--ccr", "0"), "must be positive"),
        (("--picture", "x.png"), "so it needs --ccr"),
        (("--mask", "casual"), "did you mean 'causal'"),
    ],
)
def test_bad_arguments_are_one_line(arguments, message):
    result = run_command(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
