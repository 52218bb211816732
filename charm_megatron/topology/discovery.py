"""What all ranks of a group know of their places -> the domains of all, and why these."""

from collections.abc import Sequence

from charm_megatron.errors import ScheduleDisagreement, TopologyError, shortened
from charm_megatron.limits import MOST_RANKS
from charm_megatron.reading import whole_number
from charm_megatron.topology.domains import Domains, domains_from_hosts, even_domains
from charm_megatron.topology.places import (
    Place,
    RankFacts,
    domains_from_groups,
    domains_from_islands,
    domains_from_numa,
)

MOST_DECLARED_CHARACTERS, MOST_PROBLEM_CHARACTERS = 50, 150
"""In the message that says on which rank charm.domains does not work; the latter of both together."""


def domains_from_facts(facts: Sequence[RankFacts]) -> tuple[Domains, str]:
    """The domains that follow from `facts[cp_rank]` of all ranks, and the reason for the receipt.

    Pure, and the words are the same everywhere: so are domains, reason and error. Raises `ScheduleDisagreement`
    where ranks were given different settings or files, `TopologyError` where one does not know its place.
    """
    settings = {(one.declared, one.groups): rank for rank, one in reversed(list(enumerate(facts)))}
    if len(settings) > 1:
        listed = "; ".join(
            f"rank {rank}: {declared}{_groups_text(groups)}"
            for (declared, groups), rank in sorted(settings.items(), key=lambda item: item[1])
        )
        raise ScheduleDisagreement(
            f"the ranks of a context-parallel group have different charm.domains: {listed}"
        )
    _require_known(facts)
    domains, reason = _by_rule(facts)
    return domains, reason + _slurm_differs(facts)


def _by_rule(facts: Sequence[RankFacts]) -> tuple[Domains, str]:
    declared, places = facts[0].declared, [one.place for one in facts]
    words = " ".join(map(str, places))
    number = whole_number(declared, MOST_RANKS)
    if number is not None:
        return even_domains(len(facts), number), f"as set by charm.domains: {declared}"
    match declared:
        case "hosts":
            return domains_from_hosts([place.host for place in places]), "one per host"
        case "numa":
            return domains_from_numa(places), f"one per NUMA node: {words}"
        case "nvlink":
            return domains_from_islands(facts), f"one per NVLink island: {words}"
        case path:
            return domains_from_groups(places, facts[0].groups), f"as {path} says: {words}"


def _require_known(facts: Sequence[RankFacts]) -> None:
    problems = {rank: one.problem for rank, one in enumerate(facts) if one.problem is not None}
    if not problems:
        return
    first = min(problems)
    others = f"; also ranks {', '.join(map(str, list(problems)[1:]))}" if len(problems) > 1 else ""
    rules = ", ".join(rule for rule in ("hosts", "numa", "nvlink") if rule != facts[first].declared)
    declared = shortened(facts[first].declared, MOST_DECLARED_CHARACTERS)
    problem = shortened(problems[first], MOST_PROBLEM_CHARACTERS - len(declared))
    raise TopologyError(
        f"charm.domains: {declared} does not work on context-parallel rank {first}, on "
        f"{facts[first].place.host}: {problem}{others}; set it to {rules}, a number or a file of domains"
    )


def _slurm_differs(facts: Sequence[RankFacts]) -> str:
    """Returns a warning where SLURM and the hosts' own names split the ranks differently: one must be mistaken.

    Machines of one name look like one host, containers with names of their own on one machine like several.
    """
    nodes = [one.slurm_node for one in facts if one.slurm_node is not None]
    if len(nodes) < len(facts) or facts[0].declared.isdecimal():
        return ""
    hosts = [one.place.host for one in facts]
    by_slurm = domains_from_hosts(nodes)
    if by_slurm == domains_from_hosts(hosts):
        return ""
    return f"; but SLURM's nodes are [{by_slurm}]: hostnames {_names(hosts)}, SLURMD_NODENAME {_names(nodes)}"


def _names(names: Sequence[str]) -> str:
    return " ".join(dict.fromkeys(names))


def _groups_text(groups: Sequence[Sequence[Place]]) -> str:
    return "".join(f" [{' '.join(map(str, group))}]" for group in groups)
