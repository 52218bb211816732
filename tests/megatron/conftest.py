"""Runs the product's own `run_pretrain`; Megatron is imported once, by the server that forks the ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from charm_megatron.config import parse_run_config
from charm_megatron.mcore.compat import require_pretraining
from charm_megatron.train.pretrain import run_pretrain
from charm_megatron.train.run_folder import RunFolder
from tests.megatron.small_run import BASE, GQA, Run, Silent, Train, Values


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Trains the small model; without Megatron the tier fails, it does not skip."""
    require_pretraining()

    def run(
        cp_size: int = 1,
        charm: Values | None = None,
        megatron: Values | None = None,
        *,
        ranks: int | None = None,
        out: Path | None = None,
        resume: bool = False,
    ) -> Run:
        path = out or tmp_path_factory.mktemp("runs") / "run"
        values = {
            "launch": {"ranks": ranks or cp_size},
            "charm": charm or {},
            "megatron": {**BASE, "context_parallel_size": cp_size, **(megatron or {})},
        }
        run_pretrain(parse_run_config(values, "test"), path, resume, Silent())
        return Run(RunFolder(path))

    return run


@pytest.fixture(scope="session")
def reference(train: Train) -> Callable[[bool], Run]:
    """The same training on one rank with Megatron's own attention, with grouped query heads or without."""
    done: dict[bool, Run] = {}

    def of(grouped: bool) -> Run:
        if grouped not in done:
            done[grouped] = train(megatron=GQA if grouped else {})
        return done[grouped]

    return of
