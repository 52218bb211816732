"""How a rank ended: what it said of its failure, or what its exit code says."""

import signal
import time
import traceback
from dataclasses import dataclass

from charm_megatron.errors import InvalidInput

KILLED = frozenset(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS))
"""Exit codes of a process that the kernel or somebody else ended. SIGABRT is not one: gloo aborts a process whose
peer is gone."""


@dataclass(frozen=True)
class Failure:
    """Why a rank failed. `time_s` is the machine's monotonic clock."""

    message: str
    is_invalid_input: bool
    time_s: float
    traceback: str = ""
    """Of the exception that ended the rank, where one did."""


def failure_of(error: BaseException) -> Failure:
    """What a rank reports of the exception that ends it."""
    is_invalid_input = isinstance(error, InvalidInput)
    kind = "" if is_invalid_input else f"{type(error).__name__}: "
    lines = "".join(traceback.format_exception(error))
    return Failure(kind + reason(error), is_invalid_input, time.monotonic(), lines)


def failure_by_exit(exit_code: int) -> Failure:
    """The failure of a process that ended without reporting one: killed, or crashed outside Python."""
    return Failure(ending(exit_code), False, time.monotonic())


def ending(exit_code: int) -> str:
    """Returns "killed by SIGKILL" or "ended with code 1"; a negative code is the number of a signal."""
    if exit_code >= 0:
        return f"ended with code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # real-time signals have no names
        return f"killed by signal {-exit_code}"


def reason(error: BaseException) -> str:
    """What an exception says, in one line; of a bare `assert`, what it asserts."""
    words = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    if words or not frames:
        return words
    return f"{(frames[-1].line or '').removeprefix('assert ')} does not hold"
