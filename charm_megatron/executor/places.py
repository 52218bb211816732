"""What a rank knows of its own place: host, and NUMA node of its device. Files and devices are read here only."""

import os
import socket
from pathlib import Path
from typing import Any

import torch

from charm_megatron.topology import Place
from charm_megatron.topology.sysfs import numa_node, numa_node_of_processors, pci_address

SYS = Path("/sys")


def place_of_this_rank(device: torch.device) -> Place:
    """The place of `device`; on a CPU, of the processors that this process may use."""
    numa = _numa_of_cuda(device) if device.type == "cuda" else _numa_of_process()
    return Place(socket.gethostname(), numa)


def _numa_of_cuda(device: torch.device) -> int | None:
    # CUDA_VISIBLE_DEVICES has been applied: the device is one of those that this process sees.
    properties: Any = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):
        return None  # an older torch
    address = pci_address(properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    path = SYS / "bus/pci/devices" / address / "numa_node"
    return numa_node(path.read_text("utf-8")) if path.exists() else None


def _numa_of_process() -> int | None:
    lists = {
        int(path.parent.name.removeprefix("node")): path.read_text("utf-8")
        for path in (SYS / "devices/system/node").glob("node[0-9]*/cpulist")
    }
    return numa_node_of_processors(os.sched_getaffinity(0), lists)
