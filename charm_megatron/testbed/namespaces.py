"""Network namespaces of this package: made, entered, found and removed. All of it needs root.

A namespace is ours if its name begins with `PREFIX` *and* its loopback device bears a mark, which says who made it.
Nothing else is ever changed.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from charm_megatron.errors import InvalidInput, NetworkFault
from charm_megatron.testbed.commands import remove_namespace

PREFIX = "charmtb-"
FOLDER = Path("/run/netns")
TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}
COMMAND_S = 30.0
END_S = 5.0
"""How long killed processes may take to go."""

TRIAL = """
ip link add trial0 type veth peer name trial1 && tc qdisc add dev trial0 root handle 1: htb &&
tc filter add dev trial0 parent 1: protocol ip u32 match u32 0 0 flowid 1:1 && ip link add trial2 type ifb &&
echo 262144 > /proc/sys/net/ipv4/tcp_limit_output_bytes
"""


# ---------------------------------------------------------------------- owners


@dataclass(frozen=True)
class Owner:
    """A process. The time of its start, in ticks since boot, tells it from a later one with its number."""

    pid: int
    start: int

    @classmethod
    def this_process(cls) -> "Owner":
        start = _start_of(os.getpid())
        assert start is not None, "this process is there"
        return cls(os.getpid(), start)

    @property
    def is_alive(self) -> bool:
        return _start_of(self.pid) == self.start


def _start_of(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, counted behind the name, which may hold anything; None for none or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


@dataclass(frozen=True)
class Mark:
    """Says what a namespace belongs to. Without an owner it stays until it is taken down by name."""

    profile: str
    digest: str
    owner: Owner | None

    def __str__(self) -> str:
        owner = "nobody" if self.owner is None else f"{self.owner.pid}:{self.owner.start}"
        return f"charm-megatron testbed {self.profile} {self.digest} owner {owner}"

    @classmethod
    def parse(cls, text: str) -> "Mark | None":
        pattern = r"charm-megatron testbed (\w+) (\w+) owner (?:nobody|(\d+):(\d+))"
        if (found := re.fullmatch(pattern, text)) is None:
            return None
        profile, digest, pid, start = found.groups()
        return cls(profile, digest, None if pid is None else Owner(int(pid), int(start)))

    @property
    def is_stale(self) -> bool:
        """Whether its owner is gone."""
        return self.owner is not None and not self.owner.is_alive


# ---------------------------------------------------------------------- whether it works here


def why_unavailable() -> str | None:
    """What keeps this process from making test networks, in words; None if nothing does."""
    if os.geteuid() != 0:
        return f"it needs root, and the user is number {os.geteuid()}"
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            return f"the command {tool!r} is missing; Debian and Ubuntu have it in the package {package}"
    trial = subprocess.run(
        ["unshare", "--net", "sh", "-c", TRIAL], capture_output=True, text=True, check=False
    )
    if trial.returncode:
        return f"the kernel refuses: {' '.join(trial.stderr.split())}"
    return None


def is_available() -> bool:
    """Whether this process can make test networks."""
    return why_unavailable() is None


def require_available() -> None:
    """Raises `InvalidInput` with the reason where this process cannot make test networks."""
    if (reason := why_unavailable()) is not None:
        raise InvalidInput(f"cannot shape a test network: {reason}")


# ---------------------------------------------------------------------- doing


def execute(commands: Iterable[Sequence[str]]) -> None:
    """Runs commands one after the other. Raises `NetworkFault` with the first that fails."""
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NetworkFault(f"{' '.join(command)}: {error}") from error
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split())
            raise NetworkFault(f"{' '.join(command)}: {said or f'code {done.returncode}'}")


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Puts the calling thread, and the sockets that it makes, into the namespace; other threads stay out."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            there = os.open(FOLDER / name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NetworkFault(f"the namespace {name} is gone") from error
        try:
            os.setns(there, os.CLONE_NEWNET)
        finally:
            os.close(there)
        try:
            yield
        finally:
            os.setns(home, os.CLONE_NEWNET)
    finally:
        os.close(home)


def enter(name: str) -> None:
    """Puts the calling process, while it has one thread, into the namespace for good."""
    try:
        with (FOLDER / name).open() as there:
            os.setns(there.fileno(), os.CLONE_NEWNET)
    except FileNotFoundError as error:
        raise NetworkFault(f"the namespace {name} is gone") from error


@dataclass(frozen=True)
class Counted:
    """What came in at a device: frames as the kernel passes them, and their bytes with Ethernet headers."""

    num_bytes: int
    num_packets: int


def received(name: str) -> dict[str, Counted]:
    """What each device of a namespace has received."""
    with inside(name):
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    rows = (line.split(":", 1) for line in lines)
    return {device.strip(): Counted(*map(int, numbers.split()[:2])) for device, numbers in rows}


# ---------------------------------------------------------------------- finding and removing


def marked() -> dict[str, Mark]:
    """Our namespaces by name. Those with our prefix but without our mark are not ours."""
    names = [path.name for path in sorted(FOLDER.glob(f"{PREFIX}*"))]
    return {name: mark for name in names if (mark := _mark_of(name)) is not None}


def _mark_of(name: str) -> Mark | None:
    shown = subprocess.run(
        ["ip", "-n", name, "link", "show", "lo"], capture_output=True, text=True, check=False
    )
    found = re.search(r"^\s+alias (.*)$", shown.stdout, re.MULTILINE)
    return Mark.parse(found[1].strip()) if found else None


def networks() -> dict[str, Mark]:
    """Our networks by name: a namespace is `<network>-switch` or `<network>-r<rank>`.

    The mark is the switch's, because its name sorts last; a network without one was not finished.
    """
    return {name.rpartition("-")[0]: mark for name, mark in marked().items()}


def remove_networks(names: Iterable[str]) -> list[str]:
    """Ends all processes in these networks, then removes them; says which were there."""
    wanted = set(names)
    ours = [name for name in marked() if name.rpartition("-")[0] in wanted]
    end_processes(ours)
    for name in ours:
        with suppress(NetworkFault):  # another process may be removing it too
            execute([remove_namespace(name)])
    left = sorted(set(ours) & set(marked()))
    if left:
        raise NetworkFault(f"cannot remove the namespaces {', '.join(left)}")
    return sorted({name.rpartition("-")[0] for name in ours})


def remove_stale() -> list[str]:
    """Removes the networks of processes that are gone."""
    return remove_networks(name for name, mark in networks().items() if mark.is_stale)


def end_processes(names: Sequence[str]) -> None:
    """Kills what runs in these namespaces, and waits until it is gone."""
    inodes = set()
    for name in names:
        with suppress(FileNotFoundError):
            inodes.add((FOLDER / name).stat().st_ino)
    deadline_s = time.monotonic() + END_S
    while (pids := _processes_in(inodes)) and time.monotonic() < deadline_s:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _processes_in(inodes: set[int]) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone in between
            if (folder / "ns/net").stat().st_ino in inodes and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found
