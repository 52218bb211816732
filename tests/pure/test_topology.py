"""What machines say of themselves is read exactly, and what is not understood is refused."""

import pytest

from charm_megatron.errors import TopologyError
from charm_megatron.topology import Place, domains_from_groups, domains_from_numa, parse_place
from charm_megatron.topology.domain_file import load_groups, parse_groups
from charm_megatron.topology.nvidia_smi import parse_topology
from charm_megatron.topology.slurm import expand_counts, expand_hosts, hosts_of_ranks
from charm_megatron.topology.sysfs import (
    cpu_list,
    numa_node,
    numa_node_of_processors,
    pci_address,
    visible_devices,
)

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
    assert topology.numa == (0, 0, 1, None)
    assert topology.nvlink_islands == ((0, 1), (2, 3))
    assert topology.has_nvlink(2, 3)
    assert not topology.has_nvlink(1, 2)


def test_islands_reach_over_others() -> None:
    chain = "\tGPU0\tGPU1\tGPU2\nGPU0\tX\tSYS\tNV1\nGPU1\tSYS\tX\tNV1\nGPU2\tNV1\tNV1\tX\n"
    assert parse_topology(chain).nvlink_islands == ((0, 1, 2),)


@pytest.mark.parametrize(("text", "message"), [("", "no table of GPUs"), ("\tGPU0\nGPU0\tQPI\n", "'QPI'")])
def test_another_text_is_no_table(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        parse_topology(text)


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        (None, ("0", "1", "2", "3")),
        ("", ()),
        ("2,0", ("2", "0")),
        ("1,7,0", ("1",)),
        ("-1", ()),
        ("GPU-ab12,MIG-cd34", ("GPU-ab12", "MIG-cd34")),
    ],
)
def test_visible_devices_end_at_the_first_that_is_none(text: str | None, devices: tuple[str, ...]) -> None:
    assert visible_devices(text, 4) == devices


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


def test_hosts_of_slurm_are_expanded() -> None:
    assert expand_hosts("login,node[08-10,2]-ib,x[1-2]y[3,4]") == (
        *("login", "node08-ib", "node09-ib", "node10-ib", "node2-ib", "x1y3", "x1y4", "x2y3", "x2y4"),
    )
    assert expand_counts("4(x2),3") == (4, 4, 3)
    for expand, text in (
        (expand_hosts, "a[1"),
        (expand_hosts, "a[b]"),
        (expand_hosts, "a,"),
        (expand_counts, "4x2"),
    ):
        with pytest.raises(TopologyError, match="not of the form"):
            expand(text)


def test_ranks_of_a_slurm_job_have_hosts() -> None:
    job = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    assert hosts_of_ranks(job) == ("n1", "n1", "n2", "n2", "n3")
    step = {**job, "SLURM_STEP_NODELIST": "n3", "SLURM_STEP_TASKS_PER_NODE": "2"}
    assert hosts_of_ranks(step) == ("n3", "n3")
    with pytest.raises(TopologyError, match="this is no SLURM job"):
        hosts_of_ranks({})
    with pytest.raises(TopologyError, match="3 hosts, but numbers of tasks for 1"):
        hosts_of_ranks({**job, "SLURM_TASKS_PER_NODE": "2"})
    with pytest.raises(TopologyError, match="'cyclic' is not understood"):
        hosts_of_ranks({**job, "SLURM_DISTRIBUTION": "cyclic"})


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
    with pytest.raises(TopologyError, match=r"absent\.yaml cannot be read: No such file"):
        load_groups(tmp_path / "absent.yaml")
