"""A network of namespaces with shaped links on this machine, one namespace per rank.

    with Testbed(load_profile("nvlink_2x4")) as net:
        net.run_ranks(lambda rank: [sys.executable, "rank.py"])
        net.payload_bytes(0)

It is removed, with all processes in it, when the block ends or when this process dies in whatever way. `persistent`
has networks that stay.
"""

import hashlib
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from charm_megatron.processes.commands import OnLine, RankOutput, run_commands
from charm_megatron.processes.environment import RankPlacement
from charm_megatron.testbed.commands import (
    HEADER_BYTES,
    Names,
    exec_command,
    port,
    up_commands,
)
from charm_megatron.testbed.namespaces import (
    PREFIX,
    Mark,
    Owner,
    execute,
    inside,
    received,
    remove_networks,
    remove_stale,
    require_available,
)
from charm_megatron.testbed.profile import Profile

MASTER_PORT = 29500
"""Any will do: a rank has all ports of its address to itself."""


class Network:
    """A test network that is there."""

    def __init__(self, profile: Profile, names: Names) -> None:
        self.profile, self.names = profile, names
        self._zero = [0] * profile.num_ranks

    @property
    def num_ranks(self) -> int:
        return self.profile.num_ranks

    def environment(self, rank: int) -> dict[str, str]:
        """What torch.distributed needs to know on a rank."""
        size = self.profile.ranks_per_domain
        placement = RankPlacement(rank, self.num_ranks, rank % size, size)
        return {**placement.variables(self.profile.address(0), MASTER_PORT), "GLOO_SOCKET_IFNAME": "eth0"}

    def popen(
        self, rank: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **settings: Any
    ) -> subprocess.Popen[bytes]:
        """Starts a command on a rank, with `env` and the rank's variables added to this process's environment.

        `settings` go to `subprocess.Popen`. The process ends with the network at the latest.
        """
        variables = {**os.environ, **self.environment(rank), **(env or {})}
        return subprocess.Popen(exec_command(self.names.rank(rank), tuple(argv)), env=variables, **settings)

    def run_ranks(
        self,
        argv_for_rank: Callable[[int], Sequence[str]],
        *,
        ranks: Sequence[int] | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        on_line: OnLine | None = None,
    ) -> list[RankOutput]:
        """Runs a command on every rank, or on `ranks`, and waits for all. `on_line` gets each line as it comes.

        Raises `LaunchError` when one fails, `TransferTimeout` when one has not ended in time; none runs on after that.
        """

        def start(rank: int) -> subprocess.Popen[bytes]:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            return self.popen(rank, argv_for_rank(rank), env, process_group=0, **pipes)

        return run_commands(start, ranks or range(self.num_ranks), timeout_s, on_line)

    def entered(self, rank: int) -> AbstractContextManager[None]:
        """Context in which sockets that this thread makes are the rank's."""
        return inside(self.names.rank(rank))

    # ------------------------------------------------------------------ counters

    def payload_bytes(self, rank: int) -> int:
        """TCP payload that a rank has sent since the counters were reset."""
        return self.all_payload_bytes()[rank]

    def all_payload_bytes(self) -> list[int]:
        """The same of every rank, read at one time."""
        return [sent - zero for sent, zero in zip(self._sent(), self._zero, strict=True)]

    def reset_counters(self) -> None:
        """Counts from now on."""
        self._zero = self._sent()

    def _sent(self) -> list[int]:
        """Bytes at the switch's end of each cable, less one Ethernet, IP and TCP header for each packet counted.

        Large packets are cut into frames only by a real card, never here, so that what is counted has one set of
        headers however long it is. A packet without payload, as an acknowledgement is, comes to zero; one that sets
        up a connection has more options and comes to a few bytes, one of ARP to less than nothing, one of IPv6 to
        some 24. What is sent again would count again, but nothing is lost here.
        """
        devices = received(self.names.switch)
        counted = [devices[port(rank)] for rank in range(self.num_ranks)]
        return [one.num_bytes - HEADER_BYTES * one.num_packets for one in counted]


class Testbed(Network):
    """A test network of this process."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile, Names(f"{PREFIX}{profile.name}-{secrets.token_hex(3)}"))
        self._watchdog: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Raises `InvalidInput` without root or tools, `NetworkFault` where a command fails."""
        require_available()
        remove_stale()
        owner = Owner.this_process()
        self._watchdog = _start_watchdog(self.names.network, owner)
        try:
            make(self.profile, self.names, owner)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        remove_networks([self.names.network])
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.wait()
            self._watchdog = None


def digest(profile: Profile) -> str:
    """Tells two shapes under one name apart."""
    return hashlib.sha256(profile.model_dump_json().encode()).hexdigest()[:12]


def make(profile: Profile, names: Names, owner: Owner) -> None:
    """Makes a network that is this owner's; what a failure leaves is the caller's to remove."""
    mark = Mark(profile.name, digest(profile), owner)
    execute(up_commands(profile, names, str(mark)))


def _start_watchdog(network: str, owner: Owner) -> subprocess.Popen[bytes]:
    """Before the network is made, so that there is no moment without one."""
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-m", "charm_megatron.testbed.watchdog", network, str(owner.pid), str(owner.start)],
        env={**os.environ, "PYTHONPATH": str(root)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
