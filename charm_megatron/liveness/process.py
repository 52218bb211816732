"""What this process is doing. It has one answer, hence one registry, which keeps nothing alive.

Everything in a process that waits for peers adds itself; whoever speaks for the process asks all of them.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from threading import Lock
from typing import Protocol
from weakref import WeakSet

from charm_megatron.liveness.standing import Exchange, Standing


class Watched(Protocol):
    """Something that waits for peers."""

    @property
    def standing(self) -> Standing:
        """What it does now; asked by another thread than its own."""
        ...


_watched: "WeakSet[Watched]" = WeakSet()
_addresses: set[str] = set()
_lock = Lock()


def watch(watched: Watched) -> None:
    """From now on it speaks for this process."""
    with _lock:
        _watched.add(watched)


def watch_addresses(addresses: Iterable[str]) -> None:
    """From now on this process is known by these ends of its connections, "host:port"."""
    with _lock:
        _addresses.update(addresses)


def standing_of_process() -> Standing:
    """That of everything watched: the latest action, and the exchanges of all."""
    with _lock:
        watched, addresses = list(_watched), frozenset(_addresses)
    return replace(combined([one.standing for one in watched]), addresses=addresses)


def combined(standings: Sequence[Standing]) -> Standing:
    """The latest action of several that one process does in turn, and their exchanges by group; no addresses."""
    active = [one for one in standings if one.doing]
    latest = min(active, key=lambda one: one.for_s, default=Standing())
    exchanges = _merged([exchange for one in standings for exchange in one.exchanges])
    return Standing(latest.doing, latest.for_s, exchanges)


def _merged(exchanges: Iterable[Exchange]) -> tuple[Exchange, ...]:
    """One for each group: several of this process may exchange in it, one after the other."""
    by_group: dict[tuple[int, ...], list[Exchange]] = defaultdict(list)
    for exchange in exchanges:
        by_group[exchange.ranks].append(exchange)
    return tuple(map(_merged_in_group, by_group.values()))


def _merged_in_group(exchanges: Sequence[Exchange]) -> Exchange:
    sends = tuple(map(sum, zip(*(one.sends for one in exchanges), strict=True)))
    recvs = tuple(map(sum, zip(*(one.recvs for one in exchanges), strict=True)))
    waits = next((one for one in exchanges if one.waiting), None)
    if waits is None or waits.waiting is None:
        return Exchange(exchanges[0].ranks, sends, recvs, None)
    place = waits.ranks.index(waits.waiting.peer)
    counts = (recvs, waits.recvs) if waits.waiting.is_recv else (sends, waits.sends)
    of_others = counts[0][place] - counts[1][place]
    waiting = replace(waits.waiting, number=waits.waiting.number + of_others)
    return Exchange(waits.ranks, sends, recvs, waiting)
