"""What `charm-megatron doctor` concludes: from versions, environments and measurements that are made up."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from charm_megatron.cli.main import app
from charm_megatron.doctor.apex import is_nvidias_apex
from charm_megatron.doctor.findings import Finding, has_fault
from charm_megatron.doctor.packages import (
    DISTRIBUTIONS,
    package_findings,
    ranks_text,
    version_differences,
)
from charm_megatron.doctor.places import RankTold, merged_settings, place_findings
from charm_megatron.doctor.probe import probe
from charm_megatron.doctor.settings import SETTINGS, nccl_interfaces, settings_findings
from charm_megatron.doctor.verdicts import (
    PairMeasured,
    better_of,
    latency_text,
    link_findings,
    rate_text,
    summaries,
    suspects,
)
from charm_megatron.topology import even_domains, one_domain

pytestmark = pytest.mark.pure

TORCH = {"problem": None, "cuda": "13.0", "gpus": ["H100", "H100"], "nccl": "2.30.7", "gloo": True}
WELL: dict[str, Any] = {
    "torch": TORCH,
    "transformer-engine": {"problem": None},
    "flash-attn": {"problem": None},
    "apex": {"problem": None, "is_nvidias": True},
}
VERSIONS: dict[str, str | None] = {
    "torch": "2.11.0+cu130",
    "megatron-core": "0.19.2",
    "transformer-engine": "2.20.2",
    "flash-attn": "2.8.3",
    "apex": "0.1",
    "psutil": "7.0",
}


def packages(versions: dict[str, str | None], facts: dict[str, Any]) -> dict[str, Finding]:
    return {one.name: one for one in package_findings(VERSIONS | versions, lambda name: (WELL | facts)[name])}


# ---------------------------------------------------------------------- packages


def test_all_packages_that_work_are_well_and_gpus_are_counted() -> None:
    found = packages({}, {})
    assert {one.verdict for one in found.values()} == {"ok"}
    assert found["GPUs"].found == "2 x H100"


def test_what_is_optional_may_be_absent_and_says_how_to_get_it() -> None:
    found = packages(dict.fromkeys(DISTRIBUTIONS[1:]), {})
    assert not has_fault(found.values())
    assert all(found[name].verdict == "absent" and found[name].remedy for name in DISTRIBUTIONS[1:])


def test_without_gpus_or_cuda_nothing_is_wrong() -> None:
    found = packages({}, {"torch": TORCH | {"cuda": None, "gpus": [], "nccl": None}})
    assert not has_fault(found.values())
    assert [name for name, one in found.items() if one.verdict == "absent"] == [
        "CUDA of torch",
        "GPUs",
        "NCCL",
    ]


@pytest.mark.parametrize(
    ("name", "installed", "facts", "words"),
    [
        ("torch", None, {}, "attention needs it"),
        ("torch", "2.10.1", {}, "2.11 or newer"),
        ("torch", "2.11", {"torch": {"problem": "ImportError: libcudart"}}, "libcudart"),
        ("megatron-core", "0.16.0", {}, ">=0.16.1,<0.20"),
        ("megatron-core", "0.20.0", {}, ">=0.16.1,<0.20"),
        ("megatron-core", "main", {}, "not a version number"),
        ("transformer-engine", "2.8", {}, ">=2.9,<2.21"),
        ("transformer-engine", "2.20", {"transformer-engine": {"problem": "OSError: libnccl"}}, "libnccl"),
        ("flash-attn", "2.8", {"flash-attn": {"problem": "undefined symbol"}}, "pip uninstall flash-attn"),
        ("apex", "0.9", {"apex": {"problem": None, "is_nvidias": False}}, "pip uninstall apex"),
        ("apex", "0.1", {"apex": {"problem": "without amp_C", "is_nvidias": True}}, "--cuda_ext"),
        ("apex", "0.1", {"apex": {"problem": "its import crashed"}}, "its import crashed"),
    ],
)
def test_a_package_that_does_not_work_is_a_fault_with_its_remedy(
    name: str, installed: str | None, facts: dict[str, Any], words: str
) -> None:
    found = packages({name: installed}, facts)
    assert [one.name for one in found.values() if one.verdict == "fault"] == [name]
    assert words in found[name].remedy


def test_gpus_without_nccl_are_a_fault() -> None:
    assert packages({}, {"torch": TORCH | {"nccl": None}})["NCCL"].verdict == "fault"
    old = packages({}, {"torch": TORCH | {"nccl": "2.7.8"}})["NCCL"]
    assert (old.verdict, old.remedy) == ("fault", "charm needs NCCL 2.8 or newer; upgrade it")


def test_pypis_apex_is_known_by_its_missing_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise SystemExit('not to be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_nvidias_apex()
    (tmp_path / "apex" / "multi_tensor_apply.py").touch()
    assert is_nvidias_apex()


def test_hosts_with_different_versions_are_a_fault_that_names_the_ranks() -> None:
    (found,) = version_differences({0: VERSIONS, 1: VERSIONS, 2: VERSIONS | {"torch": "2.12"}})
    assert (found.name, found.verdict) == ("torch", "fault")
    assert found.found == "2.11.0+cu130 on ranks 0-1; 2.12 on rank 2"


# ---------------------------------------------------------------------- settings

INTERFACES = ("lo", "eth0", "eth1", "ib0", "docker0")


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("NCCL_P2P_DISABLE", "1", "fault"),
        ("NCCL_P2P_DISABLE", "0x1", "fault"),
        ("NCCL_P2P_DISABLE", "0", None),
        ("NCCL_P2P_DISABLE", "yes", None),
        ("NCCL_P2P_DISABLE", "", None),
        ("NCCL_P2P_LEVEL", "LOC", "fault"),
        ("NCCL_P2P_LEVEL", "0", "fault"),
        ("NCCL_P2P_LEVEL", "NVL", None),
        ("NCCL_SHM_DISABLE", "1", "fault"),
        ("NCCL_IB_DISABLE", "1", "hint"),
        ("NCCL_NET_GDR_LEVEL", "LOC", "fault"),
        ("NCCL_NET_GDR_LEVEL", "PIX", None),
        ("NCCL_MAX_NCHANNELS", "1", "fault"),
        ("NCCL_MAX_NCHANNELS", "16", None),
        ("NCCL_MAX_CTAS", "1", "fault"),
        ("NCCL_DEBUG", "info", "hint"),
        ("NCCL_DEBUG", "WARN", None),
        ("NCCL_BLOCKING_WAIT", "1", "fault"),
        ("TORCH_NCCL_BLOCKING_WAIT", "true", "fault"),
        ("TORCH_NCCL_BLOCKING_WAIT", "0", None),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "fault"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", None),
        ("NCCL_ASYNC_ERROR_HANDLING", "0", "fault"),
        ("CUDA_LAUNCH_BLOCKING", "1", "fault"),
        ("CUDA_LAUNCH_BLOCKING", "0", None),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "fault"),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO", None),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32", "fault"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", None),
        ("NCCL_SOCKET_IFNAME", "eth", None),
        ("NCCL_SOCKET_IFNAME", "ens,ib", None),
        ("NCCL_SOCKET_IFNAME", "=eth", "fault"),
        ("NCCL_SOCKET_IFNAME", "ens", "fault"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", None),
        ("NCCL_SOCKET_IFNAME", "^lo,eth,ib,docker", "fault"),
        ("GLOO_SOCKET_IFNAME", "eth0", None),
        ("GLOO_SOCKET_IFNAME", "eth", "fault"),
        ("GLOO_SOCKET_IFNAME", "eth0,eth7", "fault"),
        ("UNKNOWN", "1", None),
    ],
)
def test_a_setting_that_hurts_is_found_and_a_harmless_value_is_not(
    name: str, value: str, verdict: str | None
) -> None:
    found = settings_findings({name: value}, INTERFACES, 1)
    assert [(one.name, one.verdict) for one in found] == ([] if verdict is None else [(name, verdict)])
    assert all(one.remedy for one in found)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("eth", ("eth0", "eth1")),
        ("=eth0,ib0", ("eth0", "ib0")),
        ("^docker", ("eth0", "eth1", "ib0", "lo")),
        ("^=docker0,lo", ("eth0", "eth1", "ib0")),
        ("ib0:22", ("ib0",)),
    ],
)
def test_interfaces_are_chosen_by_prefix_by_name_or_by_what_is_left_out(
    text: str, left: tuple[str, ...]
) -> None:
    assert nccl_interfaces(text, INTERFACES) == left


@pytest.mark.parametrize(("ranks", "threads", "number"), [(1, None, 0), (4, None, 1), (4, "1", 0)])
def test_ranks_that_share_a_host_without_a_number_of_threads_get_a_hint(
    ranks: int, threads: str | None, number: int
) -> None:
    environment = {} if threads is None else {"OMP_NUM_THREADS": threads}
    found = settings_findings(environment, INTERFACES, ranks)
    assert [one.verdict for one in found] == ["hint"] * number


NAMES = [one.name for one in SETTINGS] + ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"]


@given(st.dictionaries(st.sampled_from(NAMES), st.text("019xX-^=,:eth \n\0\u0663") | st.integers().map(str)))
def test_no_value_of_a_setting_is_too_strange(environment: dict[str, str]) -> None:
    for finding in settings_findings(environment, INTERFACES, 1):
        assert environment[finding.name].strip()
        assert len(finding.found) <= 80


# ---------------------------------------------------------------------- links

FAST, SLOW = 40e6, 8e6
PLAN = "4.0 MiB within 10 s"


def measured(
    num_ranks: int, rates: dict[tuple[int, int], float | None], normal: float = FAST
) -> list[PairMeasured]:
    """All pairs at `normal`, or both ways at another rate; 0: stalled, None: dead."""
    made = []
    for pair in combinations(range(num_ranks), 2):
        rate = rates.get(pair, normal)
        latency_s = None if rate is None else 40e-6
        made.append(PairMeasured(*pair, latency_s, rate or None, rate or None))
    return made


def links(num_ranks: int, rates: dict[tuple[int, int], float | None], domains: int = 1) -> dict[str, str]:
    split = even_domains(num_ranks, domains)
    return {one.name: one.found for one in link_findings(measured(num_ranks, rates), split, PLAN)}


def test_links_alike_are_well() -> None:
    assert links(4, {}) == {}
    assert links(4, {(0, 1): 0.51 * FAST}) == {}


def test_a_slow_pair_is_named_with_its_rate_and_the_median() -> None:
    assert links(4, {(1, 3): SLOW}) == {
        "ranks 1 and 3": "slow: 8 MB/s there, 8 MB/s back; median inside 40 MB/s"
    }


def test_a_pair_that_is_slow_one_way_is_slow() -> None:
    pairs = measured(4, {})
    pairs[2] = PairMeasured(0, 3, 40e-6, FAST, SLOW)
    (found,) = link_findings(pairs, one_domain(4), PLAN)
    assert (found.name, found.verdict) == ("ranks 0 and 3", "fault")
    assert "40 MB/s there, 8 MB/s back" in found.found


def test_dead_and_stalled_pairs_are_told_apart() -> None:
    found = links(4, {(0, 2): None, (1, 3): 0})
    assert found["ranks 0 and 2"].startswith("dead")
    assert found["ranks 1 and 3"] == "small messages pass in 40 us, but not 4.0 MiB within 10 s"


def test_a_rank_whose_links_are_all_bad_is_named_in_place_of_them() -> None:
    found = links(4, {(0, 2): SLOW, (1, 2): None, (2, 3): SLOW})
    assert list(found) == ["rank 2"]
    assert found["rank 2"].startswith("all 3 links bad: 2 slow, 1 dead; at most 8 MB/s")


def test_where_all_links_are_dead_no_rank_is_blamed() -> None:
    dead = dict.fromkeys(combinations(range(3), 2))
    assert len(links(3, dead)) == 3
    assert all(name.startswith("ranks ") for name in links(3, dead))


def test_links_across_domains_are_judged_by_their_own_median() -> None:
    across = dict.fromkeys(((a, b) for a in range(3) for b in range(3, 6)), SLOW)
    assert links(6, across, domains=2) == {}
    assert list(links(6, across | {(2, 3): SLOW / 3}, domains=2)) == ["ranks 2 and 3"]


def test_two_links_say_nothing_of_speed() -> None:
    pairs = [PairMeasured(0, 1, 1e-5, FAST, FAST), PairMeasured(0, 2, 1e-5, SLOW, SLOW)]
    assert link_findings(pairs, one_domain(3), PLAN) == ()
    assert not summaries(pairs, one_domain(3))[0].judges_speed


def test_a_pair_that_is_fast_while_others_are_quiet_is_well() -> None:
    pairs = measured(4, {(0, 1): SLOW, (2, 3): SLOW})
    first, second = suspects(pairs, one_domain(4))
    assert (first.ranks, second.ranks) == ((0, 1), (2, 3))
    pairs[0] = better_of(first, PairMeasured(0, 1, 30e-6, FAST, FAST))
    pairs[5] = better_of(second, PairMeasured(2, 3, problem="no answer"))
    assert [one.name for one in link_findings(pairs, one_domain(4), PLAN)] == ["ranks 2 and 3"]


def test_numbers_are_short() -> None:
    assert [rate_text(rate) for rate in (None, 3.1e5, 4.12e7, 3.2e11)] == [
        "-",
        "310 kB/s",
        "41.2 MB/s",
        "320 GB/s",
    ]
    assert [latency_text(time) for time in (None, 4e-5, 0.0012)] == ["-", "40 us", "1.2 ms"]
    assert [ranks_text(ranks) for ranks in ([3], [0, 1, 2, 5])] == ["rank 3", "ranks 0-2, 5"]


# ---------------------------------------------------------------------- places


def test_ranks_are_shown_by_host_numa_node_and_island() -> None:
    told = {rank: RankTold(f"node{rank // 2}", rank % 2, 0, "H100") for rank in range(4)}
    first, second = place_findings(told)
    assert (first.name, second.name) == ("node0", "node1")
    assert second.found == "ranks 2-3: 2 x H100; NUMA node 0: rank 2; NUMA node 1: rank 3; NVLink island 0"


def test_what_ranks_say_survives_the_way_and_settings_are_told_once() -> None:
    hurts = Finding("NCCL_P2P_DISABLE", "1", "fault", "unset it")
    one = RankTold("node0", None, None, "CPU", None, VERSIONS, (hurts,))
    assert RankTold.from_json(one.as_json()) == one
    assert json.loads(one.as_json())["host"] == "node0"
    assert merged_settings({0: one, 1: one}) == (hurts,)
    assert [finding.ranks for finding in merged_settings({0: RankTold("node0"), 1: one})] == [(1,)]


# ---------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--ranks", "0"), "--ranks must be at least 1"),
        (("--ranks", "4", "--domains", "3"), "do not split into 3"),
        (("--network", "nvlink_2x5"), "no test network"),
        (("--network", "nvlink_2x4", "--ranks", "2"), "leave --ranks and --domains out"),
        (("--size", "0"), "--size must be at least 1"),
        (("--deadline", "0"), "--deadline must be at least 1"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], words: str
) -> None:
    monkeypatch.setattr("charm_megatron.doctor.probe.probe", lambda name: WELL[name] | {"gpus": []})
    result = CliRunner().invoke(app, ["doctor", *options])
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("", None),
        ("raise ImportError('undefined symbol: _ZN3c10')", "ImportError: undefined symbol: _ZN3c10"),
        ("import os; os.abort()", "its import ended Python with code -6"),
        ("import time; time.sleep(60)", "its import has not ended after 2 s"),
    ],
)
def test_a_package_that_raises_crashes_or_hangs_at_import_is_looked_at_from_outside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, problem: str | None
) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    (tmp_path / "flash_attn" / "flash_attn_interface.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    assert probe("flash-attn", timeout_s=2 if "sleep" in body else 60)["problem"] == problem
