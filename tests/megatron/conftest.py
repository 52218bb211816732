"""Runs the product's own `run_pretrain`; Megatron is imported once, by the server that forks the ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from charm_megatron.config import parse_run_config
from charm_megatron.mcore.compat import require_pretraining
from charm_megatron.train.pretrain import run_pretrain
from charm_megatron.train.rank import Event
from charm_megatron.train.run_folder import RunFolder, read_rows

Values = dict[str, Any]

BASE: Values = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 384,  # a multiple of 2 * cp_size for 2, 3 and 4
    "max_position_embeddings": 384,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "train_iters": 20,
    "lr": 1.0e-3,
    "min_lr": 1.0e-4,
    "lr_decay_style": "cosine",
    "clip_grad": 1.0,
    "eval_iters": 2,
    "eval_interval": 10,
}
GQA: Values = {"group_query_attention": True, "num_query_groups": 2}


@dataclass(frozen=True)
class Run:
    folder: RunFolder

    @property
    def steps(self) -> list[Values]:
        return read_rows(self.folder.metrics)

    @property
    def evaluations(self) -> list[Values]:
        return read_rows(self.folder.evaluation)


class Silent:
    """A view that shows nothing."""

    def stage(self, text: str) -> None:
        pass

    @contextmanager
    def training(self, first_iteration: int, last_iteration: int) -> Iterator[None]:
        yield

    def event(self, event: Event) -> None:
        pass


Train = Callable[..., Run]


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


def assert_same_curve(run: Run, reference: Run, tolerance: float = 1e-5) -> None:
    """Loss, gradient norm and evaluation losses agree within `tolerance`, iteration by iteration."""
    for ours, theirs, keys in (
        (run.steps, reference.steps, ("loss", "grad_norm")),
        (run.evaluations, reference.evaluations, ("loss",)),
    ):
        assert [row["iteration"] for row in ours] == [row["iteration"] for row in theirs]
        for key in keys:
            expected = [row[key] for row in theirs]
            assert [row[key] for row in ours] == pytest.approx(expected, rel=tolerance, abs=tolerance)
