"""Reads what Linux and CUDA say of the place of a device and of a process. Text in, data out."""

from collections.abc import Iterable, Mapping

from charm_megatron.errors import TopologyError, quoted
from charm_megatron.limits import MOST_PROCESSORS
from charm_megatron.reading import whole_number


def pci_address(domain: int, bus: int, device: int) -> str:
    """The name of a device's folder in /sys/bus/pci/devices. GPUs are function 0."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def numa_node(text: str) -> int | None:
    """The content of a device's file numa_node; None for -1, where the machine does not say."""
    if text.strip() == "-1":
        return None
    number = whole_number(text.strip(), MOST_PROCESSORS)
    if number is None:
        raise TopologyError(f"numa_node {quoted(text)} is not a number")
    return number


def cpu_list(text: str) -> frozenset[int]:
    """Reads Linux's lists of processors, such as 0-3,8."""
    processors: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        start, _, end = part.partition("-")
        first, last = (whole_number(number, MOST_PROCESSORS) for number in (start, end or start))
        if first is None or last is None:
            raise TopologyError(
                f"list of processors {quoted(text.strip())} is not numbers and ranges, such as 0-3,8"
            )
        processors.update(range(first, last + 1))
    return frozenset(processors)


def numa_node_of_processors(allowed: Iterable[int], cpu_lists: Mapping[int, str]) -> int | None:
    """The NUMA node that holds all processors a process may use; None where they are of several.

    `cpu_lists[node]` is the content of /sys/devices/system/node/node<N>/cpulist.
    """
    processors = set(allowed)
    nodes = [node for node, text in sorted(cpu_lists.items()) if processors & cpu_list(text)]
    return nodes[0] if len(nodes) == 1 else None
