"""Reads what `nvidia-smi topo -m` prints: how the GPUs of a host are connected."""

import re
from dataclasses import dataclass

from charm_megatron.errors import TopologyError

LINKS = ("X", "SYS", "NODE", "PHB", "PXB", "PIX")
"""The legend that nvidia-smi prints below its table; NV# stands for # bonded NVLinks."""

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class GpuTopology:
    """`links[i][j]` is the connection of GPU i to GPU j: one of `LINKS`, or NV1, NV2, ..; "X" is itself.

    `numa[i]` is the NUMA node of GPU i, None where nvidia-smi says N/A.
    """

    links: tuple[tuple[str, ...], ...]
    numa: tuple[int | None, ...]

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


def parse_topology(text: str) -> GpuTopology:
    """Reads the table. Raises `TopologyError` where it holds no GPU, or an unknown kind of connection."""
    lines = [_ESCAPES.sub("", line) for line in text.splitlines()]
    rows = [line.split("\t") for line in lines if re.match(r"GPU\d+\s", line)]
    header = next((line for line in lines if re.match(r"\s+GPU0\b", line)), None)
    if header is None or not rows:
        raise TopologyError("this is no output of `nvidia-smi topo -m`: it has no table of GPUs")
    names = [name.strip() for name in header.split("\t")]
    links = tuple(tuple(cell.strip() for cell in row[1 : len(rows) + 1]) for row in rows)
    for row in links:
        for link in row:
            if link not in LINKS and not re.fullmatch(r"NV\d+", link):
                raise TopologyError(
                    f"connection {link!r} of `nvidia-smi topo -m` is unknown; known: {', '.join(LINKS)}, NV#"
                )
    numa = tuple(_numa(row, names) for row in rows)
    return GpuTopology(links, numa)


def _numa(row: list[str], names: list[str]) -> int | None:
    column = names.index("NUMA Affinity") if "NUMA Affinity" in names else len(row)
    cell = row[column].strip() if column < len(row) else ""
    first = re.match(r"\d+", cell)
    return int(first.group()) if first else None
