"""scripts/slurm/bench_operator.sbatch on a real SLURM: two nodes with two ranks each, over gloo."""

import csv
import json
from itertools import product
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SCRIPT = "scripts/slurm/bench_operator.sbatch"
SIZES = ("--tokens-per-rank", "32", "--heads", "2", "--head-dim", "8", "--dtype", "float32")
RACE = (*SIZES, "--schedules", "ring,charm", "--repetitions", "2")


def submit(cluster: Cluster, out: Path, *options: str, ranks: str = "2") -> int:
    return cluster.submit(ROOT, "--nodes=2", SCRIPT, *options, CHARM_OUT=str(out), RANKS_PER_NODE=ranks)


def test_two_nodes_race_as_two_domains_and_leave_rows_table_and_picture(
    cluster: Cluster, tmp_path: Path
) -> None:
    out = tmp_path / "bench"
    done = cluster.wait(submit(cluster, out, *RACE))
    assert done.state == "COMPLETED", done.output
    assert "nodes node[0-1] x 2 ranks, master node0:" in done.output
    rows = json.loads((out / "operator.json").read_text("utf-8"))
    keys = list(product(("ring", "charm"), ("forward", "backward")))
    assert [(row["schedule"], row["pass"]) for row in rows] == keys
    for row in rows:
        assert row["network"] == "2 x 2 ranks of this job", "a node is a domain"
        assert row["compute"] == "real"
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"]
        assert 0 < row["error"] < 1e-5
    with (out / "operator.csv").open(encoding="utf-8", newline="") as file:
        assert [(row["schedule"], row["pass"]) for row in csv.DictReader(file)] == keys
    assert (out / "operator.png").read_bytes().startswith(b"\x89PNG")
    table = (out / "operator.txt").read_text("utf-8")
    assert table.startswith("2 x 2 ranks of this job: MHA, mask none"), table
    assert table.count(" charm ") == 2
    assert table in done.output


def test_a_bad_option_ends_all_nodes_with_its_sentence_said_once(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.wait(submit(cluster, tmp_path / "bench", *RACE, "--mask", "casual"), timeout_s=60)
    assert done.state == "FAILED", done.output
    assert done.output.count("did you mean 'causal'") == 1, done.output
    assert "bench_operator.sbatch: the ranks ended with code 1" in done.output
    assert not (tmp_path / "bench" / "operator.json").exists()


def test_a_submission_without_ranks_says_how(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.wait(submit(cluster, tmp_path / "bench", *RACE, ranks=""))
    assert done.state == "FAILED"
    assert "how many ranks a node? Submit with --gpus-per-node=8" in done.output
    done = cluster.wait(cluster.submit(tmp_path, "--nodes=2", str(ROOT / SCRIPT)))
    assert done.state == "FAILED"
    assert "usage, in the repository's root: sbatch" in done.output
