"""Removes a test network when its owner ends without doing so itself, as after SIGKILL.

Run as a process of its own, in a session of its own: `python -m charm_megatron.testbed.watchdog NETWORK PID START`.
Should it be killed as well, the next `up` or `down` of anyone removes what is left.
"""

import os
import select
import sys
import time

from charm_megatron.testbed.namespaces import Owner, remove_networks

NUM_ROUNDS, ROUND_S = 3, 0.3
"""A command that the owner had started may still add to the network after its end."""


def main() -> None:
    """Waits for the end of the owner."""
    network, pid, start = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    wait_for_end(Owner(pid, start))
    for _ in range(NUM_ROUNDS):
        remove_networks([network])
        time.sleep(ROUND_S)


def wait_for_end(owner: Owner) -> None:
    """Returns when the process is gone."""
    try:
        descriptor = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        return
    if owner.is_alive:  # else the number is another process's by now
        select.select([descriptor], [], [])
    os.close(descriptor)


if __name__ == "__main__":
    main()
