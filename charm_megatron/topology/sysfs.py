"""Reads what Linux and CUDA say of the place of a device and of a process. Text in, data out."""

from collections.abc import Iterable, Mapping

from charm_megatron.errors import TopologyError


def pci_address(domain: int, bus: int, device: int) -> str:
    """The name of a device's folder in /sys/bus/pci/devices. GPUs are function 0."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def numa_node(text: str) -> int | None:
    """The content of a device's file numa_node; None for -1, where the machine does not say."""
    try:
        number = int(text)
    except ValueError as error:
        raise TopologyError(f"numa_node {text!r} is not a number") from error
    return None if number < 0 else number


def cpu_list(text: str) -> frozenset[int]:
    """Reads Linux's lists of processors, such as 0-3,8."""
    processors: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise TopologyError(
                f"list of processors {text.strip()!r} is not numbers and ranges, such as 0-3,8"
            )
        processors.update(range(int(first), int(last or first) + 1))
    return frozenset(processors)


def numa_node_of_processors(allowed: Iterable[int], cpu_lists: Mapping[int, str]) -> int | None:
    """The NUMA node that holds all processors a process may use; None where they are of several.

    `cpu_lists[node]` is the content of /sys/devices/system/node/node<N>/cpulist.
    """
    processors = set(allowed)
    nodes = [node for node, text in sorted(cpu_lists.items()) if processors & cpu_list(text)]
    return nodes[0] if len(nodes) == 1 else None
