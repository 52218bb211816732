"""Removes a test network when its owner ends without doing so itself, as after SIGKILL.

Run as a process of its own, in a session of its own: `python -m charm_megatron.bench.watchdog NETWORK PID START`.
Should it be killed as well, the next `up` or `down` of anyone removes what is left.
"""

import os
import select
import sys

from charm_megatron.bench.namespaces import Owner, networks, remove_networks


def main() -> None:
    """Waits for the end of the owner."""
    network, pid, start = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    wait_for_end(Owner(pid, start))
    if network in networks():
        remove_networks([network])


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
