"""How a rank ended, which rank is blamed for a failure, and what ranks are told; with processes that need no torch."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from charm_megatron.errors import ConfigError, InvalidInput, LaunchError, TopologyError, TransferTimeout
from charm_megatron.liveness.process import watch, watch_addresses
from charm_megatron.liveness.standing import Exchange, Standing, Waiting
from charm_megatron.processes.environment import (
    RankPlacement,
    is_later_rank,
    is_rank,
    launched_rank,
    require_meeting_point,
    require_single_task,
    threads_per_rank,
)
from charm_megatron.processes.failure import ending, failure_of, reason
from charm_megatron.processes.follow import GATHER_S, run_to_end
from charm_megatron.processes.output import last_lines_of
from charm_megatron.processes.ports import free_port
from charm_megatron.processes.start import Report, start_rank

pytestmark = pytest.mark.pure


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_a_callers_mistake_keeps_its_sentence() -> None:
    failure = failure_of(raised(ConfigError("a value\nis wrong")))
    assert (failure.message, failure.is_invalid_input) == ("a value is wrong", True)


def test_another_exception_is_named() -> None:
    failure = failure_of(raised(RuntimeError("it broke")))
    assert (failure.message, failure.is_invalid_input) == ("RuntimeError: it broke", False)


def test_a_bare_assertion_says_what_does_not_hold() -> None:
    two = 2
    with pytest.raises(AssertionError) as caught:
        exec(compile("assert two < 1", __file__, "exec"), {"two": two})
    assert reason(AssertionError("some words")) == "some words"
    assert reason(caught.value).endswith("does not hold")


def test_a_rank_finds_its_place_in_the_environment() -> None:
    placement = RankPlacement(rank=3, world_size=8, local_rank=1, local_world_size=2)
    variables = placement.variables("127.0.0.1", 1234)
    assert (variables["RANK"], variables["LOCAL_RANK"], variables["MASTER_PORT"]) == ("3", "1", "1234")
    assert launched_rank(variables) == placement
    assert is_rank(variables)
    assert is_later_rank(variables)
    assert not is_later_rank({**variables, "RANK": "0"})


def test_a_process_that_no_launcher_started_is_no_rank() -> None:
    assert launched_rank({"WORLD_SIZE": "4"}) is None
    assert not is_rank({"WORLD_SIZE": "4"})
    assert launched_rank({"RANK": "0", "WORLD_SIZE": "4"}) == RankPlacement(0, 4, 0, 1)
    with pytest.raises(TopologyError, match="must be numbers of ranks, but are many and 1"):
        launched_rank({"RANK": "0", "WORLD_SIZE": "many"})
    with pytest.raises(TopologyError, match="RANK and LOCAL_RANK must be numbers, but are first and 0"):
        launched_rank({"RANK": "first", "WORLD_SIZE": "4"})


def test_cores_are_shared_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_per_rank(10_000) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_rank(10_000) == 3


def test_ports_are_free_and_logs_may_be_missing(tmp_path: Path) -> None:
    assert 1024 <= free_port() < 65536
    assert last_lines_of(tmp_path / "missing.log") == ""
    (tmp_path / "log").write_text("one\ntwo\nthree\n")
    assert last_lines_of(tmp_path / "log", 2) == "  two\n  three"


# ---------------------------------------------------------------------- ranks


def run(function: Callable[..., Any], num_ranks: int, **settings: Any) -> list[Any]:
    """What the ranks return, and in front of it what they reported."""
    reports: list[Any] = []
    ranks = run_to_end(
        lambda rank: start_rank(rank, function, (rank,)),
        range(num_ranks),
        lambda rank, report: reports.append((rank, report)),
        **settings,
    )
    return [sorted(reports), *(rank.result for rank in ranks)]


def is_gone(pid: int) -> bool:
    """A process that is dead and waits for its parent to hear of it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def square(report: Report, rank: int) -> int:
    report("began")
    return rank**2


def test_ranks_report_and_return() -> None:
    assert run(square, 3) == [[(0, "began"), (1, "began"), (2, "began")], 0, 1, 4]


def test_a_rank_that_is_killed_is_blamed_before_one_that_raised_and_is_named_with_the_signal() -> None:
    def fail(report: Report, rank: int) -> None:
        if rank == 0:
            raise ConnectionError("the peer is gone")
        if rank == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(LaunchError, match=r"^rank 1 failed: killed by SIGKILL$"):
        run(fail, 3)


@dataclass(eq=False)
class Waits:
    """Something that a rank does."""

    standing: Standing


def test_a_link_that_the_kernel_gives_up_a_little_later_is_blamed_before_the_rank_that_waited_for_it() -> (
    None
):
    """Rank 0 waits in attention for rank 1, and that one in a collective of the model for rank 2."""

    def fail(report: Report, rank: int) -> None:
        if rank == 0:
            waits = Exchange((0, 1, 2), (0, 0, 0), (0, 1, 0), Waiting(1, True, 0, "kv1"))
            waiting = Waits(Standing("in charm forward", 3.0, (waits,)))
            watch(waiting)
            raise TransferTimeout("gave up a transfer from rank 1")
        if rank == 1:
            time.sleep(GATHER_S + 1)
            raise RuntimeError("[10.0.0.3]:4000: Connection timed out")
        watch_addresses(["10.0.0.3:4000"])
        time.sleep(600)

    with pytest.raises(LaunchError, match=r"^the link between ranks 1 and 2 does not carry: the kernel"):
        run(fail, 3)


def test_the_first_that_raised_is_blamed_with_its_traceback() -> None:
    def fail(report: Report, rank: int) -> None:
        time.sleep(0.3 * (2 - rank))
        raise RuntimeError(f"no luck on {rank}")

    with pytest.raises(LaunchError, match=r"(?s)^rank 1 failed: RuntimeError: no luck on 1\nTraceback"):
        run(fail, 2)


def test_a_mistake_of_the_caller_that_a_rank_finds_is_one_sentence() -> None:
    def refuse(report: Report, rank: int) -> None:
        raise ConfigError("a value is wrong")

    with pytest.raises(InvalidInput) as caught:
        run(refuse, 2)
    assert str(caught.value) == "a value is wrong"


def test_a_rank_that_ends_before_it_has_finished_has_failed_whatever_its_code() -> None:
    with pytest.raises(LaunchError, match="rank 0 failed: ended with code 0"):
        run(lambda report, rank: os._exit(0), 1)


def test_ranks_that_do_not_end_are_named_and_ended() -> None:
    pids: list[int] = []

    def start(rank: int) -> Any:
        started = start_rank(rank, lambda report: time.sleep(600 if rank else 0))
        pids.append(started.pid)
        return started

    with pytest.raises(TransferTimeout, match=r"ranks 1 have not ended after 0\.5 s"):
        run_to_end(start, range(2), lambda rank, report: None, timeout_s=0.5)
    assert all(map(is_gone, pids))


def test_what_a_rank_has_started_ends_with_it() -> None:
    def start_child(report: Report, rank: int) -> None:
        if (pid := os.fork()) == 0:
            time.sleep(600)
        report(pid)

    ((_, child),) = run(start_child, 1)[0]
    deadline_s = time.monotonic() + 10
    while not is_gone(child):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_ranks_that_have_finished_may_end_as_they_like_where_that_is_said() -> None:
    def end_badly(report: Report) -> int:
        return 7

    def start(rank: int) -> Any:
        return start_rank(rank, end_badly, leave=lambda: os._exit(3))

    (rank,) = run_to_end(start, [0], lambda rank, report: None, leave_s=5)
    assert rank.result == 7
    with pytest.raises(LaunchError, match="rank 0 failed: ended with code 3"):
        run_to_end(start, [0], lambda rank, report: None)


def test_the_log_of_a_rank_that_failed_is_shown(tmp_path: Path) -> None:
    def fail(report: Report) -> None:
        os.write(1, b"last words\n")  # not print(), whose output pytest keeps
        raise RuntimeError("no luck")

    log = tmp_path / "rank0.log"
    with pytest.raises(LaunchError) as caught:
        run_to_end(lambda rank: start_rank(rank, fail, log=log), [0], lambda rank, report: None)
    assert str(caught.value).splitlines() == [
        "rank 0 failed: RuntimeError: no luck",
        f"last lines of {log}:",
        "  last words",
    ]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "ended with code 3"),
        (-9, "killed by SIGKILL"),
        (-11, "killed by SIGSEGV"),
        (-40, "killed by signal 40"),
    ],
)
def test_an_exit_code_is_said_in_words(code: int, words: str) -> None:
    assert ending(code) == words


def test_ranks_must_be_told_where_they_meet() -> None:
    require_meeting_point({"MASTER_ADDR": "node0", "MASTER_PORT": "29500"})
    with pytest.raises(TopologyError, match="but not MASTER_PORT, which say where rank 0 listens"):
        require_meeting_point({"MASTER_ADDR": "node0"})
    for port in ("0", "65536", "²", "first"):
        with pytest.raises(TopologyError, match="MASTER_PORT must be a number from 1 to 65535"):
            require_meeting_point({"MASTER_ADDR": "node0", "MASTER_PORT": port})


def test_several_tasks_of_srun_are_not_several_launchers() -> None:
    step = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}
    require_single_task({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})  # the script of a job
    require_single_task({**step, "SLURM_STEP_NUM_TASKS": "1"})  # the shell of salloc
    for environment in (step, {**step, "SLURM_STEP_NUM_TASKS": "2"}):
        with pytest.raises(TopologyError, match="of this program, and each would start all ranks"):
            require_single_task(environment)


@pytest.mark.parametrize("text", ["²", "٣", "-1", "", "1" * 5000, "two"])
def test_what_is_no_number_of_ranks_is_refused(text: str) -> None:
    with pytest.raises(TopologyError, match="must be numbers of ranks"):
        launched_rank({"RANK": "0", "WORLD_SIZE": text})
    with pytest.raises(TopologyError, match="RANK and LOCAL_RANK must be numbers"):
        launched_rank({"RANK": text, "WORLD_SIZE": "2"})


def test_a_thread_count_that_is_no_number_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "²")
    assert threads_per_rank(10_000) == 1
