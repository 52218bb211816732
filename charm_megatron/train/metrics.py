"""Takes loss, gradient norm and evaluation loss out of Megatron's training loop, at full precision.

Megatron prints them rounded, and averaged over log intervals. Three functions of its training module see the
values themselves; they are wrapped for the length of a run, and called unchanged.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from charm_megatron.mcore.monkeypatch import wrapped

LOSS = "lm loss"
"""The name under which `job.loss_function` reports the loss to Megatron."""

TRAIN_STEP = "megatron.training.training:train_step"
TRAINING_LOG = "megatron.training.training:training_log"
EVALUATE = "megatron.training.training:evaluate"
EVALUATE_AND_PRINT = "megatron.training.training:evaluate_and_print_results"

Emit = Callable[[str, dict[str, Any]], None]


class Recorder:
    """Emits a "step" row per iteration, and an "evaluation" row per evaluation.

    Megatron has the loss on the ranks of the last pipeline stage only; use this on the last rank, as
    Megatron's own log does.
    """

    def __init__(self, emit: Emit, tokens_per_sample: int) -> None:
        self._emit = emit
        self._tokens_per_sample = tokens_per_sample
        self._step_time_s = 0.0
        self._evaluated = ("", 0)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Records what the training loop does inside the block."""
        wrappers: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
            TRAIN_STEP: self._timed_step,
            TRAINING_LOG: self._step_row,
            EVALUATE: self._evaluation_row,
            EVALUATE_AND_PRINT: self._evaluation_name,
        }
        with ExitStack() as stack:
            for target, wrap in wrappers.items():
                stack.enter_context(wrapped(target, wrap))
            yield

    def _timed_step(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            result = train_step(*args, **kwargs)
            self._step_time_s = time.perf_counter() - start_s
            return result

        return timed

    def _step_row(self, training_log: Callable[..., Any]) -> Callable[..., Any]:
        from megatron.training import get_args

        def logged(loss_dict: Any, *args: Any, **kwargs: Any) -> Any:
            row = self._row(loss_dict, get_args().consumed_train_samples, *args, **kwargs)
            result = training_log(loss_dict, *args, **kwargs)
            self._emit("step", row)
            return result

        return logged

    def _row(
        self,
        loss_dict: Mapping[str, Any],
        consumed_samples: int,
        total_loss_dict: Any,
        learning_rate: Any,
        iteration: int,
        loss_scale: Any,
        report_memory_flag: Any,
        skipped_iter: int,
        grad_norm: float | None,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """A row from the arguments of `training_log`. The loss of a skipped iteration is None."""
        return {
            "iteration": iteration,
            "loss": float(loss_dict[LOSS]) if LOSS in loss_dict and not skipped_iter else None,
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "step_time_s": self._step_time_s,
            "tokens": consumed_samples * self._tokens_per_sample,
        }

    def _evaluation_name(self, evaluate_and_print: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's prefix is "iteration 20", "iteration 20 on validation set" or "... on test set"."""

        def named(
            prefix: str, step: Any, data: Any, model: Any, iteration: int, *args: Any, **kwargs: Any
        ) -> Any:
            self._evaluated = ("test" if prefix.endswith("test set") else "validation", iteration)
            return evaluate_and_print(prefix, step, data, model, iteration, *args, **kwargs)

        return named

    def _evaluation_row(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            result = evaluate(*args, **kwargs)
            losses = result[0]
            if losses and LOSS in losses:
                part, iteration = self._evaluated
                self._emit("evaluation", {"iteration": iteration, "part": part, "loss": float(losses[LOSS])})
            return result

        return recorded
