"""How our schedules stand against the fastest other library, in a sentence for each pass and CCR."""

from collections.abc import Iterator, Sequence

from charm_megatron.bench.operator import OperatorRow
from charm_megatron.peers.registry import PEERS

OURS = "charm"
TIE = 0.02
"""Closer than this nobody is called faster."""


def standings(rows: Sequence[OperatorRow]) -> Iterator[str]:
    """Lines for rows that were measured together; none where no peer, or no charm, has run."""
    groups = dict.fromkeys((row.direction, row.ccr) for row in rows)
    for direction, ccr in groups:
        timed = [row for row in rows if (row.direction, row.ccr) == (direction, ccr) and row.median_s]
        peers = [row for row in timed if row.is_peer]
        ours = next((row for row in timed if row.schedule == OURS), None)
        if peers and ours is not None:
            yield f"{direction}, CCR {ccr or 0.0:.2f}: {_sentence(ours, peers)}"
            rings = [row for row in peers if PEERS[row.schedule].is_ring]
            ring = next((row for row in timed if row.schedule == "ring"), None)
            if rings and ring is not None:
                best = min(rings, key=_median_s)
                yield (
                    f"  our ring takes {_median_s(ring) / _median_s(best):.2f} of the time of the fastest ring "
                    f"of a peer, {best.schedule}"
                )


def _sentence(ours: OperatorRow, peers: Sequence[OperatorRow]) -> str:
    best = min(peers, key=_median_s)
    ratio = _median_s(best) / _median_s(ours)
    if ratio >= 1 + TIE:
        return f"{ours.schedule} is {ratio:.2f}x as fast as the best peer, {best.schedule}"
    if ratio > 1 - TIE:
        return f"{ours.schedule} is as fast as the best peer, {best.schedule}"
    return f"{ours.schedule} is SLOWER than the best peer: {best.schedule} is {1 / ratio:.2f}x as fast"


def _median_s(row: OperatorRow) -> float:
    assert row.median_s is not None, "only what was timed"
    return row.median_s
