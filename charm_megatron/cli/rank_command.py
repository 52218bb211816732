"""A command whose process may be one of many ranks: what is wrong with it is said once.

Every rank finds the same fault before ranks talk to each other. Rank 0 says so and ends; torchrun, and srun on other
nodes, then end the rest. A rank that ended sooner would have rank 0 ended before it has spoken: hence later ranks wait.
One that is still there speaks itself, as the fault may be its own.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import typer
from typer.core import TyperCommand

from charm_megatron.errors import InvalidInput
from charm_megatron.processes.environment import is_later_rank

RANK_0_SPEAKS_S = 30.0
"""More than the ranks of a job are apart when they have imported torch."""


class RankCommand(TyperCommand):
    """Reads the command line; options that do not exist are what rank 0 complains of."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _rank_0_first(Exception):
            return super().make_context(*args, **kwargs)


def after_rank_0[**Arguments, Result](command: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The same command, in which later ranks keep `InvalidInput` until rank 0 has raised it too."""

    @wraps(command)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with _rank_0_first(InvalidInput):
            return command(*args, **kwargs)

    return run


@contextmanager
def _rank_0_first(fault: type[Exception]) -> Iterator[None]:
    try:
        yield
    except typer.Exit:  # --help
        raise
    except fault:
        if is_later_rank(os.environ):
            time.sleep(RANK_0_SPEAKS_S)
        raise
