"""The exceptions this package raises.

A caller's mistake is an `InvalidInput`: its message is one sentence that says what was wrong, the
value seen, and what would work. The command line prints it alone and exits with code 2. Everything
else under `CharmError` went wrong while running, and ends with code 1.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from reprlib import Repr

MOST_MESSAGE_CHARACTERS = 300
"""Of an `InvalidInput`: what a terminal shows at a glance."""
MOST_QUOTED_CHARACTERS = 80
MOST_WORD_CHARACTERS = 100
"""Longer words are like none that is known, and comparing them would take its time."""


class CharmError(Exception):
    """Root of every exception that this package raises on purpose."""


class InvalidInput(CharmError, ValueError):
    """The caller asked for something that cannot be done as asked.

    The message is one line, and its middle is left out where it would be longer than `MOST_MESSAGE_CHARACTERS`: what
    was wrong stands at the beginning, what would work at the end.
    """

    def __init__(self, message: str):
        super().__init__(shortened(message, MOST_MESSAGE_CHARACTERS))


class ConfigError(InvalidInput):
    """A configuration file or setting is not valid."""


class TopologyError(InvalidInput):
    """Ranks, domains and links do not fit together."""


class PlanError(InvalidInput):
    """A planner does not support the requested layout, mask or group."""


class WorkloadError(InvalidInput):
    """Tensor sizes do not fit the group, the layout or each other."""


class ScheduleFault(CharmError, ValueError):
    """A schedule is wrong; the message names the rank, the action and the piece of its first fault.

    `rank` and `step` say where, as far as that is known.
    """

    def __init__(self, message: str, rank: int | None = None, step: int | None = None):
        super().__init__(message)
        self.rank, self.step = rank, step


class ScheduleSyntaxError(InvalidInput):
    """The text form of a schedule cannot be read."""


class ScheduleDisagreement(CharmError, RuntimeError):
    """The ranks of a group hold different schedules or tensor sizes."""


class TransferTimeout(CharmError, RuntimeError):
    """A transfer did not finish before its deadline."""


class SelfCheckFailed(CharmError, RuntimeError):
    """The first use of a plan gave another result, or sent another number of bytes, than it should have."""


class LaunchError(CharmError, RuntimeError):
    """A rank of a job failed; the message says which one and where its log is."""


class NetworkFault(CharmError, RuntimeError):
    """A test network could not be made or removed; the message holds the command and what it said."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the known word closest to `word`, or the list of all known ones."""
    known = sorted(map(str, known))
    close = get_close_matches(word, known, n=1) if len(word) <= MOST_WORD_CHARACTERS else []
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def error_text(error: BaseException, most_characters: int) -> str:
    """As in "ImportError: no module named triton", in so many characters at most."""
    return shortened(f"{type(error).__name__}: {error}", most_characters)


def shortened(text: object, most: int) -> str:
    """`str(text)` on one line of at most `most` characters, ` .. ` in place of the middle of a longer one."""
    words = " ".join(str(text).split())
    if len(words) <= most:
        return words
    tail = (most - 4) // 3
    return f"{words[: most - 4 - tail]} .. {words[-tail:]}"


def quoted(value: object) -> str:
    """`repr(value)` for a message, however large the value is: long ones are cut before they are written out."""
    short = Repr()
    short.maxstring = short.maxother = short.maxlong = MOST_QUOTED_CHARACTERS
    try:
        return shortened(short.repr(value), MOST_QUOTED_CHARACTERS)
    except ValueError:  # an integer of more digits than Python writes
        return f"a {type(value).__name__} of very many digits"
