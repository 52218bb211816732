"""Our numbers in Megatron's own logs: its TensorBoard and W&B writers, where they are on.

Both exist on the last rank only, so the bytes are those that this rank has sent, and exposed communication is the
time that it has stood still for transfers.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from charm_megatron.mcore.bridge import SplitAttention
from charm_megatron.mcore.monkeypatch import MissingTarget, wrapped

TRAINING_LOG = "megatron.training.training:training_log"
BYTES, SCHEDULE = "charm/bytes-sent-per-iteration", "charm/schedule"
EXPOSED = "charm/exposed-communication-s-per-iteration"


@contextmanager
def numbers_in_megatron_logs(attention: SplitAttention) -> Iterator[None]:
    """Adds to what Megatron's training loop logs inside the block; to nothing where there is no such loop."""
    with ExitStack() as stack:
        attention.runtime.time_waits()
        try:
            stack.enter_context(wrapped(TRAINING_LOG, functools.partial(_with_numbers, attention)))
        except MissingTarget as error:
            reason = str(error)
            attention.notices.once(
                "log", lambda: [f"bytes and schedule are not in Megatron's logs: {reason}"]
            )
        yield


def _with_numbers(attention: SplitAttention, training_log: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(training_log)
    before = _Totals(0, 0, 0.0)

    @functools.wraps(training_log)
    def logged(*args: Any, **kwargs: Any) -> Any:
        nonlocal before
        result = training_log(*args, **kwargs)
        from megatron.training import get_args
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        iteration = signature.bind(*args, **kwargs).arguments["iteration"]
        if attention.schedule_name is None or iteration % get_args().tensorboard_log_interval:
            return result
        now = _Totals(iteration, attention.runtime.num_bytes_sent_to_all, attention.runtime.exposed_s)
        numbers = now.per_iteration_since(before)
        if writer := get_tensorboard_writer():
            for name, value in numbers.items():
                writer.add_scalar(name, value, iteration)
            if not before.iteration:
                writer.add_text(SCHEDULE, attention.schedule_name, iteration)
        if wandb := get_wandb_writer():
            wandb.log({**numbers, SCHEDULE: attention.schedule_name}, iteration)
        before = now
        return result

    return logged


@dataclass(frozen=True)
class _Totals:
    """What has been counted up to an iteration."""

    iteration: int
    num_bytes_sent: int
    exposed_s: float

    def per_iteration_since(self, before: "_Totals") -> dict[str, float]:
        """The numbers to log, by name."""
        iterations = max(1, self.iteration - before.iteration)
        return {
            BYTES: (self.num_bytes_sent - before.num_bytes_sent) / iterations,
            EXPOSED: (self.exposed_s - before.exposed_s) / iterations,
        }
