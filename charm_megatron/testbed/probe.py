"""What the links of a test network really carry, beside what its profile says."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from charm_megatron.testbed.network import Network
from charm_megatron.testbed.profile import Profile, fair_rates

PORT = 29400
PIECE_BYTES = 1 << 20
WARM_UP_S = 0.3

Pair = tuple[int, int]
"""Sender and receiver."""


@dataclass(frozen=True)
class Scene:
    """Transfers that run at the same time."""

    name: str
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class Probe:
    """Payload in bytes per second of each transfer: expected of the profile, and received."""

    scene: Scene
    expected_bytes_per_s: tuple[float, ...]
    received_bytes_per_s: tuple[float, ...]
    counted_share: float
    """Payload by the interface counters over what the programs have sent, all transfers together."""


def scenes(profile: Profile) -> Iterator[Scene]:
    """One transfer of each kind alone, then all ranks at once."""
    size, num = profile.ranks_per_domain, profile.num_ranks
    ranks = range(num)
    inside = tuple((r, r // size * size + (r + 1) % size) for r in ranks) if size > 1 else ()
    across = tuple((r, (r + size) % num) for r in ranks) if profile.domains > 1 else ()
    for name, pairs in (("inside", inside), ("across", across)):
        if pairs:
            yield Scene(f"one rank, {name}", pairs[:1])
    for name, pairs in (("inside", inside), ("across", across)):
        if pairs:
            yield Scene(f"all ranks, {name}", pairs)
    if inside and across:
        yield Scene("all ranks, both at once", inside + across)


def expected(profile: Profile, pairs: Sequence[Pair]) -> tuple[float, ...]:
    """Fair shares of the links, bytes per second."""
    return tuple(fair_rates([profile.links(*pair) for pair in pairs]))


def probe(network: Network, seconds: float, scene: Scene) -> Probe:
    """Sends without end, and counts what arrives for `seconds` after a warm-up."""
    with ExitStack() as stack:
        ends = [_connect(network, stack, src, dst, PORT + i) for i, (src, dst) in enumerate(scene.pairs)]
        network.reset_counters()
        sent, got = [0] * len(ends), [0] * len(ends)
        threads = [_start(_send, i, ends[i][0], sent) for i in range(len(ends))]
        threads += [_start(_receive, i, ends[i][1], got) for i in range(len(ends))]
        try:
            time.sleep(WARM_UP_S)
            before, started_s = list(got), time.perf_counter()
            time.sleep(seconds)
            after, ended_s = list(got), time.perf_counter()
        finally:
            for sender, _ in ends:
                sender.shutdown(socket.SHUT_WR)  # what is queued still arrives
            for thread in threads:
                thread.join()
        counted = sum(network.all_payload_bytes())
    took_s = ended_s - started_s
    rates = tuple((new - old) / took_s for new, old in zip(after, before, strict=True))
    return Probe(scene, expected(network.profile, scene.pairs), rates, counted / max(1, sum(got)))


def _connect(
    network: Network, stack: ExitStack, src: int, dst: int, port: int
) -> tuple[socket.socket, socket.socket]:
    address = (network.profile.address(dst), port)
    with network.entered(dst):
        listener = stack.enter_context(socket.create_server(address))
    with network.entered(src):
        sender = stack.enter_context(socket.create_connection(address, timeout=10))
    receiver = stack.enter_context(listener.accept()[0])
    sender.settimeout(None)
    return sender, receiver


def _start(
    work: Callable[[int, socket.socket, list[int]], None], index: int, end: socket.socket, count: list[int]
) -> threading.Thread:
    thread = threading.Thread(target=work, args=(index, end, count), daemon=True)
    thread.start()
    return thread


def _send(index: int, sender: socket.socket, count: list[int]) -> None:
    piece = bytes(PIECE_BYTES)
    with suppress(OSError):  # shut down
        while True:
            count[index] += sender.send(piece)


def _receive(index: int, receiver: socket.socket, count: list[int]) -> None:
    piece = bytearray(PIECE_BYTES)
    while number := receiver.recv_into(piece):
        count[index] += number
