"""Ports where ranks meet."""

import socket


def free_port() -> int:
    """Returns a TCP port of this machine that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
