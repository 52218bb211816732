"""Which ranks share a host, before any of them runs: from what torchrun and SLURM tell their processes.

For checks ahead only: ranks that run find out themselves where they are.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from charm_megatron.errors import TopologyError, quoted
from charm_megatron.limits import MOST_JOB_RANKS, MOST_LAUNCHER_CHARACTERS
from charm_megatron.reading import whole_number
from charm_megatron.topology.domains import Domains, domains_from_hosts

_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def ranks_of_hosts(environment: Mapping[str, str], num_ranks: int) -> tuple[int, ...] | None:
    """How many of a job's ranks each host runs, where ranks are numbered host by host; None where that is unknown.

    torchrun says how many ranks it starts per node. Where SLURM's tasks are as many as ranks, srun starts the ranks.
    Otherwise something like torchrun does, once per node of the job.
    """
    per_host = _number(environment, "LOCAL_WORLD_SIZE")
    if per_host:
        return None if num_ranks % per_host else (per_host,) * (num_ranks // per_host)
    # A step that holds less than the job, as the shell of salloc does on many clusters, counts where it fits alone.
    for variable in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        counts = expand_counts(environment[variable]) if environment.get(variable) else ()
        if sum(counts) == num_ranks:
            return counts if _is_by_block(environment) else None
    num_hosts = _number(environment, "SLURM_JOB_NUM_NODES")
    if not num_hosts or num_ranks % num_hosts:
        return None
    return (num_ranks // num_hosts,) * num_hosts


def expand_counts(text: str) -> tuple[int, ...]:
    """Reads SLURM's numbers of tasks for each host, such as 4(x2),3 for 4, 4 and 3."""
    counts: list[int] = []
    if len(text) > MOST_LAUNCHER_CHARACTERS:
        raise TopologyError(
            f"SLURM's numbers of tasks have more than {MOST_LAUNCHER_CHARACTERS:,} characters: {quoted(text)}"
        )
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise TopologyError(f"SLURM's numbers of tasks {quoted(text)} are not of the form 4(x2),3")
        tasks, hosts = (whole_number(number or "1", MOST_JOB_RANKS) for number in match.groups())
        if tasks is None or hosts is None or len(counts) + hosts > MOST_JOB_RANKS:
            raise TopologyError(
                f"SLURM's numbers of tasks {quoted(text)} are of more than {MOST_JOB_RANKS:,} hosts or tasks"
            )
        counts += [tasks] * hosts
    return tuple(counts)


def domains_of_cp_groups(counts: Sequence[int], cp_size: int, tp_size: int) -> tuple[Domains, ...]:
    """One domain per host, for each kind of context-parallel group that Megatron makes: each once, in order of rank.

    Megatron numbers tensor-parallel ranks first, then context-parallel ones (its `--use-tp-pp-dp-mapping` too); so
    the ranks of a group are `tp_size` apart.
    """
    hosts = [str(host) for host, count in enumerate(counts) for _ in range(count)]
    groups = _cp_groups(len(hosts), cp_size, tp_size)
    return tuple(dict.fromkeys(domains_from_hosts([hosts[rank] for rank in group]) for group in groups))


def _cp_groups(num_ranks: int, cp_size: int, tp_size: int) -> Iterator[range]:
    for start in range(0, num_ranks, tp_size * cp_size):
        for first in range(start, start + tp_size):
            yield range(first, first + tp_size * cp_size, tp_size)


def _number(environment: Mapping[str, str], variable: str) -> int:
    """0 where it is not set, or no number of ranks or hosts."""
    return whole_number(environment.get(variable, ""), MOST_JOB_RANKS) or 0


def _is_by_block(environment: Mapping[str, str]) -> bool:
    """Whether the tasks of a host have consecutive numbers, SLURM's default."""
    return re.split("[:,]", environment.get("SLURM_DISTRIBUTION", "block"))[0] == "block"
