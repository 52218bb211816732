"""What is checked on a card can be checked on a CPU as well; whatever fails is a row that says why."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from charm_megatron.bench import card
from charm_megatron.cli.main import app

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
    assert checks == {"kernel errors", "kernel speed", "elementwise speed", "loopback", "saved memory"}
    limited = [row for row in record["rows"] if row["limit"] is not None]
    assert len(limited) > 10
    assert all(0 <= row["value"] <= row["limit"] for row in limited)


def test_a_check_that_fails_says_why_and_the_others_run(monkeypatch):
    def fail(*args):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(card, "_chosen", fail)
    rows = list(card.check_card(torch.device("cpu")))
    failed = [row for row in rows if row.what == card.FAILED]
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
