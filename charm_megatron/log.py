"""Where lines of progress and notices go: a callback that takes one line, so that no room prints by itself."""

from collections.abc import Callable

Log = Callable[[str], None]
"""Takes one line, without its newline."""


def silent(line: str) -> None:
    """Drops the line."""
