"""The operator benchmark gives whole rows, whatever the times are."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from typer.testing import CliRunner

from charm_megatron.bench import operator, rank
from charm_megatron.bench.case import OperatorCase, OperatorRow, as_json
from charm_megatron.bench.cluster import Cluster, launched_cluster
from charm_megatron.bench.operator import run_case
from charm_megatron.bench.picture import draw_speed_up
from charm_megatron.bench.ranks import run_on_ranks
from charm_megatron.bench.verdict import verdicts
from charm_megatron.cli.main import app
from charm_megatron.errors import LaunchError, TopologyError
from charm_megatron.kernels.unsharded import relative_error
from charm_megatron.schedule.passes import DIRECTIONS
from charm_megatron.testbed import namespaces
from charm_megatron.testbed.profile import Profile
from charm_megatron.workload import CAUSAL, Mask, Workload

pytestmark = pytest.mark.gloo

CLUSTER = Cluster(2, 2)
CASE = OperatorCase(
    Workload(1, 4 * 32, 4, 2, 8, 8, "float32", CAUSAL), ("ring", "charm", "ulysses"), repetitions=3
)


@pytest.mark.parametrize("ccr", [None, 0.5])
def test_each_schedule_has_a_row_a_pass_with_its_planned_bytes(ccr):
    case = replace(CASE, ccr=ccr)
    rows = run_case(case, CLUSTER)
    assert [(row.schedule, row.direction) for row in rows] == [
        (name, direction) for name in case.schedules for direction in ("forward", "backward")
    ]
    for row in rows:
        plan = case.plan(row.schedule, CLUSTER.domains)
        assert row.bytes_planned == plan.traffic(row.direction).total_bytes.max()
        assert 0 < row.min_s <= row.median_s <= row.max_s
        assert row.is_modelled == (ccr is not None)
        assert row.ccr == pytest.approx(ccr) if ccr else row.ccr > 0
        assert row.bound_s is None
        assert row.bytes_wire is None
        assert as_json(row)["compute"] == ("modelled" if ccr else "real")
    assert [row.ratio_to_first for row in rows[:2]] == [1.0, 1.0]


def test_with_known_rates_two_bounds_stand_beside_each_time():
    profile = Profile(
        name="x",
        domains=2,
        ranks_per_domain=2,
        inside_bytes_per_s=1_000_000_000,
        across_bytes_per_s=100_000_000,
    )
    case = replace(CASE, ccr=0.1, schedules=("ring", "charm"))
    for row in run_case(case, replace(CLUSTER, profile=profile)):
        assert row.bound_s >= row.busiest_s * 0.999
        assert row.fraction_of_bound == row.bound_s / row.median_s
        assert row.fraction_of_busiest <= row.fraction_of_bound * 1.001


def test_a_shared_link_counts_what_all_its_ranks_send():
    profile = Profile(
        name="x",
        domains=2,
        ranks_per_domain=2,
        inside_bytes_per_s=1_000_000,
        across_bytes_per_s=100_000,
    )
    pair_bytes = np.zeros((4, 4), dtype=np.int64)
    pair_bytes[0, 2] = pair_bytes[1, 3] = 50_000
    pair_bytes[0, 1] = 400_000
    own = replace(CLUSTER, profile=profile)
    shared = replace(CLUSTER, profile=profile.model_copy(update={"nic": "domain"}))
    assert own.busiest_link_s(pair_bytes) == pytest.approx(0.5)
    assert shared.busiest_link_s(pair_bytes) == pytest.approx(1.0)
    assert CLUSTER.busiest_link_s(pair_bytes) is None


def test_results_are_compared_with_unsharded_attention():
    for row in run_case(replace(CASE, repetitions=1), CLUSTER):
        assert 0 < row.error < 1e-5, row
    assert all(row.error is None for row in run_case(replace(CASE, ccr=0.1, repetitions=1), CLUSTER))


def test_peers_are_timed_and_checked_beside_our_schedules():
    case = replace(CASE, peers=("torch_ring", "ring_flash_attn_ring"), repetitions=1)
    rows = {(row.schedule, row.direction): row for row in run_case(case, CLUSTER)}
    torch_ring, refused = rows["torch_ring", "backward"], rows["ring_flash_attn_ring", "forward"]
    assert torch_ring.is_peer
    assert torch_ring.ratio_to_first > 0
    assert torch_ring.error < 1e-5
    assert torch_ring.bytes_planned is None
    assert refused.median_s is None
    assert refused.note == "is right in bfloat16 only, not in float32"


def test_a_pass_that_is_not_asked_for_is_not_timed():
    rows = run_case(replace(CASE, passes=("forward",), repetitions=1), CLUSTER)
    assert [row.direction for row in rows] == ["forward"] * 3


def test_ranks_of_a_job_are_told_by_its_variables():
    assert launched_cluster({}) is None
    made = launched_cluster({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
    assert (made.num_domains, made.ranks_per_domain, made.is_launched) == (2, 4, True)
    with pytest.raises(TopologyError, match="8 ranks do not fill nodes of 3 ranks"):
        launched_cluster({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "3"})


def test_the_picture_is_written(tmp_path):
    rows = [row for ccr in (0.2, 0.5) for row in run_case(replace(CASE, ccr=ccr, repetitions=1), CLUSTER)]
    bars = [row for row in rows if row.ccr < 0.3]
    draw_speed_up([("curve", rows), ("bars", bars)], tmp_path / "speed.svg")
    text = (tmp_path / "speed.svg").read_text("utf-8")
    assert text.count("CCR: computation over the communication of ring") == 2, "one curve a pass"
    assert text.count("CCR 0.20; grey") == 2, "bars a pass"


def test_more_implementations_than_colours_are_all_drawn(tmp_path):
    rows = [
        OperatorRow(f"schedule_{i}", "forward", "x", True, median_s=1.0, ratio_to_first=1.0 + i, ccr=ccr)
        for i in range(12)
        for ccr in (0.1, 1.0)
    ]
    draw_speed_up([("many", rows)], tmp_path / "speed.svg")
    text = (tmp_path / "speed.svg").read_text("utf-8")
    assert set(re.findall(r"schedule_\d+", text)) == {f"schedule_{i}" for i in range(12)}


def test_what_is_not_a_number_is_an_infinite_error():
    value = torch.tensor([1.0, float("nan"), 2.0])
    assert relative_error(value, torch.ones(3).double()) == float("inf")


def test_rows_of_earlier_races_outlive_a_race_that_fails(tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    ran = []

    def run_once(case, cluster, progress):
        if ran:
            raise LaunchError("rank 3 failed: no luck")
        ran.append(case)
        return [OperatorRow("ring", "forward", "x", True, median_s=1.0, ratio_to_first=1.0, ccr=0.1)]

    monkeypatch.setattr(operator, "run_case", run_once)
    monkeypatch.setattr(namespaces, "why_unavailable", lambda: "it needs root")
    result = run_command("--suite", "smoke", "--json", str(path))
    assert result.exit_code == 1
    assert "no luck" in result.stderr
    assert [row["schedule"] for row in json.loads(path.read_text("utf-8"))] == ["ring"]
    assert [file.name for file in tmp_path.iterdir()] == ["rows.json"]


ORPHANS = """
import os, sys, time
from charm_megatron.bench.cluster import Cluster
from charm_megatron.bench.ranks import run_on_ranks

def sleep(log, rank, num_ranks):
    print(os.getpid(), flush=True)
    time.sleep(600)

run_on_ranks(sleep, Cluster(1, 2), deadline_s=60)
"""


def test_ranks_end_with_the_process_that_started_them():
    starter = subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True)
    try:
        for _ in range(2):
            starter.stdout.readline()  # two ranks share the pipe, so their words may run into each other
        ranks = psutil.Process(starter.pid).children()
        assert len(ranks) == 2
    finally:
        starter.kill()
        starter.wait()
        starter.stdout.close()
    gone, alive = psutil.wait_procs(ranks, timeout=30)
    assert len(gone) == 2, alive


def timed(name, median_s, *, is_peer=False, note=""):
    return OperatorRow(name, "forward", "x", True, is_peer, median_s, median_s, median_s, 1.0, 0.5, note=note)


def test_the_verdict_counts_rings_only_as_rings_and_says_who_is_slower():
    rows = [
        timed("ring", 2.0),
        timed("charm", 1.0),
        timed("ringmaster_allgather", 0.5, is_peer=True),
        timed("torch_ring", 2.5, is_peer=True),
    ]
    assert list(verdicts(rows)) == [
        "forward, CCR 0.50: charm is SLOWER than the fastest peer: ringmaster_allgather is 2.00x as fast",
        "  our ring takes 0.80 times as long as the fastest peer ring, torch_ring",
    ]
    assert list(verdicts(rows[:2])) == []
    assert "charm is 2.50x as fast" in next(verdicts([rows[1], rows[3]]))
    assert "is as fast as the fastest peer" in next(
        verdicts([rows[1], timed("torch_ring", 1.01, is_peer=True)])
    )


def fail_check(*args, **kwargs):
    return SimpleNamespace(fault="wrong: dq error 5.3e-01")


def test_a_peer_whose_results_are_wrong_is_named_and_not_timed(monkeypatch):
    monkeypatch.setattr(rank, "check_peer", fail_check)  # ranks are forked, so they see it
    case = replace(CASE, peers=("torch_ring",), repetitions=1)
    rows = [row for row in run_case(case, CLUSTER) if row.is_peer]
    assert {(row.median_s, row.ratio_to_first, row.note) for row in rows} == {
        (None, None, "wrong: dq error 5.3e-01")
    }


def test_a_long_sequence_of_many_heads_is_not_compared_with_unsharded_attention():
    few, many = (Workload(1, 8192, heads, 1, 8, 8, "float32", CAUSAL) for heads in (1, 32))
    assert replace(CASE, workload=few).can_be_checked
    assert not replace(CASE, workload=many).can_be_checked


def fail_on_one(log, rank, num_ranks):
    if rank == 1:
        raise ValueError("no luck")


def test_a_rank_that_fails_ends_the_benchmark_with_its_words():
    with pytest.raises(LaunchError, match=r"(?s)rank 1 failed: .*no luck"):
        run_on_ranks(fail_on_one, CLUSTER, deadline_s=60)


def test_a_mask_under_which_most_pairs_of_ranks_have_no_block_is_timed_and_right():
    workload = replace(CASE.workload, mask=Mask(8, 0))
    case = replace(CASE, workload=workload, schedules=("ring", "charm"), layout="contiguous", repetitions=1)
    for name in case.schedules:
        (forward,) = case.plan(name, CLUSTER.domains).forward
        assert len(forward.blocks.q) == 4 + 3, "each rank's own block, and that with the keys just before"
    rows = run_case(case, CLUSTER)
    assert [(row.schedule, row.direction) for row in rows] == list(product(case.schedules, DIRECTIONS))
    assert all(row.median_s > 0 and 0 < row.error < 1e-5 for row in rows), rows


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


def test_a_schedule_of_a_file_is_raced_beside_a_planners(tmp_path):
    sizes = ("--tokens-per-rank", "32", "--heads", "2", "--head-dim", "8", "--dtype", "float32")
    group = ("--nodes", "1", "--ranks-per-node", "2", "--mask", "causal")
    planned = CliRunner().invoke(app, ["plan", "--schedule", "rm_plus", *group, *sizes, "--json"])
    mine, path = tmp_path / "mine.json", tmp_path / "rows.json"
    mine.write_text(planned.stdout, "utf-8")
    options = ("--schedules", f"ring,{mine}", *sizes, "--repetitions", "1")
    result = run_command(*options, *group, "--json", str(path))
    assert result.exit_code == 0, result.output
    rows = {(row["schedule"], row["pass"]): row for row in json.loads(path.read_text("utf-8"))}
    assert set(rows) == set(product(("ring", str(mine)), DIRECTIONS))
    assert all(0 < row["error"] < 1e-5 for row in rows.values())
    refused = run_command(*options, *group[:-1], "none")
    assert refused.exit_code == 2
    assert "mask causal, but this group has" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--schedules", "chram"), "did you mean 'charm'"),
        (("--ccr", "fast"), "is not a list of numbers"),
        (("--ccr", "0"), "must be positive"),
        (("--ccr", "1", "--compute", "real"), "give one of the two"),
        (("--picture", "/nowhere/x.png"), "there is no folder /nowhere"),
        (("--passes", "sideways"), "is not forward, backward or forward,backward"),
        (("--profile", "nvlink2x4"), "did you mean 'nvlink_2x4'"),
        (("--profile", "flat_8", "--nodes", "2"), "are for loopback"),
        (("--peers", "torch_rnig"), "did you mean 'torch_ring'"),
        (("--suite", "quik"), "did you mean 'quick'"),
        (("--schedules", "ring,ring"), "named twice"),
        (("--schedules", ","), "names no schedule; give some, such as ring,charm"),
        (("--peers", "torch_ring,torch_ring"), "named twice"),
        (("--ccr", "nan"), "must be positive"),
        (("--ccr", "inf"), "must be positive"),
        (("--ccr", ""), "is not a list of numbers"),
        (("--json", "/"), "cannot write /: it is a folder"),
        (("--json", "/proc/rows.json"), "cannot write /proc/rows.json"),
        (("--picture", "speed.xyz"), "cannot draw speed.xyz: names of pictures end in .svg, .png, .pdf"),
        (("--suite", "smoke", "--heads", "4"), "--suite has its own races; leave --heads out"),
        (("--schedules", "ring,ring_self_attention", "--ccr", "1"), "computes whole rows of logits"),
        (("--mask", "casual"), "did you mean 'causal'"),
    ],
)
def test_bad_arguments_are_one_line(arguments, message):
    result = run_command(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_where_no_network_can_be_shaped_the_race_runs_on_loopback_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(namespaces, "why_unavailable", lambda: "it needs root, and the user is number 7")
    path = tmp_path / "rows.json"
    sizes = ("--tokens-per-rank", "8", "--heads", "8", "--head-dim", "8", "--repetitions", "1")
    result = run_command("--profile", "nvlink_2x4", *sizes, "--schedules", "ring", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "cannot shape nvlink_2x4: it needs root, and the user is number 7; on loopback" in result.output
    rows = json.loads(path.read_text("utf-8"))
    assert {row["network"] for row in rows} == {"2 x 4 ranks on loopback"}
    assert {row["bound_s"] for row in rows} == {None}
