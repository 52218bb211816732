"""Reads what nvidia-smi prints: the GPUs of a host, and how they are connected.

nvidia-smi knows nothing of CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER: it numbers all GPUs by their place on the PCI
bus, CUDA those that it may see by its own order. What both call alike is a GPU's PCI address, also that of the GPU
of a MIG slice.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from charm_megatron.errors import TopologyError, quoted
from charm_megatron.topology.sysfs import pci_address

TOPOLOGY = ("nvidia-smi", "topo", "-m")
CAPABILITIES = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
ADDRESSES = ("nvidia-smi", "--query-gpu=index,pci.bus_id", "--format=csv,noheader")

LINKS = ("X", "SYS", "NODE", "PHB", "PXB", "PIX")
"""The legend that nvidia-smi prints below its table; NV# stands for # bonded NVLinks."""

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_ADDRESS = re.compile(r"([0-9]{1,4}), ([0-9A-F]{1,8}):([0-9A-F]{1,4}):([0-9A-F]{1,4})\.0", re.IGNORECASE)


@dataclass(frozen=True)
class GpuTopology:
    """`links[i][j]` is the connection of GPU i to GPU j: one of `LINKS`, or NV1, NV2, ..; "X" is itself."""

    links: tuple[tuple[str, ...], ...]

    @property
    def num_gpus(self) -> int:
        return len(self.links)

    def has_nvlink(self, gpu: int, other: int) -> bool:
        """Whether two GPUs are connected by NVLink, directly or through a switch."""
        return self.links[gpu][other].startswith("NV")

    @property
    def nvlink_islands(self) -> tuple[tuple[int, ...], ...]:
        """The GPUs that NVLink connects, directly or over others of the island; ascending."""
        islands: list[set[int]] = []
        for gpu in range(self.num_gpus):
            linked = {gpu} | {other for other in range(self.num_gpus) if self.has_nvlink(gpu, other)}
            joined = [island for island in islands if island & linked]
            islands = [island for island in islands if not island & linked] + [linked.union(*joined)]
        return tuple(sorted(tuple(sorted(island)) for island in islands))


def least_capability(text: str) -> float | None:
    """The least compute capability that `CAPABILITIES` prints, such as 9.0; None where it prints none."""
    found = [float(line) for line in text.splitlines() if re.fullmatch(r"[0-9]{1,3}\.[0-9]", line.strip())]
    return min(found, default=None)


def parse_topology(text: str) -> GpuTopology:
    """Reads the table of `TOPOLOGY`. Raises `TopologyError` for no table, and an unknown kind of connection."""
    lines = [_ESCAPES.sub("", line) for line in text.splitlines()]
    rows = [line.split() for line in lines if re.match(r"GPU[0-9]+\s", line)]
    has_header = any(re.match(r"\s+GPU0\b", line) for line in lines)
    links = tuple(tuple(row[1 : len(rows) + 1]) for row in rows)
    if not has_header or not rows or {len(row) for row in links} != {len(rows)}:
        raise TopologyError(f"`{' '.join(TOPOLOGY)}` printed no table of GPUs{_first_line(lines)}")
    for row in links:
        for link in row:
            if link not in LINKS and not re.fullmatch(r"NV[0-9]+", link):
                raise TopologyError(
                    f"connection {quoted(link)} of `{' '.join(TOPOLOGY)}` is unknown; known: {', '.join(LINKS)}, NV#"
                )
    return GpuTopology(links)


def parse_addresses(text: str) -> tuple[str, ...]:
    """Reads what `ADDRESSES` prints: the PCI address of every GPU, in nvidia-smi's order, as sysfs writes it."""
    lines = text.splitlines()
    matches = [_ADDRESS.fullmatch(line.strip()) for line in lines]
    found = [match.groups() for match in matches if match is not None]
    if not found or len(found) != len(lines) or [int(one[0]) for one in found] != list(range(len(found))):
        raise TopologyError(f"`{' '.join(ADDRESSES)}` printed no list of GPUs{_first_line(lines)}")
    return tuple(pci_address(*(int(part, 16) for part in one[1:])) for one in found)


def island_of(topology: GpuTopology, addresses: Sequence[str], address: str) -> int:
    """The number of the NVLink island that holds the GPU at PCI address `address`, of those of its host."""
    if len(addresses) != topology.num_gpus:
        raise TopologyError(f"nvidia-smi lists {len(addresses)} GPUs, but connects {topology.num_gpus}")
    if address not in addresses:
        raise TopologyError(
            f"the rank's GPU at {address} is none of those that nvidia-smi lists: {', '.join(addresses)}"
        )
    gpu = addresses.index(address)
    return next(number for number, island in enumerate(topology.nvlink_islands) if gpu in island)


def _first_line(lines: Sequence[str]) -> str:
    """What was printed instead, for messages."""
    first = next((line.strip() for line in lines if line.strip()), None)
    return ", but nothing" if first is None else f", but {first[:80]!r} first"
