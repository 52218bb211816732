"""What a rank can ask the machine it runs on. Files, devices, programs and the environment are read here only."""

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from charm_megatron.errors import TopologyError
from charm_megatron.topology.nvidia_smi import ADDRESSES, TOPOLOGY, island_of, parse_addresses, parse_topology
from charm_megatron.topology.sysfs import numa_node, numa_node_of_processors, pci_address

SYS = Path("/sys")


class Machine:
    """The machine that this process runs on.

    `program_timeout_s` is how long nvidia-smi may take: a second or two where the driver has to wake up the GPUs,
    more where the ranks of a host all ask at once.
    """

    def __init__(self, program_timeout_s: float = 30.0) -> None:
        self._timeout_s = program_timeout_s

    def hostname(self) -> str:
        return socket.gethostname()

    def slurm_node(self) -> str | None:
        """The host by the name that SLURM knows it by; None outside SLURM."""
        return os.environ.get("SLURMD_NODENAME")

    def numa_node(self, device: torch.device) -> int | None:
        """The NUMA node of `device`; of a CPU, that of the processors which this process may use, if it is one."""
        if device.type != "cuda":
            return _numa_of_process()
        path = SYS / "bus/pci/devices" / self.pci_address(device) / "numa_node"
        return numa_node(path.read_text("utf-8")) if path.exists() else None

    def pci_address(self, device: torch.device) -> str:
        """The PCI address of a GPU, as sysfs writes it. Raises `TopologyError` for a CPU."""
        if device.type != "cuda":
            raise TopologyError(f"the rank's device is {device}, no GPU")
        # CUDA_VISIBLE_DEVICES has been applied: the device is one of those that this process sees.
        properties: Any = torch.cuda.get_device_properties(device)
        return pci_address(properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)

    def nvlink_island(self, device: torch.device) -> tuple[int, tuple[str, ...]]:
        """The number of the island that `device` is in, and the addresses of all GPUs that were numbered."""
        address = self.pci_address(device)
        addresses = parse_addresses(_output(ADDRESSES, self._timeout_s))
        topology = parse_topology(_output(TOPOLOGY, self._timeout_s))
        return island_of(topology, addresses, address), addresses


def _output(command: Sequence[str], timeout_s: float) -> str:
    """What a program prints. Raises `TopologyError` for one that is missing, fails, or does not end."""
    words = " ".join(command)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise TopologyError(f"there is no {command[0]} on PATH") from error
    except OSError as error:
        raise TopologyError(f"`{words}` cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise TopologyError(f"`{words}` has not ended after {timeout_s:g} s") from error
    if done.returncode != 0:
        said = " ".join((done.stdout + done.stderr).split())[:200]
        raise TopologyError(f"`{words}` ended with code {done.returncode}: {said or 'it printed nothing'}")
    return done.stdout


def _numa_of_process() -> int | None:
    lists = {
        int(path.parent.name.removeprefix("node")): path.read_text("utf-8")
        for path in (SYS / "devices/system/node").glob("node[0-9]*/cpulist")
    }
    return numa_node_of_processors(os.sched_getaffinity(0), lists)
