"""Bytes and schedule go where Megatron logs its own numbers."""

import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import megatron.training  # noqa: F401  # what is replaced below
import pytest

from charm_megatron.mcore.bridge import Notices, SplitAttention
from charm_megatron.mcore.logger import TRAINING_LOG, numbers_in_megatron_logs
from charm_megatron.mcore.monkeypatch import resolve

pytestmark = pytest.mark.megatron


def test_bytes_of_an_iteration_and_the_schedule_are_written() -> None:
    attention = SplitAttention(
        SimpleNamespace(num_bytes_sent_to_all=0, exposed_s=0.0, time_waits=lambda: None)
    )  # type: ignore[arg-type]
    attention.schedule_name = "charm"
    tensorboard, wandb, original = mock.Mock(), mock.Mock(), mock.Mock(return_value="report")
    module, name = resolve(TRAINING_LOG)
    original = functools.wraps(getattr(module, name))(original)
    with (
        mock.patch.object(module, name, original),
        mock.patch("megatron.training.get_args", return_value=SimpleNamespace(tensorboard_log_interval=2)),
        mock.patch("megatron.training.global_vars.get_tensorboard_writer", return_value=tensorboard),
        mock.patch("megatron.training.global_vars.get_wandb_writer", return_value=wandb),
        numbers_in_megatron_logs(attention),
    ):
        for iteration in (1, 2, 3, 4):
            attention.runtime.num_bytes_sent_to_all += 100 * iteration  # type: ignore[misc]
            attention.runtime.exposed_s += 0.5  # type: ignore[misc]
            assert call(getattr(module, name), iteration) == "report"
    sent, exposed = "charm/bytes-sent-per-iteration", "charm/exposed-communication-s-per-iteration"
    assert tensorboard.add_scalar.call_args_list == [
        mock.call(sent, 150.0, 2),
        mock.call(exposed, 0.5, 2),
        mock.call(sent, 350.0, 4),
        mock.call(exposed, 0.5, 4),
    ]
    tensorboard.add_text.assert_called_once_with("charm/schedule", "charm", 2)
    assert wandb.log.call_args_list == [
        mock.call({sent: value, exposed: 0.5, "charm/schedule": "charm"}, iteration)
        for value, iteration in ((150.0, 2), (350.0, 4))
    ]
    assert original.call_count == 4


def test_another_training_loop_is_left_alone() -> None:
    said: list[str] = []
    attention = SplitAttention(SimpleNamespace(time_waits=lambda: None), Notices(said.append))  # type: ignore[arg-type]
    with (
        mock.patch("charm_megatron.mcore.logger.TRAINING_LOG", "megatron.training.training:absent"),
        numbers_in_megatron_logs(attention),
    ):
        pass
    assert len(said) == 1
    assert said[0].startswith(
        "charm-megatron: bytes and schedule are not in Megatron's logs: megatron.training"
    )


def call(training_log: Any, iteration: int) -> Any:
    """As the training loop calls it, in Megatron 0.19."""
    return training_log(
        {}, {}, 0.1, iteration, 1.0, False, 0, None, None, None, None, is_first_iteration=False
    )
