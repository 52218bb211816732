"""Finds what keeps ranks waiting, from what all of them say of themselves.

The rank that notices is rarely the one to blame: ranks wait for one that waits for another. A rank that is silent is to
blame. Otherwise who waits is followed to whom it waits for. Transfers between two ranks match in the order in which
they are posted, so their counts say whether both ends have posted one: then the link between them is to blame. Else it
is the peer, which has not come so far, or whom that peer waits for in turn; but where that one has itself lost a
connection because the kernel gave it up, it waited in a collective that nothing here knows, and that link is to blame.
The kernel's word comes a little later than a transfer's deadline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from charm_megatron.liveness.standing import Exchange, Standing, Waiting, transfer_text


@dataclass(frozen=True)
class Root:
    """What is to blame, in a sentence, and the ranks that it names."""

    sentence: str
    ranks: tuple[int, ...]
    is_final: bool = True
    """Whether nothing that the kernel may still say of connections would tell more."""


Dead = Sequence[tuple[int, tuple[str, ...]]]
"""Ranks that lost a connection because the kernel gave it up, and the address of its other end in each way in which it
may be written."""


def find_root(
    standings: Mapping[int, Standing], silent_s: Mapping[int, float], dead: Dead = ()
) -> Root | None:
    """What keeps ranks waiting; None where nothing that they say tells.

    `silent_s`: seconds since anything was heard of the ranks that do not answer.
    """
    if silent_s:
        return _silent(standings, silent_s)
    paths = [_path(rank, standings) for rank, standing in standings.items() if standing.waiting]
    links = [pair for path in paths for pair in pairwise(path) if _is_posted_by_both(*pair, standings)]
    if links:
        return _link(links, standings)
    ends = [path[-1] for path in paths if path[-1] not in path[:-1]]
    last = max(ends, key=ends.count) if ends else None
    # A rank that does something else for too long fills its connections, which the kernel may then give up as well.
    of_last = [one for one in dead if last in (None, one[0])]
    if of_last:
        return _dead_link(*of_last[0], standings)
    if last is not None:
        return _behind(last, standings)
    return _circle(paths[0], standings) if paths else None


def _dead_link(rank: int, addresses: Sequence[str], standings: Mapping[int, Standing]) -> Root:
    others = [
        peer
        for peer, standing in standings.items()
        if peer != rank and not standing.addresses.isdisjoint(addresses)
    ]
    ranks = tuple(sorted((rank, *others[:1])))
    what = f"the link between {named(ranks)}" if others else f"the link of rank {rank} to {addresses[0]}"
    return Root(f"{what} does not carry: the kernel has given its connection up", ranks)


def _silent(standings: Mapping[int, Standing], silent_s: Mapping[int, float]) -> Root:
    ranks = tuple(sorted(silent_s))
    last = ""
    if len(ranks) == 1 and ranks[0] in standings:
        last = f"; its last word: {standings[ranks[0]]}"
    do = "does" if len(ranks) == 1 else "do"
    return Root(f"{named(ranks)} {do} not answer, for {max(silent_s.values()):.1f} s{last}", ranks)


def _path(rank: int, standings: Mapping[int, Standing]) -> list[int]:
    """The rank, whom it waits for, whom that one waits for .., up to one who waits for nobody or came before."""
    path = [rank]
    while (standing := standings.get(path[-1])) and standing.waiting and path[-1] not in path[:-1]:
        path.append(standing.waiting[1].peer)
    return path


def _is_posted_by_both(rank: int, peer: int, standings: Mapping[int, Standing]) -> bool:
    """Whether what `rank` waits for with `peer` was posted by `peer` as well."""
    standing = standings[rank]
    assert standing.waiting is not None, "asked of ranks that wait"
    exchange, waiting = standing.waiting
    theirs = _same(exchange, standings.get(peer))
    if theirs is None:
        return False
    posted = theirs.sends if waiting.is_recv else theirs.recvs
    return posted[exchange.ranks.index(rank)] > waiting.number


def _same(exchange: Exchange, standing: Standing | None) -> Exchange | None:
    """The peer's view of the same group."""
    found = (one for one in (standing.exchanges if standing else ()) if one.ranks == exchange.ranks)
    return next(found, None)


def _link(links: list[tuple[int, int]], standings: Mapping[int, Standing]) -> Root:
    pairs = sorted({tuple(sorted(pair)) for pair in links})
    rank, peer = max(links, key=lambda pair: standings[pair[0]].for_s)
    what = f"{_words(standings[rank].waiting)}, which both have posted, is not through"
    after = f" after {standings[rank].for_s:.1f} s"
    shared = set(pairs[0]).intersection(*pairs[1:])
    if len(pairs) > 1 and shared:
        (one,) = shared
        peers = tuple(sorted({other for pair in pairs for other in pair} - {one}))
        return Root(f"the links of rank {one}, to {named(peers)}, do not carry: {what}{after}", (one, *peers))
    first, second = sorted((rank, peer))
    return Root(f"the link between ranks {first} and {second} does not carry: {what}{after}", (first, second))


def _words(waits: tuple[Exchange, Waiting] | None) -> str:
    assert waits is not None, "only ranks that wait are put in words"
    waiting = waits[1]
    return transfer_text(waiting.what, waiting.is_recv, waiting.peer)


def _behind(rank: int, standings: Mapping[int, Standing]) -> Root:
    says = f"it answers: {standings[rank]}" if rank in standings else "it has said nothing"
    return Root(f"rank {rank} keeps the others waiting; {says}", (rank,), is_final=False)


def _circle(path: list[int], standings: Mapping[int, Standing]) -> Root:
    """Nobody has posted what another one waits for: they are in different calls."""
    circle = path[path.index(path[-1]) :][:-1]
    each = "; ".join(f"rank {rank}: {standings[rank]}" for rank in circle)
    return Root(f"{named(tuple(circle))} wait for each other in different calls: {each}", tuple(circle))


def named(ranks: tuple[int, ...]) -> str:
    """As in "rank 2" or "ranks 1, 2 and 5"; of very many, the first."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ranks if len(ranks) <= 8 else ranks[:7]
    rest = f"{len(ranks) - 7} others" if len(ranks) > 8 else str(shown[-1])
    first = shown if len(ranks) > 8 else shown[:-1]
    return f"ranks {', '.join(map(str, first))} and {rest}"
