"""The examples run as their first lines say."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gloo

EXAMPLES = Path(__file__).parents[2] / "examples"
ON_RANKS = {"attention_in_torch.py": 2}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_runs(path: Path) -> None:
    ranks = ON_RANKS.get(path.name)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    result = subprocess.run(
        [sys.executable, *launcher, str(path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "largest difference" in result.stdout
