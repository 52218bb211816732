"""A network of namespaces with shaped links on this machine, one namespace a rank.

    with Testbed(load_profile("nvlink_2x4")) as net:
        net.run_ranks(lambda rank: [sys.executable, "rank.py"])
        net.payload_bytes(0)

It is removed, with all processes in it, when the block ends or when this process dies in whatever way.
"""

import hashlib
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from charm_megatron.bench.namespaces import (
    PREFIX,
    Mark,
    Owner,
    execute,
    inside,
    networks,
    received,
    remove_networks,
    remove_stale,
    require_available,
)
from charm_megatron.bench.network import Profile
from charm_megatron.bench.network_commands import HEADER_BYTES, Names, exec_command, port, up_commands
from charm_megatron.bench.rank_processes import OnLine, RankOutput, run_processes
from charm_megatron.errors import InvalidInput

MASTER_PORT = 29500
"""Any will do: a rank has all ports of its address to itself."""


class Testbed:
    """A test network of this process; `attach` gives one that `charm-megatron testbed up` has left."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.names = Names(f"{PREFIX}{profile.name}-{secrets.token_hex(3)}")
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._zero = dict.fromkeys(range(profile.num_ranks), 0)

    def __enter__(self) -> Self:
        """Raises `InvalidInput` without root or tools, `NetworkFault` where a command fails."""
        require_available()
        remove_stale()
        owner = Owner.this_process()
        self._watchdog = _start_watchdog(self.names.network, owner)
        try:
            _make(self.profile, self.names, owner)
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

    # ------------------------------------------------------------------ ranks

    @property
    def num_ranks(self) -> int:
        return self.profile.num_ranks

    def environment(self, rank: int) -> dict[str, str]:
        """What torch.distributed needs to know on a rank."""
        size = self.profile.ranks_per_domain
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % size),
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": self.profile.address(0),
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
        }

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
            return self.popen(rank, argv_for_rank(rank), env, **pipes)

        return run_processes(start, ranks or range(self.num_ranks), timeout_s, on_line)

    def entered(self, rank: int) -> Any:
        """Context in which sockets that this thread makes are the rank's."""
        return inside(self.names.rank(rank))

    # ------------------------------------------------------------------ counters

    def payload_bytes(self, rank: int) -> int:
        """TCP payload that a rank has sent since the counters were reset."""
        return self._sent()[rank] - self._zero[rank]

    def all_payload_bytes(self) -> list[int]:
        """The same of every rank, read at one time."""
        return [sent - self._zero[rank] for rank, sent in enumerate(self._sent())]

    def reset_counters(self) -> None:
        """Counts from now on."""
        self._zero = dict(enumerate(self._sent()))

    def _sent(self) -> list[int]:
        """Bytes at the switch's end of each cable, less one Ethernet, IP and TCP header for each packet counted.

        The kernel cuts large packets only where a real card does, that is never here: it counts up to 64 KB with one
        header. A packet without payload, as acknowledgements are, comes to zero; connection set-up, with
        more options, to a few bytes; ARP to less than nothing. What is sent again would count again, but nothing is
        lost here.
        """
        devices = received(self.names.switch)
        counted = [devices[port(rank)] for rank in range(self.num_ranks)]
        return [one.num_bytes - HEADER_BYTES * one.num_packets for one in counted]


# ---------------------------------------------------------------------- networks that stay


def kept_name(profile_name: str) -> str:
    """Name of the network that `up` makes; of a profile there is at most one."""
    return f"{PREFIX}{profile_name}"


def bring_up(profile: Profile) -> bool:
    """Makes a network that stays until `take_down`; false where it is there already.

    Raises `InvalidInput` where one of the same name but another shape is there.
    """
    require_available()
    remove_stale()
    names = Names(kept_name(profile.name))
    there = networks().get(names.network)
    if there is not None:
        _check_same(profile, there)
        return False
    try:
        _make(profile, names, None)
    except BaseException:
        remove_networks([names.network])
        raise
    return True


def take_down(profile_name: str | None = None) -> list[str]:
    """Removes the kept network of a profile, or all kept ones, and what dead processes have left. Says which."""
    require_available()
    kept = [name for name, mark in networks().items() if mark.owner is None]
    wanted = kept if profile_name is None else [kept_name(profile_name)]
    return [*remove_networks(wanted), *remove_stale()]


def attach(profile: Profile) -> Testbed:
    """The kept network of a profile. Raises `InvalidInput` where there is none, or one of another shape."""
    require_available()
    name = kept_name(profile.name)
    there = networks().get(name)
    if there is None:
        raise InvalidInput(
            f"the test network {profile.name} is not up; `charm-megatron testbed up {profile.name}` makes it"
        )
    _check_same(profile, there)
    testbed = Testbed(profile)
    testbed.names = Names(name)
    return testbed


def digest(profile: Profile) -> str:
    """Tells two shapes under one name apart."""
    return hashlib.sha256(profile.model_dump_json().encode()).hexdigest()[:12]


def _check_same(profile: Profile, there: Mark) -> None:
    if there.digest != digest(profile):
        raise InvalidInput(
            f"a test network {profile.name} of another shape is up; "
            f"`charm-megatron testbed down {profile.name}` removes it"
        )


def _make(profile: Profile, names: Names, owner: Owner | None) -> None:
    mark = Mark(profile.name, digest(profile), owner)
    execute(up_commands(profile, names, str(mark)))


def _start_watchdog(network: str, owner: Owner) -> subprocess.Popen[bytes]:
    """Before the network is made, so that there is no moment without one."""
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-m", "charm_megatron.bench.watchdog", network, str(owner.pid), str(owner.start)],
        env={**os.environ, "PYTHONPATH": str(root)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
