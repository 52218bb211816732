"""The commands that make a test network, as data: nothing here runs them.

    rank namespace                 switch namespace
    eth0 -- what the rank sends -> r<k> -- bridge -- r<j> -- what the rank receives -> eth0 of another

* A rank's `eth0` shapes what it sends, the port `r<k>` what it receives: an HTB class inside the domain, one across.
  The domain of the other end is read from its address. Queues are long and nothing is dropped; a sender is held back
  by its socket, which stays charged for what waits in a queue of this machine, up to `SOCKET_QUEUE_BYTES`.
* What ranks share is an `ifb` device: their ports redirect to it what enters (`send<d>`) or leaves (`recv<d>`), and it
  goes on where it was after the shared HTB class.
* The route fixes Reno and a large first window: without loss Reno never slows down, so that neither slow start nor a
  restart after a pause shows in a measurement. (BBR, the default of some kernels, would probe for the rate.)
"""

from collections.abc import Iterator
from dataclasses import dataclass

from charm_megatron.testbed.profile import Profile

Argv = tuple[str, ...]

MTU = 9000
ETHERNET_BYTES = 14
TCP_IP_BYTES = 52  # IPv4 20, TCP 20, its timestamps 12
HEADER_BYTES = ETHERNET_BYTES + TCP_IP_BYTES
WIRE_PER_PAYLOAD = (MTU + ETHERNET_BYTES) / (MTU - TCP_IP_BYTES)
"""HTB counts the frames that the wire would see, also where the kernel passes many of them as one."""

FIRST_WINDOW = 1000  # segments
QUEUE_BYTES = 64_000_000
SOCKET_QUEUE_BYTES = 32_768
"""Of one connection, in the queues of this machine. The kernel's 4 MiB would keep what is posted later, also gloo's
notice that a receiver is ready, waiting behind whole transfers."""
WINDOW_BYTES = 8_388_608
"""Where a receiver's window begins, so that data arrives also while the receiving process waits for a core."""
MAX_WINDOW_BYTES = 33_554_432

BURST_S, MIN_BURST_BYTES = 0.0005, 9_014
"""Credit of an idle class. It must cover the lateness of the kernel's timers, or the rate is not reached."""
LARGEST_PACKET_BYTES = 32_768
"""As the kernel passes packets on. One goes as soon as there is any credit, so that it adds to the burst."""
QUANTUM_BYTES = LARGEST_PACKET_BYTES
INSIDE, ACROSS = "1:10", "1:20"


@dataclass(frozen=True)
class Names:
    """The namespaces of one network."""

    network: str

    @property
    def switch(self) -> str:
        return f"{self.network}-switch"

    def rank(self, rank: int) -> str:
        return f"{self.network}-r{rank}"

    def all(self, profile: Profile) -> tuple[str, ...]:
        """The switch last: its mark stands for the network's."""
        return (*map(self.rank, range(profile.num_ranks)), self.switch)


def port(rank: int) -> str:
    """The switch's end of a rank's cable."""
    return f"r{rank}"


def create_namespace(name: str, mark: str) -> Argv:
    """A namespace that bears its mark before it has its name, so that no unmarked one is ever left behind.

    The mark is the alias of its loopback device.
    """
    script = 'ip link set lo up alias "$1" && exec ip netns attach "$2" $$'
    return ("unshare", "--net", "sh", "-c", script, "sh", mark, name)


def mark_namespace(name: str, mark: str) -> Argv:
    """Changes the mark."""
    return ("ip", "-n", name, "link", "set", "lo", "alias", mark)


def remove_namespace(name: str) -> Argv:
    """Its devices, and the other ends of its cables, go with it."""
    return ("ip", "netns", "delete", name)


def up_commands(profile: Profile, names: Names, mark: str) -> Iterator[Argv]:
    """Makes the network; in order."""
    for name in names.all(profile):
        yield create_namespace(name, mark)
    yield _ip(names.switch, "link add bridge mtu", MTU, "type bridge mcast_snooping 0")
    yield _ip(names.switch, "link set bridge up")
    for domain in range(profile.domains):
        yield from _shared_links(profile, names.switch, domain)
    for rank in range(profile.num_ranks):
        yield from _cable(profile, names, rank)
        yield from _shape_rank(profile, names, rank)
        yield from _redirect_to_shared(profile, names.switch, rank)


def exec_command(name: str, argv: tuple[str, ...]) -> Argv:
    """Runs `argv` in a namespace, as the same process."""
    return ("ip", "netns", "exec", name, *argv)


def _cable(profile: Profile, names: Names, rank: int) -> Iterator[Argv]:
    own, switch, name = names.rank(rank), names.switch, port(rank)
    cable = f"link add {name} mtu {MTU} type veth peer name eth0 mtu {MTU}"
    yield _ip(switch, cable, "netns", own)
    yield _ip(switch, f"link set {name} master bridge up")
    yield _ip(own, f"link set eth0 up gso_max_size {LARGEST_PACKET_BYTES}")
    yield _ip(own, f"addr add {profile.address(rank)}/32 dev eth0")
    route = f"route add 10.77.0.0/16 dev eth0 src {profile.address(rank)}"
    yield _ip(own, route, f"congctl reno initcwnd {FIRST_WINDOW} initrwnd {FIRST_WINDOW}")
    yield _setting(own, "tcp_limit_output_bytes", SOCKET_QUEUE_BYTES)
    yield _setting(own, "tcp_rmem", f"4096 {WINDOW_BYTES} {MAX_WINDOW_BYTES}")


def _shape_rank(profile: Profile, names: Names, rank: int) -> Iterator[Argv]:
    for namespace, device, other in ((names.rank(rank), "eth0", "dst"), (names.switch, port(rank), "src")):
        yield _tc(namespace, f"qdisc add dev {device} root handle 1: htb")
        yield from _class(namespace, device, INSIDE, profile.inside_bytes_per_s)
        yield _match(namespace, device, 1, other, _prefix(profile, rank), INSIDE)
        if profile.across_bytes_per_s is not None:
            yield from _class(namespace, device, ACROSS, profile.across_bytes_per_s)
            yield _match(namespace, device, 2, other, "10.77.0.0/16", ACROSS)


def _shared_links(profile: Profile, switch: str, domain: int) -> Iterator[Argv]:
    """`send<d>` and `recv<d>`, where the ranks of a domain share a bus or a network card."""
    across, bus = profile.across_bytes_per_s, profile.bus == "domain"
    shares_card = profile.nic == "domain" and across is not None
    inside_prefix = f"10.77.{domain}.0/24"
    if bus or shares_card:
        device = f"send{domain}"
        yield from _ifb(switch, device)
        if bus:
            yield from _class(switch, device, "1:1", profile.inside_bytes_per_s, queue=False)
            half = profile.inside_bytes_per_s // 2
            ceiling = profile.inside_bytes_per_s
            yield from _class(switch, device, INSIDE, half, ceiling=ceiling, parent="1:1")
            yield _match(switch, device, 1, "dst", inside_prefix, INSIDE)
        if across is not None:
            ceiling = across if shares_card else profile.inside_bytes_per_s
            assured = min(ceiling, profile.inside_bytes_per_s // 2) if bus else ceiling
            parent = "1:1" if bus else "1:"
            yield from _class(switch, device, ACROSS, assured, ceiling=ceiling, parent=parent)
            yield _match(switch, device, 2, "dst", "10.77.0.0/16", ACROSS)
    if shares_card:
        assert across is not None, "a card is shared towards other domains"
        device = f"recv{domain}"
        yield from _ifb(switch, device)
        yield from _class(switch, device, ACROSS, across)
        yield _match(switch, device, 1, "dst", inside_prefix, ACROSS)


def _redirect_to_shared(profile: Profile, switch: str, rank: int) -> Iterator[Argv]:
    name, domain, prefix = port(rank), profile.domain(rank), _prefix(profile, rank)
    shares_card = profile.nic == "domain" and profile.across_bytes_per_s is not None
    if not shares_card and profile.bus == "none":
        return
    yield _tc(switch, f"qdisc add dev {name} clsact")
    if profile.bus == "domain":
        yield _redirect(switch, name, "ingress", 1, f"dst {prefix}", f"send{domain}")
    else:
        yield _pass(switch, name, "ingress", 1, f"dst {prefix}")
    if profile.across_bytes_per_s is not None:
        yield _redirect(switch, name, "ingress", 2, "dst 10.77.0.0/16", f"send{domain}")
    if shares_card:
        # Other numbers than on the way in: u32 lists filters of both ways under one number together.
        yield _pass(switch, name, "egress", 3, f"src {prefix}")
        yield _redirect(switch, name, "egress", 4, "src 10.77.0.0/16", f"recv{domain}")


def _ifb(switch: str, device: str) -> Iterator[Argv]:
    yield _ip(switch, f"link add {device} mtu {MTU} txqueuelen 1000 type ifb")
    yield _ip(switch, f"link set {device} up")
    yield _tc(switch, f"qdisc add dev {device} root handle 1: htb")


def _class(
    namespace: str,
    device: str,
    name: str,
    bytes_per_s: int,
    *,
    ceiling: int | None = None,
    parent: str = "1:",
    queue: bool = True,
) -> Iterator[Argv]:
    rate, most = (round(WIRE_PER_PAYLOAD * number) for number in (bytes_per_s, ceiling or bytes_per_s))
    burst, most_burst = (max(MIN_BURST_BYTES, round(BURST_S * number)) for number in (rate, most))
    shape = f"rate {rate}bps burst {burst} ceil {most}bps cburst {most_burst} quantum {QUANTUM_BYTES}"
    yield _tc(namespace, f"class add dev {device} parent {parent} classid {name} htb", shape)
    if queue:
        yield _tc(namespace, f"qdisc add dev {device} parent {name} bfifo limit {QUEUE_BYTES}")


def _match(namespace: str, device: str, order: int, end: str, prefix: str, to: str) -> Argv:
    return _tc(
        namespace,
        f"filter add dev {device} parent 1: protocol ip prio {order} u32 match ip {end} {prefix} flowid {to}",
    )


def _redirect(switch: str, device: str, way: str, order: int, end: str, to: str) -> Argv:
    return _tc(switch, _hook(device, way, order, end), f"action mirred egress redirect dev {to}")


def _pass(switch: str, device: str, way: str, order: int, end: str) -> Argv:
    """Ends the search: filters behind this one do not see the packet."""
    return _tc(switch, _hook(device, way, order, end), "classid 1:1")


def _hook(device: str, way: str, order: int, end: str) -> str:
    return f"filter add dev {device} {way} protocol ip prio {order} u32 match ip {end}"


def _prefix(profile: Profile, rank: int) -> str:
    """The addresses of a rank's own domain."""
    return f"10.77.{profile.domain(rank)}.0/24"


def _setting(namespace: str, name: str, value: str | int) -> Argv:
    """Of TCP, in a namespace."""
    script = 'echo "$1" > "/proc/sys/net/ipv4/$2"'
    return exec_command(namespace, ("sh", "-c", script, "sh", str(value), name))


def _ip(namespace: str, *words: str | int) -> Argv:
    return ("ip", "-n", namespace, *_split(words))


def _tc(namespace: str, *words: str | int) -> Argv:
    return ("tc", "-n", namespace, *_split(words))


def _split(words: tuple[str | int, ...]) -> list[str]:
    return [part for word in words for part in str(word).split()]
