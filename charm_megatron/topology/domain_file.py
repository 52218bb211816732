"""A file that says which hosts, or NUMA nodes of hosts, share fast links; where no rank can find that out.

For two hosts behind one NVLink switch, and a host whose NUMA nodes are domains of their own:
`domains: [[node1, node2], [node3:0], [node3:1]]`.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from charm_megatron.errors import TopologyError
from charm_megatron.limits import MOST_YAML_BYTES
from charm_megatron.reading import parse_yaml, path_text, read_text
from charm_megatron.topology.places import Groups, parse_place


def load_groups(path: Path) -> Groups:
    """Reads the file. Raises `TopologyError` where it cannot be read, or is not of this form."""
    name = f"file of domains {path_text(path)}"
    return parse_groups(read_text(path, name, MOST_YAML_BYTES, TopologyError), path_text(path))


def parse_groups(text: str, source: str) -> Groups:
    """The groups that the text of a file lists."""
    data: Any = parse_yaml(text, source, TopologyError)
    groups = data.get("domains") if isinstance(data, dict) and set(data) == {"domains"} else None
    if not isinstance(groups, list) or not groups or not all(isinstance(group, list) for group in groups):
        raise TopologyError(
            f"{source} is not one key, domains, with a list of lists of hosts, such as "
            f"domains: [[node1, node2], [node3:0], [node3:1]]"
        )
    read = tuple(tuple(parse_place(str(word)) for word in group) for group in groups)
    if not all(read):
        raise TopologyError(
            f"{source}: domain {read.index(()) + 1} of {len(read)} lists no host; leave it out"
        )
    for place, times in Counter(place for group in read for place in group).items():
        if times > 1:
            raise TopologyError(
                f"{source} lists {place} {times} times; name each host, or each HOST:NUMA, once"
            )
    return read
