"""Jobs that faults are put into: in network namespaces of their own, with ranks that can be told apart."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from charm_megatron.testbed.namespaces import marked, remove_networks

NUM_RANKS = 4
DEADLINE_S = 3.0
START_S = 180.0
MARK = "CHARM_FAULT_JOB"

MODEL = {
    "context_parallel_size": NUM_RANKS,
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 512,
    "max_position_embeddings": 512,
    "micro_batch_size": 4,
    "global_batch_size": 4,
    "lr": 1.0e-3,
    "eval_iters": 0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "split": "100,0,0",
    "seed": 1234,
}

PROFILE = {
    "name": "faults_2x2",
    "domains": 2,
    "ranks_per_domain": 2,
    "inside_bytes_per_s": 4_000_000,
    "across_bytes_per_s": 2_000_000,
}


def charm(*words: str) -> list[str]:
    return [sys.executable, "-m", "charm_megatron", *words]


@dataclass
class Job(ABC):
    """A command that has ranks, in a network of its own; `folder` is where it writes."""

    folder: Path
    argv: Sequence[str]
    has_namespaces: bool = False
    """Whether each rank has one, which the command makes."""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        script = 'ip link set lo up && exec "$@"'
        alone = [] if self.has_namespaces else ["unshare", "--net", "sh", "-c", script, "sh"]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*alone, *self.argv],
                env={**clean, MARK: self.mark, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> Path:
        return self.folder / "output.txt"

    def said(self) -> str:
        return self.output.read_text("utf-8", errors="replace")

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float = START_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_so():
            assert self.process.poll() is None, f"it has ended:\n{self.said()}"
            assert time.monotonic() < deadline_s, f"waited too long:\n{self.said()}"
            time.sleep(0.05)

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code; None where it has not ended in time."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout_s)
        return None

    def processes(self) -> list[int]:
        """Everything that the command has started, and that is still there."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if f"{MARK}={self.mark}".encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return [pid for pid in found if state_of(pid) not in ("", "Z", "X")]

    def ranks(self) -> dict[int, int]:
        """The processes of the ranks, by rank."""
        found = {}
        for pid in self.processes():
            rank = self._rank_of(pid)
            if rank is not None:
                found[rank] = min(pid, found.get(rank, pid))
        return found

    @abstractmethod
    def _rank_of(self, pid: int) -> int | None: ...

    @abstractmethod
    def is_training(self) -> bool: ...

    def clean_up(self) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class TrainingJob(Job):
    """A run of pretraining."""

    def is_training(self) -> bool:
        return _num_lines(self.run / "metrics.jsonl") >= 2


class PretrainJob(TrainingJob):
    """`charm-megatron pretrain`, which starts its ranks itself."""

    def _rank_of(self, pid: int) -> int | None:
        """A rank writes to its log, and leads a process group; what it has started does not."""
        found = re.fullmatch(r"rank(\d+)\.log", Path(f"/proc/{pid}/fd/1").resolve().name)
        return int(found[1]) if found and os.getpgid(pid) == pid else None


class TorchrunJob(TrainingJob):
    """The same under torchrun."""

    def _rank_of(self, pid: int) -> int | None:
        return rank_in_environment(pid)


class OperatorJob(Job):
    """`charm-megatron bench operator` on a shaped network, or as ranks of torchrun."""

    def is_training(self) -> bool:
        """Whether rank 0 has sent some transfers."""
        pids = self.ranks()
        return len(pids) == NUM_RANKS and _bytes_sent(pids[0]) > 1_000_000

    def namespace(self, rank: int) -> str:
        (name,) = [name for name in marked() if self._is_ours(name) and name.endswith(f"-r{rank}")]
        return name

    def _is_ours(self, name: str) -> bool:
        return PROFILE["name"] in name

    def _rank_of(self, pid: int) -> int | None:
        named = subprocess.run(
            ["ip", "netns", "identify", str(pid)], capture_output=True, text=True, check=False
        )
        found = re.search(r"-r(\d+)$", named.stdout.strip())
        return int(found[1]) if found else None

    def clean_up(self) -> None:
        super().clean_up()
        remove_networks({name.rpartition("-")[0] for name in marked() if self._is_ours(name)})


def _num_lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def _bytes_sent(pid: int) -> int:
    """Over eth0, in the network namespace of a process."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        device, _, numbers = line.partition(":")
        if device.strip() == "eth0":
            return int(numbers.split()[8])
    return 0


def rank_in_environment(pid: int) -> int | None:
    """Of a process that torchrun has started, not of what that has started."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        command = Path(f"/proc/{parent}/cmdline").read_bytes()
    except OSError:
        return None
    found = [line.partition(b"=")[2] for line in environ if line.startswith(b"RANK=")]
    return int(found[0]) if found and b"torch.distributed.run" in command else None


# ---------------------------------------------------------------------- the kinds of jobs


def make_job(kind: str, folder: Path, **settings: object) -> Job:
    """A job of a kind, not started; `settings` are laid over its `megatron` section."""
    maker = {"pretrain": _pretrain, "torchrun": _torchrun, "operator": _operator}[kind]
    return maker(folder, settings)


def _config(folder: Path, settings: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    megatron = {**MODEL, "train_iters": 100_000, **settings}
    attention = {"schedule": "charm", "domains": 2, "deadline_s": DEADLINE_S}
    sections = {"launch": {"ranks": NUM_RANKS}, "charm": attention, "megatron": megatron}
    path.write_text(yaml.safe_dump(sections))
    return path


def _pretrain(folder: Path, settings: dict[str, object]) -> Job:
    config = _config(folder, settings)
    return PretrainJob(folder, charm("pretrain", str(config), "--out", str(folder / "run")))


def _torchrun(folder: Path, settings: dict[str, object]) -> Job:
    config = _config(folder, settings)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(NUM_RANKS)]
    launcher += ["--rdzv-backend=static", "--master-addr=127.0.0.1", "--master-port=29511"]
    words = ["-m", "charm_megatron", "pretrain", str(config), "--out", str(folder / "run")]
    return TorchrunJob(folder, [*launcher, *words])


def _operator(folder: Path, settings: dict[str, object]) -> Job:
    folder.mkdir(parents=True, exist_ok=True)
    profile = folder / "profile.yaml"
    profile.write_text(yaml.safe_dump(PROFILE))
    words = ["--profile", str(profile), "--deadline", str(DEADLINE_S), "--repetitions", "1000"]
    words += ["--schedules", "charm,ring", "--dtype", "float32"]
    return OperatorJob(folder, charm("bench", "operator", *words), has_namespaces=True)
