"""What machines say of themselves is read exactly, and what is not understood is refused."""

from pathlib import Path

import pytest

from charm_megatron.errors import ScheduleDisagreement, TopologyError
from charm_megatron.topology.discovery import domains_from_facts
from charm_megatron.topology.domain_file import load_groups, parse_groups
from charm_megatron.topology.from_launcher import domains_of_cp_groups, expand_counts, ranks_of_hosts
from charm_megatron.topology.nvidia_smi import island_of, parse_addresses, parse_topology
from charm_megatron.topology.places import (
    Place,
    RankFacts,
    domains_from_groups,
    domains_from_numa,
    parse_place,
)
from charm_megatron.topology.sysfs import cpu_list, numa_node, numa_node_of_processors, pci_address

pytestmark = pytest.mark.pure

# The form that nvidia-smi 5xx prints: tabs between columns, the header in escapes that underline.
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV4\tSYS\tSYS\tPIX\t0-15\t0\t\tN/A\n"
    "GPU1\tNV4\t X \tSYS\tSYS\tPXB\t0-15\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tNV4\tSYS\t16-31\t1\t\tN/A\n"
    "GPU3\tSYS\tSYS\tNV4\t X \tSYS\t16-31\tN/A\t\tN/A\n"
    "NIC0\tPIX\tPXB\tSYS\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n"
)


def test_a_table_of_nvidia_smi_is_read() -> None:
    topology = parse_topology(TOPOLOGY)
    assert topology.num_gpus == 4
    assert topology.links[0] == ("X", "NV4", "SYS", "SYS")
    assert topology.nvlink_islands == ((0, 1), (2, 3))
    assert topology.has_nvlink(2, 3)
    assert not topology.has_nvlink(1, 2)


def test_islands_reach_over_others() -> None:
    chain = "\tGPU0\tGPU1\tGPU2\nGPU0\tX\tSYS\tNV1\nGPU1\tSYS\tX\tNV1\nGPU2\tNV1\tNV1\tX\n"
    assert parse_topology(chain).nvlink_islands == ((0, 1, 2),)


# Older drivers, and hosts without NVLink.
WITHOUT_NVLINK = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-11\nGPU1\tPHB\t X \t0-11\n"
ONE_GPU = "\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\nGPU0\t X \t0-15\t0\t\tN/A\n"


def test_a_gpu_without_nvlink_is_an_island() -> None:
    assert parse_topology(WITHOUT_NVLINK).nvlink_islands == ((0,), (1,))
    assert parse_topology(ONE_GPU).nvlink_islands == ((0,),)


def test_gpus_behind_a_switch_are_one_island() -> None:
    names = [f"GPU{number}" for number in range(8)]
    rows = [
        "\t".join([name, *(" X " if other == name else "NV18" for other in names), "SYS\t0-55\t0\t\tN/A"])
        for name in names
    ]
    table = "\n".join(["\t".join(["", *names, "NIC0\tCPU Affinity\tNUMA Affinity"]), *rows])
    assert parse_topology(table).nvlink_islands == (tuple(range(8)),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "`nvidia-smi topo -m` printed no table of GPUs, but nothing"),
        ("\nNo devices were found\n", "printed no table of GPUs, but 'No devices were found' first"),
        ("\tGPU0\tGPU1\nGPU0\tX\nGPU1\tX\n", "printed no table of GPUs"),
        ("\tGPU0\nGPU0\tQPI\n", "connection 'QPI' of `nvidia-smi topo -m` is unknown; known: X, SYS"),
    ],
)
def test_another_text_is_no_table(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        parse_topology(text)


ADDRESSES = "0, 00000000:07:00.0\n1, 00000000:0B:00.0\n2, 00000000:48:00.0\n3, 00010000:4C:00.0\n"


def test_a_gpu_is_found_by_its_pci_address_whatever_cuda_calls_it() -> None:
    addresses = parse_addresses(ADDRESSES)
    assert addresses == ("0000:07:00.0", "0000:0b:00.0", "0000:48:00.0", "10000:4c:00.0")
    topology = parse_topology(TOPOLOGY)
    assert [island_of(topology, addresses, pci_address(0, bus, 0)) for bus in (0x48, 0x07, 0x0B)] == [1, 0, 0]
    with pytest.raises(
        TopologyError, match=r"GPU at 0000:99:00.0 is none of those that nvidia-smi lists: 0000:07"
    ):
        island_of(topology, addresses, "0000:99:00.0")
    with pytest.raises(TopologyError, match="lists 3 GPUs, but connects 4"):
        island_of(topology, addresses[:3], addresses[0])


@pytest.mark.parametrize("text", ["", "No devices were found\n", "1, 00000000:07:00.0\n", "0, [N/A]\n"])
def test_another_text_is_no_list_of_gpus(text: str) -> None:
    with pytest.raises(TopologyError, match=r"pci\.bus_id --format=csv,noheader` printed no list of GPUs"):
        parse_addresses(text)


def test_files_of_linux_are_read() -> None:
    assert pci_address(0, 0x1B, 0) == "0000:1b:00.0"
    assert (numa_node("1\n"), numa_node("-1\n")) == (1, None)
    assert cpu_list("0-2,8\n") == {0, 1, 2, 8}
    lists = {0: "0-3\n", 1: "4-7\n"}
    assert numa_node_of_processors([4, 5], lists) == 1
    assert numa_node_of_processors([3, 4], lists) is None
    for read, text in ((numa_node, "x"), (cpu_list, "1-x")):
        with pytest.raises(TopologyError, match="is not"):
            read(text)


def test_numbers_of_slurm_are_expanded() -> None:
    assert expand_counts("4(x2),3") == (4, 4, 3)
    with pytest.raises(TopologyError, match="'4x2' are not of the form"):
        expand_counts("4x2")


ALLOCATION = {"SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}


@pytest.mark.parametrize(
    ("environment", "counts"),
    [
        ({}, None),
        # sbatch or salloc, one starter a node.
        (ALLOCATION, (4, 4)),
        # The shell of salloc is a step of its own on many clusters, on one node.
        ({**ALLOCATION, "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NUM_NODES": "1"}, (4, 4)),
        ({"SLURM_JOB_NUM_NODES": "3", "SLURM_TASKS_PER_NODE": "1(x3)"}, None),
        # srun starts the ranks themselves, on a part of the job.
        ({"SLURM_JOB_NUM_NODES": "3", "SLURM_STEP_TASKS_PER_NODE": "5,3"}, (5, 3)),
        ({**ALLOCATION, "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_DISTRIBUTION": "block:cyclic"}, (4, 4)),
        ({**ALLOCATION, "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_DISTRIBUTION": "cyclic"}, None),
        # torchrun, in an allocation and without.
        ({**ALLOCATION, "LOCAL_WORLD_SIZE": "2"}, (2, 2, 2, 2)),
        ({"LOCAL_WORLD_SIZE": "3"}, None),
        ({"LOCAL_WORLD_SIZE": "8"}, (8,)),
    ],
)
def test_starters_say_how_many_of_eight_ranks_a_host_will_run(
    environment: dict[str, str], counts: tuple[int, ...] | None
) -> None:
    assert ranks_of_hosts(environment, 8) == counts


@pytest.mark.parametrize(
    ("counts", "cp_size", "tp_size", "domains"),
    [
        ((4, 4), 8, 1, ["0 1 2 3 | 4 5 6 7"]),
        ((4, 4), 4, 1, ["0 1 2 3"]),
        # Ranks of a group are two apart.
        ((4, 4), 4, 2, ["0 1 | 2 3"]),
        # One rank of a group on each host.
        ((2, 2), 2, 2, ["0 | 1"]),
        ((1, 1, 1), 3, 1, ["0 | 1 | 2"]),
        # Groups that differ: ranks 0 to 3 are on one host, ranks 4 to 7 on two.
        ((6, 2), 4, 1, ["0 1 2 3", "0 1 | 2 3"]),
        ((5, 3), 8, 1, ["0 1 2 3 4 | 5 6 7"]),
    ],
)
def test_groups_of_megatron_fall_into_hosts(
    counts: tuple[int, ...], cp_size: int, tp_size: int, domains: list[str]
) -> None:
    assert [str(found) for found in domains_of_cp_groups(counts, cp_size, tp_size)] == domains


PLACES = [Place("a", 0), Place("a", 1), Place("b", 0), Place("b", 1)]


def test_places_are_written_as_they_are_read() -> None:
    for place in (Place("a"), *PLACES):
        assert parse_place(str(place)) == place
    with pytest.raises(TopologyError, match="is not HOST or HOST:NUMA"):
        parse_place("a b")


def test_domains_follow_from_numa_nodes() -> None:
    assert str(domains_from_numa([*PLACES, *PLACES])) == "0 4 | 1 5 | 2 6 | 3 7"
    with pytest.raises(TopologyError, match="ranks 1 do not know their NUMA node"):
        domains_from_numa([PLACES[0], Place("a")])


def test_a_file_says_which_hosts_are_together() -> None:
    groups = parse_groups("domains: [[a, b:0], [b:1]]", "f.yaml")
    assert str(domains_from_groups(PLACES, groups)) == "0 1 2 | 3"
    # One rank a host: domains of one rank each.
    assert str(domains_from_groups([Place("a", 0), Place("b", 1)], groups)) == "0 | 1"
    with pytest.raises(TopologyError, match="rank 0 runs on c, which is in no group"):
        domains_from_groups([Place("c")], groups)
    with pytest.raises(TopologyError, match="rank 0 runs on a:0, which is in groups 1 and 2"):
        domains_from_groups(PLACES, parse_groups("domains: [[a], [a:0, b]]", "f.yaml"))


@pytest.mark.parametrize(
    "text", ["", "a: [[x]]", "domains: x", "domains: [a, b]", "domains: [[a], b]", "domains: ["]
)
def test_another_file_is_none_of_domains(text: str) -> None:
    with pytest.raises(TopologyError, match=r"f\.yaml is not"):
        parse_groups(text, "f.yaml")


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(TopologyError, match=r"cannot read file of domains .*absent\.yaml: No such file"):
        load_groups(tmp_path / "absent.yaml")


def test_a_file_of_another_encoding_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"domains: [[\xe9]]")
    with pytest.raises(TopologyError, match=r"latin\.yaml is not text in UTF-8"):
        load_groups(tmp_path / "latin.yaml")


def facts_of(rule: str, *words: str, nodes: tuple[str | None, ...] = ()) -> list[RankFacts]:
    names = nodes or (None,) * len(words)
    return [
        RankFacts(rule, parse_place(word), slurm_node=node) for word, node in zip(words, names, strict=True)
    ]


@pytest.mark.parametrize(
    ("words", "domains"),
    [
        (("a:0", "a:0", "a:1", "a:1"), "0 1 | 2 3"),
        # In any order, and with islands of the same number on several hosts.
        (("a:1", "b:0", "a:0", "b:0", "a:1"), "0 4 | 1 3 | 2"),
        # One rank an island.
        (("a:0", "a:1", "b:0"), "0 | 1 | 2"),
        (("a:3",), "0"),
    ],
)
def test_domains_follow_from_islands(words: tuple[str, ...], domains: str) -> None:
    found, reason = domains_from_facts(facts_of("nvlink", *words))
    assert str(found) == domains
    assert reason == f"one per NVLink island: {' '.join(words)}"


def test_ranks_of_a_host_that_see_other_gpus_have_no_common_islands() -> None:
    seen = [
        RankFacts("nvlink", Place(host, 0), gpus=(gpu,)) for host, gpu in (("a", "x"), ("b", "y"), ("a", "z"))
    ]
    with pytest.raises(
        TopologyError, match=r"on a see different GPUs .*\(rank 0: x; rank 2: z\).*--gpus-per-node"
    ):
        domains_from_facts(seen)
    assert str(domains_from_facts(seen[:2])[0]) == "0 | 1"


def test_a_rank_that_does_not_know_its_place_is_named_with_what_would_work() -> None:
    lost = RankFacts("nvlink", Place("b"), problem="there is no nvidia-smi on PATH")
    known = RankFacts("nvlink", Place("a", 0))
    with pytest.raises(
        TopologyError,
        match=r"^charm\.domains: nvlink does not work on context-parallel rank 1, on b: there is no nvidia-smi on "
        "PATH; set it to hosts, numa, a number or a file of domains$",
    ):
        domains_from_facts([known, lost])
    with pytest.raises(TopologyError, match=r"rank 0, on b: .* on PATH; also ranks 2, 3; set it"):
        domains_from_facts([lost, known, lost, lost])


def test_ranks_with_different_settings_are_named() -> None:
    with pytest.raises(ScheduleDisagreement, match=r"charm\.domains: rank 0: hosts; rank 2: 2"):
        domains_from_facts([*facts_of("hosts", "a", "a"), *facts_of("2", "a")])
    files = [
        RankFacts("f.yaml", Place("a"), parse_groups(text, "f"))
        for text in ("domains: [[a]]", "domains: [[a], [b]]")
    ]
    with pytest.raises(ScheduleDisagreement, match=r"rank 0: f\.yaml \[a\]; rank 1: f\.yaml \[a\] \[b\]"):
        domains_from_facts(files)


def test_slurm_and_hostnames_that_disagree_are_shown() -> None:
    _, same = domains_from_facts(facts_of("hosts", "n1.site", "n2.site", nodes=("n1", "n2")))
    assert same == "one per host"
    domains, reason = domains_from_facts(
        facts_of("hosts", *("localhost",) * 4, nodes=("n1", "n1", "n2", "n2"))
    )
    assert str(domains) == "0 1 2 3"
    assert reason == (
        "one per host; but SLURM's nodes are [0 1 | 2 3]: hostnames localhost, SLURMD_NODENAME n1 n2"
    )
    _, mixed = domains_from_facts(facts_of("hosts", "a", "b", nodes=("n1", None)))
    assert mixed == "one per host"
    _, number = domains_from_facts(facts_of("2", "a", "a", nodes=("n1", "n2")))
    assert number == "as set by charm.domains: 2"
