"""Faults that are put into a running job, and what it must say of them."""

import os
import signal
import subprocess
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.faults.jobs import NUM_RANKS, Job, OperatorJob

KINDS = ("kill", "stop", "cut", "stall")

CUT = "blackhole"
STALLED = "tbf rate 8bit burst 1600 limit 100000000"


@dataclass(frozen=True)
class Fault:
    """One of `KINDS`, and the ranks to blame: one, or the two ends of a link."""

    kind: str
    ranks: tuple[int, ...]

    def is_named_in(self, said: str) -> bool:
        """Whether the sentence that says why the job ended begins with the rank, or the link, of the fault."""
        if self.kind == "kill" and f"(exitcode: -9) local_rank: {self.ranks[0]} " in said:
            return True  # torchrun's own report
        lines = [line for line in said.splitlines() if "error: " in line]
        if not lines:
            return False
        cause = lines[0].partition("error: ")[2].partition(";")[0]
        if "ends: " in cause:
            cause = cause.partition("ends: ")[2]
        if "the links of " in cause:
            cause = cause.partition(",")[0].replace("links of ", "")
        words = cause.replace(",", " ").split()
        named = {int(word) for before, word in pairwise(words) if _is_rank(before, word)}
        return set(self.ranks) <= named and len(named) <= 2


def _is_rank(before: str, word: str) -> bool:
    return word.isdigit() and before in ("rank", "ranks", "and")


def inject(fault: Fault, job: Job) -> None:
    """Puts the fault into the job, at once."""
    if fault.kind in ("kill", "stop"):
        pid = job.ranks()[fault.ranks[0]]
        os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
    elif isinstance(job, OperatorJob):
        _disconnect(job.namespace(fault.ranks[0]), fault.kind)
    else:
        shape_link(job, fault.ranks, CUT if fault.kind == "cut" else STALLED)


def _disconnect(namespace: str, kind: str) -> None:
    if kind == "cut":
        run("ip", "-n", namespace, "link", "set", "eth0", "down")
    else:
        stalled = "root tbf rate 8bit burst 1600 limit 10000000"
        run("tc", "-n", namespace, "qdisc", "replace", "dev", "eth0", *stalled.split())


def shape_link(job: Job, ends: tuple[int, ...], queue: str) -> int:
    """Sends all that two ranks tell each other, on the loopback of the job, through a queueing discipline.

    Behind the sender, which would notice if its own queue kept or dropped packets. Returns the number of connections.
    """
    pids = job.ranks()
    first, second = (pids[rank] for rank in ends)
    pairs = _connections(first, second)
    assert pairs, f"ranks {ends} are not connected"
    enter = ["nsenter", f"--net=/proc/{first}/ns/net"]
    steps = [
        "ip link add ifb0 type ifb",
        "ip link set ifb0 up",
        f"tc qdisc add dev ifb0 root handle 1: {queue}",
        "tc qdisc add dev lo ingress",
    ]
    for local, remote in pairs:
        for src, dst in ((local, remote), (remote, local)):
            match = f"u32 match ip sport {src} 0xffff match ip dport {dst} 0xffff"
            redirect = "action mirred egress redirect dev ifb0"
            steps.append(f"tc filter add dev lo parent ffff: protocol ip {match} {redirect}")
    for step in steps:
        run(*enter, *step.split())
    return len(pairs)


def _connections(first: int, second: int) -> list[tuple[int, int]]:
    """(port, port) of each TCP connection between two processes of one network namespace."""
    table = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{first}/net/{name}").read_text().splitlines()[1:]:
            columns = line.split()
            local, remote = (int(columns[at].rpartition(":")[2], 16) for at in (1, 2))
            if columns[3] == "01":  # established
                table[columns[9]] = local, remote
    ours, theirs = (
        {table[inode] for inode in _socket_inodes(pid) if inode in table} for pid in (first, second)
    )
    return sorted(pair for pair in ours if pair[::-1] in theirs)


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        name = path.readlink().name
        if name.startswith("socket:["):
            found.add(name[8:-1])
    return found


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def all_links() -> list[tuple[int, int]]:
    return [(a, b) for a in range(NUM_RANKS) for b in range(a + 1, NUM_RANKS)]
