"""Heartbeats: a thread of a rank that says what the rank does, as long as the rank lives."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from charm_megatron.liveness.process import standing_of_process
from charm_megatron.liveness.standing import Standing

PERIOD_S = 0.5
"""Between two heartbeats on one machine."""

SILENT_S = 2.5
"""Who has not been heard of for so long, when others have lost a peer, does not answer."""


@contextmanager
def heartbeats(beat: Callable[[Standing], None], period_s: float = PERIOD_S) -> Iterator[None]:
    """Calls `beat` at once and then once a period from a thread of its own, until the block ends.

    It ends sooner where `beat` raises OSError: nobody listens. A process that is stopped, or whose machine is gone,
    beats no longer. One that computes or waits does: torch releases Python's lock there.
    """
    ended = threading.Event()

    def run() -> None:
        while True:
            try:
                beat(_standing())
            except OSError:  # whoever listened is gone
                return
            if ended.wait(period_s):
                return

    thread = threading.Thread(target=run, name="heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _standing() -> Standing:
    """What this process does; of that nothing where it changes while it is read. It lives, and that counts more."""
    try:
        return standing_of_process()
    except RuntimeError:
        return Standing()
