"""Ranks of a job hear each other over its store, and end when one is silent."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from charm_megatron.liveness.standing import Standing
from charm_megatron.processes.failure import failure_of
from charm_megatron.processes.job import JobRank
from charm_megatron.processes.ports import free_port

pytestmark = pytest.mark.gloo

RANK = textwrap.dedent(
    """
    import os, sys, time
    from charm_megatron.processes.job import job_heartbeats

    with job_heartbeats(os.environ, float(sys.argv[1])):
        print("beats", flush=True)
        time.sleep(float(sys.argv[2]))
        if sys.argv[3]:
            raise RuntimeError(sys.argv[3])
    """
)


@pytest.fixture
def job():
    """A store, and what starts a rank that beats for so long; all are gone in the end."""
    store = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    started = []

    def start(rank, size, deadline_s, for_s, then=""):
        variables = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(deadline_s), str(for_s), then],
            env={**os.environ, **{name: str(value) for name, value in variables.items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "beats\n"
        return process

    yield start, store
    for process in started:
        process.kill()
        process.communicate()


def test_a_rank_that_is_stopped_ends_the_job_although_nobody_waits_for_it(job):
    """Also rank 0, which listens to all others: rank 1 listens to it. Those that end kill it, which cannot."""
    stopped = 0
    start, store = job
    ranks = [start(rank, 3, 1.0, 600) for rank in range(3)]
    store.wait([f"charm_megatron/beat/{rank}" for rank in range(3)], timedelta(seconds=60))
    time.sleep(1)  # they have heard each other
    ranks[stopped].send_signal(signal.SIGSTOP)
    ends = [rank.wait(60) for rank in ranks]
    assert ends[stopped] == -signal.SIGKILL
    assert {code for rank, code in enumerate(ends) if rank != stopped} == {1}
    said = "".join(rank.stderr.read() for rank in ranks)
    assert said.count("error: ") == 1
    assert f" ends: rank {stopped} does not answer, for " in said


def test_ranks_that_end_well_one_after_the_other_end_nobody(job):
    start, _ = job
    ranks = [start(rank, 3, 1.0, 2 + 2 * rank) for rank in range(3)]
    assert [rank.wait(60) for rank in ranks] == [0, 0, 0]


def test_the_first_rank_to_fail_says_why_and_is_named_by_those_that_lose_it(job):
    start, store = job
    failing = start(1, 2, 1.0, 0, "out of memory")
    assert failing.wait(60) == 1
    said = failing.stderr.read()
    assert "LaunchError: rank 1 failed: Traceback" in said
    assert "RuntimeError: out of memory" in said
    other = JobRank(0, 2, ("127.0.0.1", store.port), 1.0, has_agent=False)
    assert other._explained(failure_of(RuntimeError("Connection closed by peer"))) == (
        "rank 1 failed: RuntimeError: out of memory"
    )


def test_a_pause_of_the_whole_job_is_nobodys_silence(job):
    _, store = job
    listener = JobRank(0, 2, ("127.0.0.1", store.port), 0.3, has_agent=False)
    other = JobRank(1, 2, ("127.0.0.1", store.port), 0.3, has_agent=False)
    other.beat(Standing())
    listener.beat(Standing())
    time.sleep(4)  # both stopped for longer than the deadline
    listener.beat(Standing())  # would end this process
    other.beat(Standing())
    listener.beat(Standing())
