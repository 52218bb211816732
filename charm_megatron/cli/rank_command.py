"""A command whose process may be one of many ranks: what is wrong with it is said once.

Every rank finds the same fault before ranks talk to each other. Rank 0 says so and ends; torchrun, and srun on other
nodes, then end the rest. A rank that ended sooner would have rank 0 ended before it has spoken: hence later ranks wait.
One that is still there speaks itself, since the fault may be its own.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand

from charm_megatron.errors import InvalidInput
from charm_megatron.processes.environment import is_later_rank

RANK_0_SPEAKS_S = 30.0
"""More than the ranks of a job are apart when they have imported torch."""


class RankCommand(TyperCommand):
    """A command in which later ranks keep to themselves what is wrong until rank 0 has said it."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Reads the command line, with options that may not exist."""
        with _rank_0_first(Exception):
            return super().make_context(*args, **kwargs)

    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the command."""
        with _rank_0_first(InvalidInput):
            return super().invoke(*args, **kwargs)


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
