"""What is checked on a card can be checked on a CPU as well; whatever fails is a row that says why."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from charm_megatron.bench import card, card_group, card_parts, nccl_ranks
from charm_megatron.bench.card_group import waiting_row
from charm_megatron.bench.nccl_ranks import WAYS, Group, error_of_group, row_of
from charm_megatron.cli.main import app
from charm_megatron.errors import TransferTimeout

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]


def test_everything_is_right_on_a_cpu_and_is_written_down(tmp_path):
    done = subprocess.run(
        [ROOT / "scripts/gpu-check", tmp_path / "card.json"],
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "card.json").read_text("utf-8"))
    assert record["card"] == "CPU"
    checks = {row["check"] for row in record["rows"]}
    assert checks == {
        "kernel errors",
        "kernel speed",
        "elementwise speed",
        "loopback",
        "host",
        "stream fuzz",
        "synchronisation",
        "nccl ranks",
        "saved memory",
    }
    figures = [row for row in record["rows"] if row["check"] == "host"]
    assert len(figures) == 8  # times and launches of two schedules in both directions
    assert all(row["value"] > 0 for row in figures)
    absent = [row for row in record["rows"] if row["note"] == "not on a CPU"]
    assert {row["check"] for row in absent} == {"stream fuzz", "synchronisation", "nccl ranks"}
    assert all(row["value"] is None for row in absent)
    limited = [row for row in record["rows"] if row["limit"] is not None]
    assert len(limited) > 10
    assert all(0 <= row["value"] <= row["limit"] for row in limited)


def test_a_check_that_fails_says_why_and_the_others_run(monkeypatch):
    def fail(*args):
        raise RuntimeError("no such operator")

    for module in (card, card_group):
        monkeypatch.setattr(module, "chosen_kernel", fail)
    rows = list(card.check_card(torch.device("cpu")))
    failed = [row for row in rows if row.what == card_parts.FAILED]
    assert {row.check for row in failed} == {"kernel errors", "kernel speed", "loopback"}
    assert all(row.note == "RuntimeError: no such operator" for row in failed)
    assert any(row.check == "elementwise speed" for row in rows)
    result = CliRunner().invoke(app, ["bench", "card", "--device", "cpu"])
    assert result.exit_code == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_card_that_is_not_there_is_one_sentence():
    result = CliRunner().invoke(app, ["bench", "card", "--device", "cuda"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "--device cpu runs the same checks" in result.stderr


@pytest.fixture
def sync_modes(monkeypatch):
    """What `set_sync_debug_mode` was called with, without a GPU."""
    modes = [0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return modes


def test_a_call_that_makes_the_host_wait_is_named_and_the_mode_is_put_back(sync_modes):
    def waits():
        if sync_modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    row = waiting_row("what", waits)
    assert (row.value, row.is_right) == (1, False)
    assert row.note.startswith("RuntimeError: called a synchronizing CUDA operation, in card_group.py:")
    assert sync_modes == [0, "error", 0]
    row = waiting_row("what", lambda: None)
    assert (row.value, row.is_right, row.note) == (0, True, "")
    assert sync_modes == [0, "error", 0, "error", 0]


def test_another_failure_is_not_taken_for_a_wait(sync_modes):
    def fails():
        if sync_modes[-1] == "error":
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        waiting_row("what", fails)
    assert sync_modes == [0, "error", 0]


class Profile:
    """What a profiler of a GPU has seen."""

    def __init__(self, events):
        self._events = events

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def events(self):
        return self._events


@pytest.mark.parametrize(
    ("num_kernels", "expected"),
    [(2, 2), (0, "the profiler saw no kernel (CUPTI); the driver may show them to root only")],
)
def test_launches_on_a_gpu_are_the_kernels_that_its_profiler_saw(monkeypatch, num_kernels, expected):
    kind = torch.autograd.DeviceType

    def event(device_type, name, is_user_annotation=False):
        return SimpleNamespace(device_type=device_type, name=name, is_user_annotation=is_user_annotation)

    events = [event(kind.CUDA, "flash_fwd_kernel")] * num_kernels
    events += [event(kind.CUDA, "attend 0.1", is_user_annotation=True), event(kind.CUDA, "Context Sync")]
    events += [event(kind.CPU, "cudaLaunchKernel")]
    monkeypatch.setattr(
        torch.profiler, "supported_activities", lambda: {torch.profiler.ProfilerActivity.CUDA}
    )
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: Profile(events))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    plan = card_group._plan("charm", 4, 16)
    for direction in card.DIRECTIONS:
        assert card_group._launches_on(torch.device("cpu"), plan, direction) == expected


def test_a_profiler_that_sees_no_gpu_is_said_to_be_the_reason():
    if torch.profiler.ProfilerActivity.CUDA in torch.profiler.supported_activities():
        pytest.skip("this torch's profiler sees GPUs")
    found = card_group._launches_on(torch.device("cpu"), card_group._plan("ring", 4, 16), card.DIRECTIONS[0])
    assert found == "this torch's profiler does not see GPUs (CUPTI)"


def test_ranks_in_processes_of_their_own_talk_and_give_the_error_of_attention():
    talking = set()
    worst = error_of_group({}, Group("cpu", 2, 16, 60.0), talking)
    assert 0 < worst < card_parts.ERROR_LIMIT
    assert talking == {0, 1}


def test_ranks_that_hang_are_ended_and_ranks_that_fail_show_their_last_words():
    row = row_of("late", {}, Group("cpu", 2, 16, 0.2))
    assert (row.value, row.is_right) == (None, True)
    assert row.note == "ranks 0, 1 have not ended after 0.2 s"
    row = row_of("no Python", {"PYTHONINTMAXSTRDIGITS": f"rank{nccl_ranks.RANK}"}, Group("cpu", 1, 16, 60.0))
    assert (row.value, row.is_right) == (None, True)
    assert row.note.startswith("rank 0 failed: ended with code 1; its last lines: ")
    assert "PYTHONINTMAXSTRDIGITS" in row.note


def test_a_rank_says_in_a_line_what_nccl_says_in_many(monkeypatch, capsys):
    def refuses(*args):
        raise RuntimeError(
            "NCCL error, invalid usage\nLast error:\nDuplicate GPU detected : rank 1 and rank 0"
        )

    codes = []
    monkeypatch.setattr(nccl_ranks, "_attention", refuses)
    monkeypatch.setattr(nccl_ranks.os, "_exit", codes.append)
    monkeypatch.setattr(nccl_ranks.sys, "argv", ["nccl_ranks", "cuda", "16", "60"])
    nccl_ranks.main()
    said = "RuntimeError: NCCL error, invalid usage Last error: Duplicate GPU detected : rank 1 and rank 0\n"
    assert (codes, capsys.readouterr()) == ([1], ("", said))


@pytest.mark.parametrize(("num_talking", "is_right"), [(1, True), (2, False)])
def test_ranks_that_talk_and_then_fail_are_wrong_and_those_that_never_talk_are_not(
    monkeypatch, num_talking, is_right
):
    def fails(variables, group, talking):
        talking.update(range(num_talking))
        raise TransferTimeout("ranks 0, 1 have not ended after 60 s")

    monkeypatch.setattr(nccl_ranks, "error_of_group", fails)
    row = row_of("what", {}, Group("cuda", 2, 16, 60.0))
    assert (row.value, row.is_right) == (None, is_right)
    assert row.note.endswith("ranks 0, 1 have not ended after 60 s")


def test_each_way_to_share_a_card_is_tried_with_its_variables(monkeypatch):
    tried = []
    monkeypatch.setattr(nccl_ranks, "row_of", lambda *args: tried.append(args))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    list(nccl_ranks.nccl_ranks(torch.device("cuda"), card_parts.ON_GPU))
    assert [variables for _, variables, _ in tried] == [*WAYS.values()]
    assert sum(group.limit_s for *_, group in tried) <= 120
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    rows = list(nccl_ranks.nccl_ranks(torch.device("cuda"), card_parts.ON_GPU))
    assert [row.note for row in rows] == ["this torch has no NCCL"] * len(WAYS)
