"""`charm-megatron testbed`: networks of namespaces with shaped links."""

from collections.abc import Iterator
from contextlib import nullcontext
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from charm_megatron.testbed.probe import Probe
    from charm_megatron.testbed.profile import Profile

ProfileArgument = Annotated[
    str, typer.Argument(help="A shipped network, such as nvlink_2x4, or a YAML file.")
]


def up_command(profile: ProfileArgument) -> None:
    """Make a network that stays until `down`."""
    from charm_megatron.testbed.persistent import bring_up
    from charm_megatron.testbed.profile import load_profile

    shape = load_profile(profile)
    is_new = bring_up(shape)
    print(f"{shape.name} is {'up' if is_new else 'up already'}: {_words(shape)}")


def down_command(
    profile: Annotated[str | None, typer.Argument(help="The network; by default all that `up` made.")] = None,
) -> None:
    """Remove a network with all processes in it, and what killed programs have left."""
    from charm_megatron.testbed.persistent import take_down
    from charm_megatron.testbed.profile import load_profile

    removed = take_down(None if profile is None else load_profile(profile).name)
    print(f"removed {', '.join(removed)}" if removed else "nothing to remove")


def exec_command(
    profile: ProfileArgument,
    command: Annotated[list[str], typer.Argument(help="The command, after --.")],
    rank: Annotated[int | None, typer.Option(help="Only on this rank, with this terminal.")] = None,
) -> None:
    """Run a command on each rank of a network that is up: `exec nvlink_2x4 -- python train.py`.

    RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME are set.
    """
    from charm_megatron.errors import InvalidInput
    from charm_megatron.testbed.persistent import attach
    from charm_megatron.testbed.profile import load_profile

    shape = load_profile(profile)
    if rank is not None and not 0 <= rank < shape.num_ranks:
        raise InvalidInput(f"--rank must be 0 to {shape.num_ranks - 1} in {shape.name}, but is {rank}")
    net = attach(shape)
    if rank is None:
        net.run_ranks(lambda _: command, on_line=lambda rank, line: print(f"[{rank}] {line}", flush=True))
        return
    code = net.popen(rank, command).wait()
    if code:
        raise typer.Exit(code if code > 0 else 128 - code)


def status_command(
    profile: Annotated[str | None, typer.Argument(help="Show the ranks of this one.")] = None,
) -> None:
    """List the networks on this machine, or the ranks of one that is up."""
    from rich.console import Console

    from charm_megatron.testbed.namespaces import networks, require_available
    from charm_megatron.testbed.profile import load_profile

    if profile is not None:
        _print_ranks(load_profile(profile))
        return
    require_available()
    console = Console(highlight=False)
    for name, mark in networks().items():
        owner = "stays until down" if mark.owner is None else f"of process {mark.owner.pid}"
        gone = ", which is gone; `down` removes it" if mark.is_stale else ""
        console.print(f"{name}: {mark.profile}, {owner}{gone}", soft_wrap=True)
    if not networks():
        console.print("no test network is up")


def probe_command(
    profile: ProfileArgument,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=3600.0, help="How long to count, for each row.")
    ] = 1.5,
) -> None:
    """Measure what the links carry, beside the profile's rates; on the network that is up, or a passing one."""
    from rich.console import Console

    from charm_megatron.testbed.network import Testbed
    from charm_megatron.testbed.persistent import attach, is_up
    from charm_megatron.testbed.probe import probe, scenes
    from charm_megatron.testbed.profile import load_profile

    shape = load_profile(profile)
    console = Console(highlight=False)
    console.print(f"{shape.name}: {_words(shape)}", soft_wrap=True)
    console.print(f"{HEADING:<34}{'transfers':>9}{'expected':>10}{'median':>9}{'min':>9}{'max':>9}")
    with nullcontext(attach(shape)) if is_up(shape) else Testbed(shape) as net:
        for scene in scenes(shape):
            for line in _probe_lines(shape, probe(net, seconds, scene)):
                console.print(line)


HEADING = "payload of a transfer in MB/s"


def _probe_lines(shape: "Profile", result: "Probe") -> Iterator[str]:
    """A line for the transfers inside domains, and one for those across."""
    kinds = [shape.topology.crosses(*pair) for pair in result.scene.pairs]
    for crosses in sorted(set(kinds)):
        chosen = [index for index, kind in enumerate(kinds) if kind == crosses]
        wanted = median(result.expected_bytes_per_s[index] for index in chosen) / 1e6
        got = [result.received_bytes_per_s[index] / 1e6 for index in chosen]
        suffix = f": {'across' if crosses else 'inside'}" if len(set(kinds)) > 1 else ""
        yield (
            f"{result.scene.name + suffix:<34}{len(got):>9}{wanted:>10.2f}"
            f"{median(got):>9.2f}{min(got):>9.2f}{max(got):>9.2f}"
        )


def _print_ranks(shape: "Profile") -> None:
    from charm_megatron.testbed.persistent import attach

    net = attach(shape)
    print(f"{shape.name} is up: {_words(shape)}")
    print(f"{'rank':>4}{'domain':>8}  {'address':<15}{'sent (bytes)':>16}  namespace")
    for rank, sent in enumerate(net.all_payload_bytes()):
        name = net.names.rank(rank)
        print(f"{rank:>4}{shape.domain(rank):>8}  {shape.address(rank):<15}{sent:>16,}  {name}")


def _words(shape: "Profile") -> str:
    size = f"{shape.domains} x {shape.ranks_per_domain} ranks"
    inside = f"{shape.inside_bytes_per_s / 1e6:g} MB/s inside" + (
        ", shared by a domain" if shape.bus == "domain" else " for each rank"
    )
    if shape.across_bytes_per_s is None:
        return f"{size}, {inside}"
    owner = "shared by a domain" if shape.nic == "domain" else "for each rank"
    return f"{size}, {inside}, {shape.across_bytes_per_s / 1e6:g} MB/s across, {owner}"
