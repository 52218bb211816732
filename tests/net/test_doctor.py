"""The link check on shaped networks in which one link is not as the others."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from charm_megatron.cli.main import app
from charm_megatron.testbed import namespaces
from charm_megatron.testbed.network import Network
from charm_megatron.testbed.persistent import attach, bring_up, take_down
from charm_megatron.testbed.profile import load_profile

REASON = namespaces.why_unavailable()
pytestmark = [pytest.mark.net, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

PROFILE = """
name: doctor_of_four
domains: 1
ranks_per_domain: 4
inside_bytes_per_s: 20_000_000
"""
SLOW = "3000000bps"
PREFIX = "10.77.0.0/24"


@pytest.fixture
def profile_path(tmp_path: Path) -> Path:
    path = tmp_path / "doctor.yaml"
    path.write_text(PROFILE, "utf-8")
    return path


@contextmanager
def network_with(path: Path, fault: Callable[[Network], Sequence[str]]) -> Iterator[None]:
    """The network, up until the end of the block, after the commands of `fault`."""
    profile = load_profile(str(path))
    bring_up(profile)
    try:
        namespaces.execute(line.split() for line in fault(attach(profile)))
        yield
    finally:
        take_down(profile.name)


def slow(net: Network, src: int, dst: int) -> Sequence[str]:
    """What `src` sends to `dst` gets a class of its own, ahead of that of the domain."""
    tc = f"tc -n {net.names.rank(src)}"
    match = "parent 1: protocol ip prio {} u32 match ip dst {} flowid {}"
    return (
        f"{tc} class add dev eth0 parent 1: classid 1:30 htb rate {SLOW} burst 9014 cburst 9014 quantum 32768",
        f"{tc} qdisc add dev eth0 parent 1:30 bfifo limit 64000000",
        f"{tc} filter del dev eth0 parent 1: prio 1",
        f"{tc} filter add dev eth0 {match.format(1, f'{net.profile.address(dst)}/32', '1:30')}",
        f"{tc} filter add dev eth0 {match.format(2, PREFIX, '1:10')}",
    )


def dead(net: Network, src: int, dst: int) -> Sequence[str]:
    """Nothing that `src` sends to `dst` arrives."""
    return (f"ip -n {net.names.rank(src)} route add blackhole {net.profile.address(dst)}/32",)


def check(path: Path) -> tuple[int, dict[str, Any]]:
    arguments = ("--network", str(path), "--size", "2", "--deadline", "2", "--json")
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.stderr == ""
    report: dict[str, Any] = json.loads(result.stdout)
    return result.exit_code, report


def test_the_one_pair_that_is_slow_one_way_is_named_beside_the_rate_of_the_profile(
    profile_path: Path,
) -> None:
    with network_with(profile_path, lambda net: slow(net, 3, 1)):
        code, report = check(profile_path)
    (fault,) = report["links"]
    assert (code, fault["name"]) == (1, "ranks 1 and 3")
    assert fault["found"].startswith("slow")
    (pair,) = [pair for pair in report["pairs"] if (pair["first"], pair["second"]) == (1, 3)]
    assert pair["back_bytes_per_s"] < pair["there_bytes_per_s"] / 2
    assert report["classes"][0]["median_bytes_per_s"] == pytest.approx(20e6, rel=0.2)


def test_the_one_pair_that_is_dead_is_named_and_all_others_are_measured(profile_path: Path) -> None:
    """Also where rank 0 is one of the pair."""
    before = set(namespaces.networks())
    with network_with(profile_path, lambda net: dead(net, 0, 3)):
        code, report = check(profile_path)
    (fault,) = report["links"]
    assert (code, fault["name"]) == (1, "ranks 0 and 3")
    assert fault["found"].startswith("dead")
    assert sum(pair["there_bytes_per_s"] is not None for pair in report["pairs"]) == 5
    assert set(namespaces.networks()) <= before
