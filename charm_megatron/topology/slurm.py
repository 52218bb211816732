"""Which host runs which rank, from the variables that SLURM gives a job; to plan where nothing runs yet."""

import re
from collections.abc import Iterator, Mapping

from charm_megatron.errors import TopologyError

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def hosts_of_ranks(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The host of every task of a job step, in the order of ranks.

    For SLURM's default distribution, block: the tasks of a host have consecutive ranks.
    """
    hosts = expand_hosts(_variable(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    counts = expand_counts(_variable(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if len(hosts) != len(counts):
        raise TopologyError(f"SLURM lists {len(hosts)} hosts, but numbers of tasks for {len(counts)}")
    distribution = environment.get("SLURM_DISTRIBUTION", "block").split(":")[0].split(",")[0]
    if distribution != "block":
        raise TopologyError(f"SLURM_DISTRIBUTION {distribution!r} is not understood, only 'block' is")
    return tuple(host for host, count in zip(hosts, counts, strict=True) for _ in range(count))


def _variable(environment: Mapping[str, str], *names: str) -> str:
    for name in names:
        if environment.get(name):
            return environment[name]
    raise TopologyError(f"none of {', '.join(names)} is set; this is no SLURM job")


def expand_counts(text: str) -> tuple[int, ...]:
    """Reads numbers for each host, such as 4(x2),3 for 4, 4 and 3."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise TopologyError(f"numbers of tasks {text!r} are not of the form 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def expand_hosts(text: str) -> tuple[str, ...]:
    """Reads a list of hosts, such as login,node[01-03,7]-ib, as `scontrol show hostnames` does."""
    return tuple(host for part in _parts(text) for host in _expand(part, text))


def _parts(text: str) -> Iterator[str]:
    """Splits at commas outside brackets."""
    depth, start = 0, 0
    for index, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            yield text[start:index]
            start = index + 1
    if depth or not text[start:]:
        raise TopologyError(f"list of hosts {text!r} is not of the form login,node[01-03,7]")
    yield text[start:]


def _expand(part: str, text: str) -> Iterator[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([\d,-]+)\](.*)", part)
    if match is None:
        if "[" in part or "]" in part:
            raise TopologyError(f"list of hosts {text!r} is not of the form login,node[01-03,7]")
        yield part
        return
    head, numbers, tail = match.groups()
    for span in numbers.split(","):
        first, _, last = span.partition("-")
        for number in range(int(first), int(last or first) + 1):
            for rest in _expand(tail, text):
                yield f"{head}{number:0{len(first)}d}{rest}"
