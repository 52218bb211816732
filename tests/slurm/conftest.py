"""One SLURM for all tests of the tier."""

import sys
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    made.environment |= {"PYTHON": sys.executable, "PYTHONWARNINGS": "ignore"}
    # A mistake of many shells; the scripts must not take it over.
    made.environment["MASTER_ADDR"] = "127.0.0.1"
    try:
        made.start()
        yield made
    finally:
        made.stop()
