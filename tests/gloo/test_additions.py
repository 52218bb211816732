"""What CONTRIBUTING promises: a planner is one file, a kernel one file and one line, a profile one YAML file."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import charm_megatron

pytestmark = pytest.mark.gloo

PLANNER = """
from charm_megatron.lowering.decisions import Decisions, Method, one_phase, shard_routes
from charm_megatron.planner.common import as_planner, owner_is_q_home
from charm_megatron.schedule.problem import Problem


@as_planner("a test", "KV circulates against the usual direction")
def backward_ring(problem: Problem) -> Method:
    n = problem.cp_size
    paths = [[(rank - hop) % n for hop in range(n)] for rank in range(n)]
    routes = (shard_routes(problem, "kv", paths, range(n - 1)),)
    return one_phase(Decisions(problem, owner_is_q_home(problem), routes))
"""

KERNEL = """
from charm_megatron.kernels.reference import ReferenceKernel


class PlainKernel(ReferenceKernel):
    name = "plain"
"""
KERNEL_LINE = "    ReferenceKernel(),\n"
KERNEL_IMPORT = "from charm_megatron.kernels.reference import ReferenceKernel\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package; gives the folder to put on PYTHONPATH."""
    shutil.copytree(Path(charm_megatron.__file__).parent, tmp_path / "charm_megatron")
    return tmp_path


def run(package: Path, *args: str) -> str:
    result = subprocess.run(
        [sys.executable, *args],
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_planner_is_one_file(package: Path) -> None:
    (package / "charm_megatron/planner/backward_ring.py").write_text(PLANNER, "utf-8")
    shown = run(
        package, "-m", "charm_megatron", "plan", "--schedule", "backward_ring", "--ranks-per-node", "4"
    )
    assert "backward_ring forward" in shown
    proved = run(package, "-m", "charm_megatron", "check", "backward_ring", "--ranks-per-node", "4")
    assert "backward_ring is right" in proved


def test_a_kernel_is_one_file_and_one_line(package: Path) -> None:
    (package / "charm_megatron/kernels/plain.py").write_text(KERNEL, "utf-8")
    selector = package / "charm_megatron/kernels/select.py"
    text = selector.read_text("utf-8")
    assert text.count(KERNEL_LINE) == text.count(KERNEL_IMPORT) == 1
    text = text.replace(KERNEL_LINE, "    PlainKernel(),\n" + KERNEL_LINE)
    text = text.replace(
        KERNEL_IMPORT, KERNEL_IMPORT + "from charm_megatron.kernels.plain import PlainKernel\n"
    )
    selector.write_text(text, "utf-8")
    code = (
        "import torch; from charm_megatron.kernels import BlockSizes, select_kernel;"
        "print(select_kernel('plain', BlockSizes('cpu', torch.float32, 8, 8)).reason)"
    )
    assert run(package, "-c", code) == "plain, because the setting names it\n"


def test_a_profile_is_one_file(package: Path) -> None:
    shipped = package / "charm_megatron/testbed/profiles"
    text = (shipped / "flat_8.yaml").read_text("utf-8")
    (shipped / "flat_copy.yaml").write_text(text, "utf-8")
    code = (
        "from charm_megatron.testbed.profile import load_profile; print(load_profile('flat_copy').num_ranks)"
    )
    assert run(package, "-c", code) == "8\n"


def test_a_planner_of_another_package_is_found_by_its_entry_point(tmp_path: Path) -> None:
    (tmp_path / "their_package.py").write_text(PLANNER, "utf-8")
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n", "utf-8")
    entry = "[charm_megatron.planners]\nbackward_ring = their_package:backward_ring\n"
    (info / "entry_points.txt").write_text(entry, "utf-8")
    root = Path(charm_megatron.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    command = ["-m", "charm_megatron", "plan", "--schedule", "backward_ring", "--ranks-per-node", "2"]
    result = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )
    assert "backward_ring forward" in result.stdout, result.stderr
