"""How a rank ended: what it said of its failure, or what its exit code says."""

import re
import signal
import socket
import time
import traceback
from dataclasses import dataclass, field

from charm_megatron.errors import InvalidInput, TransferTimeout
from charm_megatron.liveness.process import standing_of_process
from charm_megatron.liveness.standing import Standing
from charm_megatron.processes.sockets import address_text

KILLED = frozenset(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS))
"""Exit codes of a process that the kernel or somebody else ended. SIGABRT is not one: gloo aborts a process whose
peer is gone."""


LOST_PEER = re.compile(
    "Connection (closed|reset) by peer|Connection timed out|Broken pipe|Timed out waiting|gloo.*[Tt]imed? ?out|"
    "Socket closed|NCCL.*(timeout|aborted|remote process exited)|killed by SIGABRT"
)
"""How gloo, NCCL and torch's store say that a peer does not answer, or is gone; gloo also aborts its process."""

DEAD_LINK = re.compile(r"\[([^\]\s]+)\]:(\d+): Connection timed out")
"""How gloo says that the kernel gave a connection up: with the address of the other end."""


@dataclass(frozen=True)
class Failure:
    """Why a rank failed. `time_s` is the machine's monotonic clock."""

    message: str
    is_invalid_input: bool
    time_s: float
    traceback: str = ""
    """Of the exception that ended the rank, where one did."""
    standing: Standing = field(default_factory=Standing)
    """What it did then."""

    @property
    def is_lost_peer(self) -> bool:
        """Whether it follows from what another rank, or a link, has done."""
        return bool(LOST_PEER.search(self.message)) or self.message.startswith(TransferTimeout.__name__)

    @property
    def dead_addresses(self) -> tuple[str, ...]:
        """The other end of the connection that the kernel gave up; none where it has not.

        Twice, since gloo writes the bytes of a port in the order of the network, which may be the other one.
        """
        if (found := DEAD_LINK.search(self.message)) is None:
            return ()
        host, port = found[1], int(found[2])
        return address_text(host, socket.htons(port & 0xFFFF)), address_text(host, port)


def failure_of(error: BaseException) -> Failure:
    """What a rank reports of the exception that ends it."""
    is_invalid_input = isinstance(error, InvalidInput)
    kind = "" if is_invalid_input else f"{type(error).__name__}: "
    lines = "".join(traceback.format_exception(error))
    return Failure(kind + reason(error), is_invalid_input, time.monotonic(), lines, standing_of_process())


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
