"""Runs a function on several ranks of this machine, over gloo."""

from collections.abc import Callable
from typing import Any

from charm_megatron.log import Log
from charm_megatron.processes.group import run_in_group


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 240) -> list[Any]:
    """Returns `function(rank, num_ranks, *args)` of every rank, run inside one gloo process group.

    A rank that raises fails the test with its traceback; ranks that outlast `timeout_s` are killed and fail it.
    """
    return run_in_group(_without_log, num_ranks, (function, args), timeout_s=timeout_s)


def _without_log(log: Log, rank: int, num_ranks: int, function: Callable[..., Any], args: Any) -> Any:
    return function(rank, num_ranks, *args)
