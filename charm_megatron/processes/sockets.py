"""Connections that carry nothing are given up in time.

Gloo waits half an hour for a peer whose link is cut, and TCP itself would try for as long. The kernel can tell, both
of data that nobody acknowledges and of connections that are silent.
"""

import os
import socket
from contextlib import suppress
from pathlib import Path

from charm_megatron.liveness.process import watch_addresses

LATER_S = 2.0
"""Than the deadline of a transfer, which knows more of what was lost."""


def give_up_dead_links(deadline_s: float) -> int:
    """Ends each TCP connection that this process has now once its link has carried nothing for `deadline_s`.

    Both of its ends then fail with "Connection timed out", and this process is known by its addresses. Returns the
    number of connections.
    """
    limit_s = deadline_s + LATER_S
    probe_s = max(1, int(limit_s / 3))
    options = (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, min(probe_s, 32_000)),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, min(probe_s, 32_000)),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(int(limit_s * 1000), 2**31 - 1)),
    )
    addresses = []
    for connection in _connections():
        with connection, suppress(OSError):  # it has ended meanwhile
            for option in options:
                connection.setsockopt(*option)
            addresses.append(address_text(*connection.getsockname()[:2]))
    watch_addresses(addresses)
    return len(addresses)


def address_text(host: str, port: int | str) -> str:
    """As in "10.0.0.1:29500"; IPv4 also where a socket of IPv6 carries it."""
    return f"{host.removeprefix('::ffff:')}:{port}"


def _connections() -> list[socket.socket]:
    """Copies of this process's connected TCP sockets."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if path.readlink().name.startswith("socket:"):
                copy = socket.socket(fileno=os.dup(int(path.name)))
                if _is_tcp(copy):
                    found.append(copy)
                else:
                    copy.close()
    return found


def _is_tcp(one: socket.socket) -> bool:
    if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
        return False
    try:
        one.getpeername()
    except OSError:  # it listens
        return False
    return True
