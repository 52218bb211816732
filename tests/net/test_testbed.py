"""Networks that are really made: what the links carry relative to each other, what is counted, what is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from charm_megatron.errors import InvalidInput, LaunchError, NetworkFault, TransferTimeout
from charm_megatron.testbed import namespaces, persistent
from charm_megatron.testbed import network as testbed
from charm_megatron.testbed.commands import Names
from charm_megatron.testbed.probe import Scene, probe
from charm_megatron.testbed.profile import Profile

REASON = namespaces.why_unavailable()
pytestmark = [pytest.mark.net, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

SMALL = Profile(
    name=f"pytest_{os.getpid()}",  # what others have up on this machine is theirs
    domains=2,
    ranks_per_domain=2,
    inside_bytes_per_s=20_000_000,
    across_bytes_per_s=2_500_000,
)
ACROSS = Scene("across", ((0, 2), (1, 3)))

OWNER = """
import os, subprocess, sys, time
from charm_megatron.testbed import network as testbed
from charm_megatron.testbed.profile import Profile

with testbed.Testbed(Profile.model_validate_json(sys.argv[1])) as net:
    sleeper = net.popen(1, ["sleep", "1000"])
    print(net.names.network, sleeper.pid, net._watchdog.pid, flush=True)
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def net() -> Iterator[testbed.Testbed]:
    with testbed.Testbed(SMALL) as made:
        yield made


@pytest.fixture
def kept_network() -> Iterator[None]:
    yield
    persistent.take_down(SMALL.name)


@pytest.fixture
def foreign() -> Iterator[list[str]]:
    """Namespaces of somebody else, one of them under a name as ours."""
    names = [f"charmtb-foreign{os.getpid()}-r0", f"foreign{os.getpid()}"]
    for name in names:
        subprocess.run(["ip", "netns", "add", name], check=True)
    yield names
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def in_time(happened: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + 30
    while not happened():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
    return True


def started_owner() -> tuple[subprocess.Popen[str], str, int, int]:
    command = [sys.executable, "-c", OWNER, SMALL.model_dump_json()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    network, sleeper, watchdog = process.stdout.readline().split()
    return process, network, int(sleeper), int(watchdog)


def killed(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()  # not read to its end: what the owner started may hold it open


def is_running(pid: int) -> bool:
    return namespaces._start_of(pid) is not None


def test_across_is_slower_than_inside_about_as_the_profile_says(net: testbed.Testbed) -> None:
    inside = probe(net, 0.5, Scene("inside", ((0, 1), (3, 2)))).received_bytes_per_s
    across = probe(net, 0.5, ACROSS).received_bytes_per_s
    assert min(inside) > 3 * max(across)
    assert max(across) > 0


def test_ranks_with_a_shared_card_get_about_half_each(net: testbed.Testbed) -> None:
    own = sum(probe(net, 0.5, ACROSS).received_bytes_per_s)
    profile = SMALL.model_copy(update={"nic": "domain", "name": f"{SMALL.name}_shared"})
    with testbed.Testbed(profile) as sharing:
        shared = sum(probe(sharing, 0.5, ACROSS).received_bytes_per_s)
    assert shared < 0.7 * own


def test_ranks_on_a_bus_share_it_inside(net: testbed.Testbed) -> None:
    scene = Scene("inside", ((0, 1), (1, 0)))
    own = sum(probe(net, 0.5, scene).received_bytes_per_s)
    profile = SMALL.model_copy(update={"bus": "domain", "name": f"{SMALL.name}_bus"})
    with testbed.Testbed(profile) as sharing:
        shared = sum(probe(sharing, 0.5, scene).received_bytes_per_s)
    assert shared < 0.7 * own


def test_counted_payload_is_what_was_sent(net: testbed.Testbed) -> None:
    assert probe(net, 0.3, ACROSS).counted_share == pytest.approx(1, abs=0.005)
    net.reset_counters()
    assert max(net.all_payload_bytes()) < 1000
    assert net.payload_bytes(0) < 1000


def test_every_rank_gets_its_variables_and_its_own_address(net: testbed.Testbed) -> None:
    words = "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $GLOO_SOCKET_IFNAME $EXTRA"
    outputs = net.run_ranks(
        lambda rank: ["sh", "-c", f"echo {words}; ip -4 -brief addr show eth0"], env={"EXTRA": "more"}
    )
    for rank, output in enumerate(outputs):
        said, address = output.stdout.splitlines()
        assert said == f"{rank} {rank % 2} 4 10.77.0.1 eth0 more"
        assert f"10.77.{rank // 2}.{rank % 2 + 1}/32" in address


def test_a_rank_that_fails_ends_the_others_and_its_last_words_are_told(net: testbed.Testbed) -> None:
    script = "if [ $RANK = 2 ]; then echo no luck; exit 3; fi; echo $$; exec sleep 1000"
    pids = []
    with pytest.raises(LaunchError, match=r"rank 2 failed: ended with code 3; its last lines:\n  no luck"):
        net.run_ranks(lambda rank: ["sh", "-c", script], on_line=lambda rank, line: pids.append(line))
    assert not any(is_running(int(pid)) for pid in pids if pid.isdigit())


def test_ranks_that_do_not_end_in_time_are_named(net: testbed.Testbed) -> None:
    with pytest.raises(TransferTimeout, match="ranks 1 have not ended"):
        net.run_ranks(lambda rank: ["sleep", "1000" if rank == 1 else "0"], timeout_s=1)


def test_a_network_ends_with_its_processes() -> None:
    with testbed.Testbed(SMALL) as made:
        process = made.popen(3, ["sleep", "1000"])
        network = made.names.network
        assert network in namespaces.networks()
    assert process.wait() == -signal.SIGKILL
    assert network not in namespaces.networks()


def test_an_exception_removes_the_network() -> None:
    made = testbed.Testbed(SMALL)
    with pytest.raises(ZeroDivisionError), made:
        _ = 1 / 0
    assert made.names.network not in namespaces.networks()


def test_a_killed_owner_leaves_neither_namespaces_nor_processes() -> None:
    process, network, sleeper, _ = started_owner()
    assert network in namespaces.networks()
    killed(process)
    assert in_time(lambda: network not in namespaces.networks())
    assert in_time(lambda: not is_running(sleeper))


def test_what_an_owner_left_that_was_killed_with_its_watchdog_goes_with_the_next_down() -> None:
    process, network, sleeper, watchdog = started_owner()
    os.kill(watchdog, signal.SIGKILL)
    killed(process)
    assert network in namespaces.networks()
    assert network in persistent.take_down(SMALL.name)
    assert network not in namespaces.networks()
    assert not is_running(sleeper)


@pytest.mark.usefixtures("kept_network")
def test_up_and_down_can_be_repeated() -> None:
    assert persistent.bring_up(SMALL)
    assert not persistent.bring_up(SMALL)
    assert persistent.attach(SMALL).run_ranks(lambda rank: ["echo", str(rank)])[3].stdout == "3\n"
    assert persistent.persistent_name(SMALL.name) in persistent.take_down(SMALL.name)
    assert persistent.persistent_name(SMALL.name) not in persistent.take_down(SMALL.name)
    with pytest.raises(InvalidInput, match="is not up"):
        persistent.attach(SMALL)


@pytest.mark.usefixtures("kept_network")
def test_a_network_of_another_shape_is_not_taken_for_this_one() -> None:
    persistent.bring_up(SMALL)
    other = SMALL.model_copy(update={"across_bytes_per_s": 5_000_000})
    for use in (persistent.attach, persistent.bring_up):
        with pytest.raises(InvalidInput, match="of another shape is up"):
            use(other)


@pytest.mark.usefixtures("kept_network")
def test_taking_down_spares_networks_in_use_and_what_is_not_ours(
    net: testbed.Testbed, foreign: list[str]
) -> None:
    persistent.bring_up(SMALL)
    persistent.take_down(SMALL.name)
    namespaces.remove_stale()
    assert namespaces.remove_networks(["charmtb-foreign", foreign[0].removesuffix("-r0")]) == []
    assert net.names.network in namespaces.networks()
    assert set(foreign) <= {path.name for path in namespaces.FOLDER.iterdir()}


def test_a_namespace_that_somebody_else_has_under_our_name_survives_the_failure_to_make_it(
    foreign: list[str],
) -> None:
    made = testbed.Testbed(SMALL)
    made.names = Names(foreign[0].removesuffix("-r0"))
    with pytest.raises(NetworkFault, match="File exists"), made:
        pass
    assert foreign[0] in {path.name for path in namespaces.FOLDER.iterdir()}
    assert made.names.network not in namespaces.networks()


def test_a_network_that_was_cut_short_is_not_taken_for_one_that_is_up(kept_network: None) -> None:
    names = Names(persistent.persistent_name(SMALL.name))
    testbed.make(SMALL, names, namespaces.Owner(pid=2**22 - 1, start=1))
    assert not persistent.is_up(SMALL)
    with pytest.raises(InvalidInput, match="is not up"):
        persistent.attach(SMALL)
    assert persistent.bring_up(SMALL), "what is left is made anew"
    assert persistent.is_up(SMALL)
