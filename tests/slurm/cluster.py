"""A real SLURM of two nodes on this machine: one slurmctld, and a slurmd in each of two network namespaces.

A node has its own hostname, address (10.77.0.1, 10.77.0.2) and loopback, so what works here does not lean on 127.0.0.1
or on one hostname for all. Files, processes and users are this machine's. Everything runs as root, with a key,
sockets and state of its own under one folder; no service of the machine is touched.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "ip", "unshare")
PACKAGES = "slurmctld slurmd slurm-client munge iproute2"
BRIDGE, GATEWAY = "charmslurm", "10.77.0.254"
NODES = ("node0", "node1")

# proctrack/linuxproc: the default wants cgroups of systemd. config_overrides: nodes may claim more cores than there
# are. cred_expire: a requeued job waits for its old credential to expire, two minutes by default.
CONFIG = """
ClusterName=lab
SlurmctldHost={host}({gateway})
SlurmctldPort=16817
SlurmdPort=16818
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=5
SlurmdTimeout=15
NodeName=node0 NodeAddr=10.77.0.1 CPUs=4 RealMemory=4000
NodeName=node1 NodeAddr=10.77.0.2 CPUs=4 RealMemory=4000
PartitionName=lab Nodes=ALL Default=YES MaxTime=30 State=UP
"""

# Names must resolve without DNS, which no namespace reaches: torch looks up the names of its peers.
NODE = """
hostname {name}
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/nsswitch.conf /etc/nsswitch.conf
until ip link set eth0 up 2>/dev/null; do sleep 0.05; done
ip link set lo up
ip address add 10.77.0.{number}/24 dev eth0
exec slurmd -D -N {name}
"""


@dataclass(frozen=True)
class Job:
    """A job that has ended."""

    state: str
    output: str


def wait_until(is_so: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Raises `TimeoutError` where it does not come true."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.2)


class Cluster:
    """Starts with `start`; `stop` must be called however the start went."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Returns when both nodes are idle."""
        missing = [name for name in PROGRAMS if shutil.which(name) is None]
        if missing or os.geteuid() != 0:
            raise RuntimeError(
                f"tests of tier slurm need root and the Debian packages {PACKAGES}; "
                f"missing: {', '.join(missing) or 'root'}"
            )
        self._write_files()
        self._daemon("munged", "-F", "--force", *self._munge_files())
        wait_until((self.folder / "munge.socket").exists, 10, "munged")
        self._ip("link", "add", BRIDGE, "type", "bridge")
        self._ip("address", "add", f"{GATEWAY}/24", "dev", BRIDGE)
        self._ip("link", "set", BRIDGE, "up")
        self._daemon("slurmctld", "-D")
        for number in range(len(NODES)):
            self.start_node(number)

    def start_node(self, number: int) -> None:
        """Starts a node, also one that was killed, and waits until all are idle."""
        script = NODE.format(name=NODES[number], folder=self.folder, number=number + 1)
        daemon = self._daemon("unshare", "--net", "--uts", "--mount", "bash", "-euc", script)
        wait_until(lambda: _namespace(daemon.pid) != _namespace(os.getpid()), 10, "a namespace")
        outside = f"{BRIDGE}{number}"
        _delete_link(outside)
        self._ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", str(daemon.pid))
        self._ip("link", "set", outside, "master", BRIDGE, "up")
        if number == len(NODES) - 1:
            wait_until(self._are_idle, 60, f"idle nodes; logs are in {self.folder}")

    def kill_node(self, number: int) -> None:
        """Ends at once every process of a node, as a loss of power does."""
        namespaces = {
            _namespace(int(path.name))
            for path in Path("/proc").glob("[0-9]*")
            if _command(path).endswith(f"slurmd -D -N {NODES[number]}")
        }
        assert len(namespaces) == 1, f"{NODES[number]} has one slurmd"
        for path in Path("/proc").glob("[0-9]*"):
            if _namespace(int(path.name)) in namespaces:
                with suppress(ProcessLookupError):
                    os.kill(int(path.name), signal.SIGKILL)

    def stop(self) -> None:
        """Ends jobs, then daemons, and removes the network."""
        if (self.folder / "slurmctld.pid").exists():
            with suppress(subprocess.TimeoutExpired, subprocess.CalledProcessError, TimeoutError):
                self.run("scancel", "--user=root")
                wait_until(lambda: not self.run("squeue", "--noheader"), 30, "an empty queue")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for number in range(len(NODES)):
            _delete_link(f"{BRIDGE}{number}")
        _delete_link(BRIDGE)

    # ------------------------------------------------------------------ jobs

    def submit(self, folder: Path, *arguments: str | Path, **environment: str) -> int:
        """`sbatch` from `folder`; gives the job's number."""
        output = f"--output={self.folder}/job-%j.out"
        words = ["sbatch", "--parsable", output, "--time=10", *map(str, arguments)]
        return int(self.run(*words, folder=folder, environment=environment))

    def output(self, job: int) -> str:
        """What a job has printed so far."""
        path = self.folder / f"job-{job}.out"
        return path.read_text("utf-8", errors="replace") if path.exists() else ""

    def wait(self, job: int, timeout_s: float = 240) -> Job:
        """Waits for a job's end. `sbatch --wait` would ask ever more rarely."""
        busy = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED"}
        try:
            wait_until(lambda: self._state(job) not in busy, timeout_s, f"job {job}")
        except TimeoutError as error:
            raise AssertionError(f"{error}; it printed:\n{self.output(job)}") from error
        return Job(self._state(job), self.output(job))

    def run(
        self, *command: str, folder: Path | None = None, environment: dict[str, str] | None = None
    ) -> str:
        """Runs a client program; gives what it prints."""
        done = subprocess.run(
            command,
            cwd=folder,
            env={**self.environment, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout.strip()

    def _state(self, job: int) -> str:
        found = re.search(r"JobState=(\w+)", self.run("scontrol", "-o", "show", "job", str(job)))
        assert found is not None
        return found[1]

    # ------------------------------------------------------------------ parts

    def _are_idle(self) -> bool:
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N %t"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.split() == [word for name in NODES for word in (name, "idle")]

    def _write_files(self) -> None:
        host = socket.gethostname().split(".")[0]
        config = CONFIG.format(host=host, gateway=GATEWAY, folder=self.folder)
        (self.folder / "slurm.conf").write_text(config)
        (self.folder / "state").mkdir()
        for name in NODES:
            (self.folder / f"spool-{name}").mkdir()
        hosts = "".join(f"10.77.0.{number} {name}\n" for number, name in enumerate(NODES, 1))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{GATEWAY} {host}\n{hosts}")
        (self.folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))

    def _munge_files(self) -> list[str]:
        files = {"key": "key", "socket": "socket", "pid": "pid", "seed": "seed", "log": "log"}
        return [
            f"--{name}-file={self.folder}/munge.{end}" for name, end in files.items() if name != "socket"
        ] + [f"--socket={self.folder}/munge.socket"]

    def _daemon(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / "daemons.log").open("ab") as log:
            daemon = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._daemons.append(daemon)
        return daemon

    def _ip(self, *words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def _delete_link(name: str) -> None:
    """If it is there. A node's outlives its processes for minutes where the kernel still has to close a connection."""
    subprocess.run(["ip", "link", "delete", name], capture_output=True, check=False)


def _namespace(pid: int) -> str | None:
    """The network namespace of a process; None where it is gone."""
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return None


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
