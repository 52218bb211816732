"""The work between blocks, by torch's operators and by Triton's kernels, against float64."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from charm_megatron.kernels.elementwise import TorchElementwise, select_elementwise
from tests.kernels import triton_cases

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]


def run_cases(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton_cases", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_near(found):
    assert len(found) > 200
    far = {name: pair for name, pair in found.items() if not pair[0] <= pair[1]}
    assert not far


def test_tritons_kernels_are_right_in_its_interpreter():
    assert_near(run_cases())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tritons_kernels_are_right_on_a_gpu():
    assert_near(run_cases("--device", "cuda"))


@pytest.mark.parametrize("dtype", list(triton_cases.STEP), ids=str)
@pytest.mark.parametrize(
    "case",
    [
        triton_cases.merged,
        triton_cases.added,
        triton_cases.placed,
        triton_cases.dotted,
        triton_cases.stood_in,
    ],
)
def test_torchs_operators_are_right(case, dtype):
    torch.manual_seed(0)
    for name, error, largest in case(TorchElementwise(), 5, 2, 3, 16, dtype, torch.device("cpu")):
        assert error <= triton_cases.STEP[dtype] * max(largest, 1e-3), name


def test_a_cpu_gets_torchs_operators():
    chosen = select_elementwise(torch.device("cpu"))
    assert isinstance(chosen.implementation, TorchElementwise)
    assert chosen.reason == "torch, as on every cpu"


def test_triton_that_does_not_work_is_passed_over_with_the_reason():
    """There is no such device here, as little as there may be a compiler elsewhere."""
    if torch.cuda.is_available():
        pytest.skip("Triton works here")
    chosen = select_elementwise(torch.device("cuda"))
    assert isinstance(chosen.implementation, TorchElementwise)
    assert chosen.reason.startswith("torch, some launches each, because Triton fails: ")
