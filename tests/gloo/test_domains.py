"""All ranks find the same domains, and the receipt says which and why."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from charm_megatron.config import CharmConfig
from charm_megatron.errors import CharmError
from charm_megatron.executor import AttentionRuntime
from charm_megatron.executor.machine import Machine
from charm_megatron.topology import Place
from charm_megatron.workload import CAUSAL, Workload
from tests.full_attention import full_attention, relative_error
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo

WORKLOAD = Workload(1, 48, 2, 2, 8, 8)

# Four GPUs in pairs: nvidia-smi's numbers 0 2 and 1 3, so that neighbours are of different pairs.
GPUS = ("0000:07:00.0", "0000:0b:00.0", "0000:48:00.0", "0000:4c:00.0")
PRINTS = {
    "--query-gpu=index,pci.bus_id": "".join(
        f"{number}, 0000{address.upper()}\n" for number, address in enumerate(GPUS)
    ),
    "topo": "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tSYS\tNV4\tSYS\t0-15\t0\t\tN/A\nGPU1\tSYS\t X \tSYS\tNV4\t16-31\t1\t\tN/A\n"
    "GPU2\tNV4\tSYS\t X \tSYS\t0-15\t0\t\tN/A\nGPU3\tSYS\tNV4\tSYS\t X \t16-31\t1\t\tN/A\n"
    "\nLegend:\n\n  X    = Self\n",
}


class Stage(Machine):
    """Stands for the machine of one rank: its name, its device's NUMA node, and its GPU."""

    def __init__(self, place: Place, gpu: str | None = None) -> None:
        super().__init__(program_timeout_s=2)
        self._place, self._gpu = place, gpu

    def hostname(self) -> str:
        return self._place.host

    def numa_node(self, device: torch.device) -> int | None:
        return self._place.part

    def pci_address(self, device: torch.device) -> str:
        return self._gpu or super().pci_address(device)


def receipt_on(rank: int, size: int, domains: str | Sequence[str], stages: Sequence[Stage]) -> str:
    """The first line of a rank's receipt, or what it is refused with."""
    declared = domains if isinstance(domains, str) else domains[rank]
    runtime = AttentionRuntime(CharmConfig(domains=declared), stages[rank])
    try:
        return runtime.receipt(dist.group.WORLD, WORKLOAD).lines()[0]
    except CharmError as error:
        return f"{type(error).__name__}: {error}"


def first_line(domains: str | Sequence[str], stages: Sequence[Stage]) -> str:
    """What all ranks say alike."""
    (line,) = set(run_ranks(receipt_on, len(stages), domains, stages))
    return line


def test_domains_are_found_in_what_ranks_say_of_their_place(tmp_path: Path) -> None:
    scattered = [Stage(Place(host, numa)) for host, numa in (("a", 0), ("b", 0), ("a", 1), ("b", 0))]
    assert first_line("hosts", scattered) == (
        "context parallelism: 4 ranks in 2 domains [0 2 | 1 3], one per host"
    )
    assert first_line("numa", scattered) == (
        "context parallelism: 4 ranks in 3 domains [0 | 1 3 | 2], one per NUMA node: a:0 b:0 a:1 b:0"
    )
    path = tmp_path / "domains.yaml"
    path.write_text("domains: [[a:0, b], [a:1]]")
    assert first_line(str(path), scattered) == (
        f"context parallelism: 4 ranks in 2 domains [0 1 3 | 2], as {path} says: a:0 b:0 a:1 b:0"
    )


def test_a_group_may_have_one_rank_a_host() -> None:
    assert first_line("hosts", [Stage(Place(name)) for name in "abcd"]) == (
        "context parallelism: 4 ranks in 4 domains [0 | 1 | 2 | 3], one per host"
    )


def test_one_rank_that_lacks_the_file_ends_all(tmp_path: Path) -> None:
    path = tmp_path / "domains.yaml"
    path.write_text("domains: [[a], [b]]")
    absent = str(tmp_path / "absent.yaml")
    stages = [Stage(Place("a")), Stage(Place("b"))]
    line = first_line((str(path), absent), stages)
    assert line.startswith(
        f"ScheduleDisagreement: the ranks of a context-parallel group have different charm.domains: "
        f"rank 0: {path} [a] [b]; rank 1: {absent}"
    )
    line = first_line(absent, stages)
    assert line.startswith("TopologyError: charm.domains: ")
    assert "absent.yaml does not work on context-parallel rank 0, on a: cannot read file of domains" in line
    assert "No such file or directory; also ranks 1; set it to hosts, numa, nvlink, a nu" in line


def test_ranks_with_different_settings_do_not_hang() -> None:
    assert "rank 0: hosts; rank 1: 2" in first_line(("hosts", "2"), [Stage(Place("a"))] * 2)


# ---------------------------------------------------------------------- islands of NVLink


def write_program(folder: Path, script: str) -> None:
    """Puts a stand-in for nvidia-smi into `folder`."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an nvidia-smi that is first on PATH, of a host with four GPUs in pairs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for option, text in PRINTS.items():
        (folder / option).write_text(text)
    write_program(folder, f'exec /bin/cat "{folder}/$1"')
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    # Neither hides a GPU from nvidia-smi, nor gives it another number.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5f2b,MIG-77c1")
    return folder


@pytest.mark.usefixtures("nvidia_smi")
@pytest.mark.parametrize(
    ("ranks", "domains"),
    [
        ((("a", 0), ("a", 2), ("a", 1), ("a", 3)), "2 domains [0 1 | 2 3]: a:0 a:0 a:1 a:1"),
        # Ranks of an island that are not consecutive, as ranks are numbered by GPU here.
        ((("a", 0), ("a", 1), ("a", 2), ("a", 3)), "2 domains [0 2 | 1 3]: a:0 a:1 a:0 a:1"),
        # Backwards, over two hosts, whose islands have the same numbers.
        ((("b", 3), ("a", 2), ("b", 1), ("a", 0)), "2 domains [0 2 | 1 3]: b:1 a:0 b:1 a:0"),
        # One rank of the group in each island.
        ((("a", 0), ("a", 1), ("b", 2), ("b", 3)), "4 domains [0 | 1 | 2 | 3]: a:0 a:1 b:0 b:1"),
        # Islands of different sizes.
        ((("a", 0), ("a", 1), ("a", 2)), "2 domains [0 2 | 1]: a:0 a:1 a:0"),
    ],
)
def test_domains_are_the_islands_that_nvidia_smi_shows(
    ranks: Sequence[tuple[str, int]], domains: str
) -> None:
    stages = [Stage(Place(host), GPUS[gpu]) for host, gpu in ranks]
    grouped, words = domains.split(": ")
    assert first_line("nvlink", stages) == (
        f"context parallelism: {len(ranks)} ranks in {grouped}, one per NVLink island: {words}"
    )


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo no driver >&2; exit 9", "pci.bus_id --format=csv,noheader` ended with code 9: no driver;"),
        ("exec sleep 60", "--format=csv,noheader` has not ended after 2 s;"),
        ("echo No devices were found", "printed no list of GPUs, but 'No devices were found' first;"),
        (
            'test "$1" = topo && echo "GPU0 - GPU1: fine" || exec cat "${0%/*}/$1"',
            "`nvidia-smi topo -m` printed no table of GPUs, but 'GPU0 - GPU1: fine' first;",
        ),
    ],
)
def test_an_nvidia_smi_that_does_not_answer_ends_all_ranks_with_a_sentence(
    nvidia_smi: Path, script: str, problem: str
) -> None:
    write_program(nvidia_smi, script)
    line = first_line("nvlink", [Stage(Place("a"), GPUS[rank]) for rank in range(2)])
    assert line.startswith(
        "TopologyError: charm.domains: nvlink does not work on context-parallel rank 0, on a: `"
    )
    assert f"{problem} also ranks 1; set it to hosts, numa, a number or a file of domains" in line


def test_a_host_without_nvidia_smi_ends_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert first_line("nvlink", [Stage(Place("a"), gpu) for gpu in GPUS[:2]]) == (
        "TopologyError: charm.domains: nvlink does not work on context-parallel rank 0, on a: there is no nvidia-smi "
        "on PATH; also ranks 1; set it to hosts, numa, a number or a file of domains"
    )


@pytest.mark.usefixtures("nvidia_smi")
def test_one_rank_without_a_gpu_ends_all_ranks() -> None:
    assert first_line("nvlink", [Stage(Place("a"), GPUS[0]), Stage(Place("b"))]) == (
        "TopologyError: charm.domains: nvlink does not work on context-parallel rank 1, on b: the rank's device is "
        "cpu, no GPU; set it to hosts, numa, a number or a file of domains"
    )


def attention_error(rank: int, size: int, gpus: Sequence[str]) -> float:
    """Of this rank's output and gradients under charm, relative to full attention."""
    runtime = AttentionRuntime(CharmConfig(domains="nvlink", deadline_s=60), Stage(Place("a"), gpus[rank]))
    random = torch.Generator().manual_seed(0)
    made = [torch.randn(8 * size, 1, 2, 8, dtype=torch.float64, generator=random) for _ in range(3)]
    whole = [x.requires_grad_() for x in made]
    out, _ = full_attention(*whole, CAUSAL)
    expected = (out, *torch.autograd.grad(out.square().sum(), whole))
    first, last = (torch.arange(4) + 4 * chunk for chunk in (rank, 2 * size - 1 - rank))
    mine = torch.cat([first, last])
    shard = [x.detach()[mine].requires_grad_() for x in made]
    got = runtime.attention(*shard, group=dist.group.WORLD)
    found = (got, *torch.autograd.grad(got.square().sum(), shard))
    return max(relative_error(a, b[mine]) for a, b in zip(found, expected, strict=True))


@pytest.mark.usefixtures("nvidia_smi")
@pytest.mark.parametrize("gpus", [GPUS, GPUS[:2], GPUS[:3]], ids=["scattered", "one a domain", "uneven"])
def test_attention_over_islands_is_exact_in_any_order(gpus: Sequence[str]) -> None:
    assert max(run_ranks(attention_error, len(gpus), gpus)) < 1e-10


def told_of_a_cpu(rank: int, size: int) -> tuple[str, str]:
    told = AttentionRuntime(CharmConfig()).receipt(dist.group.WORLD, WORKLOAD)
    return str(told.domains), told.domains_reason


def test_a_rank_on_a_cpu_knows_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(run_ranks(told_of_a_cpu, 2)) == {("0 1", "one per host")}
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    assert set(run_ranks(told_of_a_cpu, 2)) == {("0 1", "one per host")}
