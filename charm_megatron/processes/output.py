"""What a rank prints: sent to its log, and read back when it has failed."""

import os
import sys
from pathlib import Path

NUM_LINES = 15


def redirect_output(path: Path) -> None:
    """Sends what this process and its children print to `path`, also what is printed from C++."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    # A file is block-buffered by default; the last lines before a crash are the ones that matter.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def last_lines(text: str, num_lines: int = NUM_LINES) -> str:
    """The end of a text, indented."""
    return "\n".join(f"  {line}" for line in text.splitlines()[-num_lines:])


def last_lines_of(log: Path, num_lines: int = NUM_LINES) -> str:
    """The end of a log, indented; nothing where there is no log."""
    return last_lines(log.read_text("utf-8", errors="replace"), num_lines) if log.exists() else ""
