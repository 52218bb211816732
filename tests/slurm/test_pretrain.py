"""scripts/slurm/pretrain.sbatch on a real SLURM: two nodes with names and addresses of their own, two ranks each."""

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from charm_megatron.config import load_run_config
from charm_megatron.train.pretrain import run_pretrain
from charm_megatron.train.run_folder import RunFolder
from tests.faults.jobs import rank_in_environment
from tests.megatron.small_run import Run, Silent, assert_same_curve
from tests.slurm.cluster import Cluster, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]  # five starts of torch on few cores

ROOT = Path(__file__).parents[2]
SCRIPT = "scripts/slurm/pretrain.sbatch"
CONFIG = "configs/run/gpt_tiny_cpu.yaml"
NUM_ITERATIONS = 60
SHORT = ("megatron.seq_length=64", f"megatron.train_iters={NUM_ITERATIONS}", "megatron.eval_iters=1")
OPTIONS = tuple(word for setting in SHORT for word in ("--set", setting))


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same training with four ranks of the launcher's own, as two domains by declaration."""
    path = tmp_path_factory.mktemp("local") / "run"
    run_pretrain(load_run_config(ROOT / CONFIG, list(SHORT)), path, False, Silent())
    return Run(RunFolder(path))


def submit(cluster: Cluster, out: Path, *options: str, script: str = SCRIPT, **environment: str) -> int:
    domains = ("--set", "charm.domains=hosts")
    arguments = ("--nodes=2", script, CONFIG, *OPTIONS, *domains, *options)
    return cluster.submit(ROOT, *arguments, CHARM_OUT=str(out), **environment)


def test_two_nodes_end_with_the_loss_of_one_machine_and_find_their_domains(
    cluster: Cluster, local: Run, tmp_path: Path
) -> None:
    done = cluster.wait(submit(cluster, tmp_path / "run"))
    assert done.state == "COMPLETED", done.output
    assert "nodes node[0-1], master node0:" in done.output
    run = Run(RunFolder(tmp_path / "run"))
    assert_same_curve(run, local, tolerance=1e-6)
    assert run.steps[-1]["iteration"] == NUM_ITERATIONS
    receipt = run.folder.receipt.read_text("utf-8")
    assert "4 ranks in 2 domains [0 1 | 2 3], one per host\n" in receipt, "SLURM says the same"


def test_usr1_saves_and_the_requeued_job_continues_to_the_same_end(
    cluster: Cluster, local: Run, tmp_path: Path
) -> None:
    run = Run(RunFolder(tmp_path / "run"))
    job = submit(cluster, run.folder.path)
    wait_until(lambda: len(run.steps) >= 3, 120, "training")
    cluster.run("scancel", "--batch", "--signal=USR1", str(job))
    done = cluster.wait(job)
    assert done.state == "COMPLETED", done.output
    saved = re.search(r"saved at iteration (\d+) of 60; requeued", done.output)
    assert saved is not None, done.output
    assert 3 <= int(saved[1]) < NUM_ITERATIONS
    assert f"life 2, nodes node[0-1], master node0:{20000 + job}, iteration {saved[1]}" in done.output
    assert f"finished at iteration {NUM_ITERATIONS}" in done.output
    assert [row["iteration"] for row in run.steps] == list(range(1, NUM_ITERATIONS + 1))
    assert [row["loss"] for row in run.steps] == pytest.approx([row["loss"] for row in local.steps], abs=1e-5)


def test_usr1_while_ranks_start_is_kept_until_they_can_save(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path / "run")
    wait_until(lambda: "life 1" in cluster.output(job), 60, "the job")
    cluster.run("scancel", "--batch", "--signal=USR1", str(job))
    done = cluster.wait(job)
    assert done.state == "COMPLETED", done.output
    assert "requeued" in done.output


def test_a_killed_node_ends_the_job_and_is_named(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(RunFolder(tmp_path / "run"))
    # Earlier than SLURM, which misses a node after 15 s and then ends what is left of the job.
    settings = ("megatron.train_iters=100000", "megatron.save_interval=2", "charm.deadline_s=5")
    job = submit(cluster, run.folder.path, *(word for one in settings for word in ("--set", one)))
    wait_until(lambda: len(run.steps) >= 5, 120, "training")
    cluster.kill_node(1)
    try:
        done = cluster.wait(job, timeout_s=120)
    finally:
        cluster.start_node(1)
    assert done.state in ("NODE_FAIL", "FAILED"), done.output
    assert "pretrain.sbatch: node node1 does not answer" in done.output
    assert "node node0 does not answer" not in done.output
    # The first where they wait in attention, the second where in a collective of Megatron's own.
    words = r"of the context-parallel group gave up |ranks 2 and 3 do not answer, for "
    assert re.search(words, done.output), "the ranks that are left do not wait for their deadline"
    last = re.search(r"last checkpoint: iteration (\d+); to continue: CHARM_OUT=\S+ sbatch ", done.output)
    assert last is not None, done.output
    assert int(last[1]) >= 2
    assert "life 2" not in done.output


def test_a_stopped_rank_ends_the_job_within_the_deadline_and_is_named(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Nothing tells SLURM or torchrun of it."""
    run = Run(RunFolder(tmp_path / "run"))
    settings = ("megatron.train_iters=100000", "charm.deadline_s=5")
    job = submit(cluster, run.folder.path, *(word for one in settings for word in ("--set", one)))
    wait_until(lambda: len(run.steps) >= 2, 120, "training")
    os.kill(process_of(3, run.folder.path), signal.SIGSTOP)
    done = cluster.wait(job, timeout_s=60)
    assert done.state == "FAILED", done.output
    assert "rank 3 does not answer, for " in done.output
    assert not any(f"rank {other} does not answer" in done.output for other in range(3))


def process_of(rank: int, out: Path) -> int:
    """The process of a rank of the job that writes there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if (
                f"CHARM_OUT={out}".encode() in path.read_bytes()
                and rank_in_environment(int(path.parent.name)) == rank
            ):
                found.append(int(path.parent.name))
    return min(found)


def test_a_master_address_of_one_machine_only_fails_here(cluster: Cluster, tmp_path: Path) -> None:
    """The mistake that ports on one machine would not show; so the tests above mean something."""
    text = (ROOT / SCRIPT).read_text("utf-8")
    right = "source scripts/slurm/job.bash\n"
    assert right in text
    wrong = tmp_path / "wrong.sbatch"
    wrong.write_text(text.replace(right, f"{right}MASTER_ADDR=127.0.0.1\n"))
    job = submit(cluster, tmp_path / "run", script=str(wrong), RENDEZVOUS_TIMEOUT_S="10")
    done = cluster.wait(job, timeout_s=120)
    assert done.state == "FAILED", done.output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_submission_without_a_configuration_says_how(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.wait(cluster.submit(ROOT, "--nodes=2", SCRIPT))
    assert done.state == "FAILED"
    assert "usage, in the repository's root: sbatch" in done.output
    done = cluster.wait(cluster.submit(tmp_path, "--nodes=2", str(ROOT / SCRIPT), CONFIG))
    assert done.state == "FAILED"
    assert "usage, in the repository's root: sbatch" in done.output
