"""Our numbers in Megatron's own logs: its TensorBoard and W&B writers, where they are on.

Both exist on the last rank only, so the bytes are those that this rank has sent.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from charm_megatron.mcore.shared import SplitAttention
from charm_megatron.mcore.swap import MissingTarget, wrapped

TRAINING_LOG = "megatron.training.training:training_log"
BYTES, SCHEDULE = "charm/bytes-sent-per-iteration", "charm/schedule"


@contextmanager
def numbers_in_megatron_logs(attention: SplitAttention) -> Iterator[None]:
    """Adds to what Megatron's training loop logs inside the block; to nothing where there is no such loop."""
    with ExitStack() as stack:
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
    sent_before, iteration_before = 0, 0

    @functools.wraps(training_log)
    def logged(*args: Any, **kwargs: Any) -> Any:
        nonlocal sent_before, iteration_before
        result = training_log(*args, **kwargs)
        from megatron.training import get_args
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        iteration = signature.bind(*args, **kwargs).arguments["iteration"]
        if attention.schedule_name is None or iteration % get_args().tensorboard_log_interval:
            return result
        sent = attention.runtime.num_bytes_sent_to_all
        per_iteration = (sent - sent_before) / max(1, iteration - iteration_before)
        if writer := get_tensorboard_writer():
            writer.add_scalar(BYTES, per_iteration, iteration)
            if not sent_before:
                writer.add_text(SCHEDULE, attention.schedule_name, iteration)
        if wandb := get_wandb_writer():
            wandb.log({BYTES: per_iteration, SCHEDULE: attention.schedule_name}, iteration)
        sent_before, iteration_before = sent, iteration
        return result

    return logged
