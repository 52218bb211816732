"""A model so small that a run takes seconds, and what to compare of two runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from charm_megatron.train.rank_job import RunEvent
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

    def notice(self, sentence: str) -> None:
        pass

    @contextmanager
    def training(self, first_iteration: int, last_iteration: int) -> Iterator[None]:
        yield

    def event(self, event: RunEvent) -> None:
        pass


Train = Callable[..., Run]


def assert_same_curve(run: Run, reference: Run, tolerance: float = 1e-5) -> None:
    """Loss, gradient norm and evaluation losses agree within `tolerance`, iteration by iteration."""
    for ours, theirs, keys in (
        (run.steps, reference.steps, ("loss", "grad_norm")),
        (run.evaluations, reference.evaluations, ("loss",)),
    ):
        assert [row["iteration"] for row in ours] == [row["iteration"] for row in theirs]
        for key in keys:
            expected = [row[key] for row in theirs]
            assert [row[key] for row in ours] == pytest.approx(expected, rel=0.0, abs=tolerance)
