"""Profiles of test networks, the commands that make them, and the rates that follow; nothing is run."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from charm_megatron.cli.main import app
from charm_megatron.errors import ConfigError
from charm_megatron.testbed import namespaces
from charm_megatron.testbed.commands import WIRE_PER_PAYLOAD, Argv, Names, up_commands
from charm_megatron.testbed.namespaces import Mark, Owner
from charm_megatron.testbed.probe import expected, scenes
from charm_megatron.testbed.profile import Profile, fair_rates, load_profile, shipped_profiles

pytestmark = pytest.mark.pure

NAMES = Names("charmtb-x")


def commands(name: str) -> list[Argv]:
    return list(up_commands(load_profile(name), NAMES, "the mark"))


def words_after(command: Argv, word: str) -> str:
    return command[command.index(word) + 1]


def classes(name: str) -> Iterator[tuple[str, str, str, int]]:
    """Namespace, device, class and ceiling of each HTB class."""
    for command in commands(name):
        if command[3:5] == ("class", "add"):
            ceiling = int(words_after(command, "ceil").removesuffix("bps"))
            yield command[2], words_after(command, "dev"), words_after(command, "classid"), ceiling


def wire(bytes_per_s: int) -> int:
    return round(WIRE_PER_PAYLOAD * bytes_per_s)


def test_the_shipped_profiles_are_the_five_that_are_documented() -> None:
    names = ("flat_8", "nvlink_2x4", "nvlink_2x4_shared_nic", "nvlink_4x2", "pcie_numa_2x4")
    assert shipped_profiles() == names
    for name in names:
        assert load_profile(name).name == name
        assert load_profile(name).num_ranks == 8


def test_ratios_of_the_shipped_profiles_are_those_of_their_source() -> None:
    for name in ("nvlink_2x4", "nvlink_4x2", "nvlink_2x4_shared_nic"):
        profile = load_profile(name)
        assert profile.inside_bytes_per_s == 7 * profile.across_bytes_per_s
    pcie = load_profile("pcie_numa_2x4")
    assert pcie.inside_bytes_per_s / pcie.across_bytes_per_s == pytest.approx(24.0 / 14.7)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("insde_bytes_per_s: 1", "unknown key 'insde_bytes_per_s'; did you mean 'inside_bytes_per_s'?"),
        ("across_bytes_per_s: 1000000", "has no meaning with 1 domain"),
        ("domains: 2", "across_bytes_per_s is needed with 2 domain"),
        ("inside_bytes_per_s: 10", "greater than or equal to 100000"),
        ("name: Two words", "name: string should match"),
        ("domains: 2\nbus: domain\nacross_bytes_per_s: 9000000", "but the bus carries it as well"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused_in_words(tmp_path: Path, text: str, sentence: str) -> None:
    lines = {"name": "name: x", "domains": "domains: 1", "inside": "inside_bytes_per_s: 5000000"}
    lines |= {line.split("_")[0].split(":")[0]: line for line in text.splitlines()}
    path = tmp_path / "x.yaml"
    path.write_text("\n".join([*lines.values(), "ranks_per_domain: 2"]))
    with pytest.raises(ConfigError, match=sentence.replace("?", r"\?")):
        load_profile(str(path))


def test_a_missing_key_and_an_unknown_name_are_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("name: x")
    with pytest.raises(ConfigError, match="key 'domains' is missing"):
        load_profile(str(path))
    with pytest.raises(ConfigError, match="did you mean 'nvlink_2x4'"):
        load_profile("nvlink2x4")


@pytest.mark.parametrize("name", shipped_profiles())
def test_every_command_works_in_a_namespace_of_the_network_only(name: str) -> None:
    profile = load_profile(name)
    own = set(NAMES.all(profile))
    made = []
    for command in commands(name):
        if command[0] == "unshare":
            assert command[-2] == "the mark"
            made.append(command[-1])
        elif command[:3] == ("ip", "netns", "exec"):
            assert command[3] in own
        else:
            assert command[0] in ("ip", "tc")
            assert command[1] == "-n"
            assert command[2] in own
    assert made == list(NAMES.all(profile)), "and each is made once"


@pytest.mark.parametrize("name", shipped_profiles())
def test_each_rank_has_a_class_a_side_and_a_kind_of_peer(name: str) -> None:
    profile = load_profile(name)
    found = set(classes(name))
    for rank in range(8):
        for namespace, device in ((NAMES.rank(rank), "eth0"), (NAMES.switch, f"r{rank}")):
            assert (namespace, device, "1:10", wire(profile.inside_bytes_per_s)) in found
            if profile.across_bytes_per_s:
                assert (namespace, device, "1:20", wire(profile.across_bytes_per_s)) in found


def test_ranks_with_their_own_cards_share_nothing() -> None:
    for name in ("nvlink_2x4", "nvlink_4x2", "flat_8"):
        assert not [command for command in commands(name) if "ifb" in command or "mirred" in command]


def test_a_shared_card_is_one_class_in_each_way_that_all_ranks_of_the_domain_are_led_to() -> None:
    shared = {row[1:] for row in classes("nvlink_2x4_shared_nic") if row[1][:4] in ("send", "recv")}
    assert shared == {(f"{way}{d}", "1:20", wire(6_000_000)) for way in ("send", "recv") for d in (0, 1)}
    led = [
        (words_after(command, "dev"), command[-1])
        for command in commands("nvlink_2x4_shared_nic")
        if "mirred" in command
    ]
    assert sorted(led) == sorted(
        (f"r{rank}", f"{way}{rank // 4}") for rank in range(8) for way in ("send", "recv")
    )


def test_a_bus_carries_what_stays_inside_and_what_leaves() -> None:
    shared = {row[1:] for row in classes("pcie_numa_2x4") if row[1] == "send1"}
    bus, across = wire(72_000_000), wire(44_100_000)
    assert shared == {("send1", "1:1", bus), ("send1", "1:10", bus), ("send1", "1:20", across)}
    parents = [
        words_after(c, "parent")
        for c in commands("pcie_numa_2x4")
        if c[3:5] == ("class", "add") and "send1" in c
    ]
    assert parents == ["1:", "1:1", "1:1"]


def test_a_domain_is_one_prefix_of_addresses() -> None:
    profile = load_profile("nvlink_4x2")
    assert [profile.address(rank) for rank in (0, 1, 2, 7)] == [
        "10.77.0.1",
        "10.77.0.2",
        "10.77.1.1",
        "10.77.3.2",
    ]


def test_links_that_transfers_share_limit_them_together() -> None:
    own, shared, pcie = map(load_profile, ("nvlink_2x4", "nvlink_2x4_shared_nic", "pcie_numa_2x4"))
    four_out = [(rank, rank + 4) for rank in range(4)]
    assert expected(own, four_out) == (6e6,) * 4
    assert expected(shared, four_out) == (1.5e6,) * 4
    assert expected(pcie, four_out) == (44.1e6 / 4,) * 4
    assert expected(pcie, [(0, 1), (2, 6)]) == pytest.approx((36e6, 36e6)), "the bus is 72 MB/s"
    assert expected(own, [(0, 1), (2, 1)]) == (21e6, 21e6), "a rank receives no faster than it sends"


def test_a_transfer_takes_what_one_that_is_held_up_elsewhere_leaves() -> None:
    profile = load_profile("pcie_numa_2x4")
    rates = fair_rates([profile.links(0, 4), profile.links(1, 4), profile.links(2, 3)])
    assert rates == pytest.approx([22.05e6, 22.05e6, 27.9e6])


def test_scenes_cover_each_kind_alone_and_all_at_once() -> None:
    assert [scene.name for scene in scenes(load_profile("flat_8"))] == [
        "one rank, inside",
        "all ranks, inside",
    ]
    both = list(scenes(load_profile("nvlink_4x2")))[-1].pairs
    assert len(both) == 16
    assert all(src != dst for src, dst in both)


def test_a_mark_says_who_made_a_namespace_and_others_are_not_read_as_one() -> None:
    for owner in (None, Owner.this_process()):
        mark = Mark("flat_8", "0123abcd", owner)
        assert Mark.parse(str(mark)) == mark
        assert not mark.is_stale
    assert Mark("x", "0", Owner(os.getpid(), 1)).is_stale, "another process had the number before"
    assert Mark.parse("somebody's loopback") is None


def test_without_root_the_command_says_so_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert not namespaces.is_available()
    for command in ("up", "probe", "status"):
        result = CliRunner().invoke(app, ["testbed", command, "flat_8"])
        assert result.exit_code == 2
        assert (
            result.stderr
            == "error: cannot shape a test network: it needs root, and the user is number 1000\n"
        )


def test_without_a_tool_the_reason_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    reason = namespaces.why_unavailable()
    assert reason is not None
    assert "'tc' is missing" in reason
    assert "iproute2" in reason


def test_ranks_out_of_range_are_refused() -> None:
    result = CliRunner().invoke(app, ["testbed", "exec", "flat_8", "--rank", "8", "--", "true"])
    assert result.exit_code == 2
    assert "--rank must be 0 to 7" in result.stderr


def test_a_profile_that_is_given_in_code_is_as_strict() -> None:
    with pytest.raises(ValueError, match="across_bytes_per_s is needed"):
        Profile(name="x", domains=2, ranks_per_domain=2, inside_bytes_per_s=1_000_000)
