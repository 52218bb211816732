"""How charm compares with the fastest other library, in a sentence for each direction and CCR."""

from collections.abc import Iterator, Sequence

from charm_megatron.bench.case import OperatorRow
from charm_megatron.peers.registry import PEERS

OURS, OUR_RING = "charm", "ring"
TIE = 0.02
"""Within this margin neither of two is called faster."""


def verdicts(rows: Sequence[OperatorRow]) -> Iterator[str]:
    """Lines for rows that were measured together; none where charm, or every peer, was not timed."""
    for direction, ccr in dict.fromkeys((row.direction, row.ccr) for row in rows):
        timed = [row for row in rows if (row.direction, row.ccr) == (direction, ccr) and row.median_s]
        peers = [row for row in timed if row.is_peer]
        ours = {row.schedule: row for row in timed if not row.is_peer}
        if not peers or OURS not in ours:
            continue
        yield f"{direction}, CCR {ccr or 0.0:.2f}: {_sentence(ours[OURS], peers)}"
        rings = [row for row in peers if PEERS[row.schedule].is_ring]
        if rings and OUR_RING in ours:
            best = min(rings, key=_median_s)
            ratio = _median_s(ours[OUR_RING]) / _median_s(best)
            yield f"  our ring takes {ratio:.2f} times as long as the fastest peer ring, {best.schedule}"


def _sentence(ours: OperatorRow, peers: Sequence[OperatorRow]) -> str:
    best = min(peers, key=_median_s)
    ratio = _median_s(best) / _median_s(ours)
    if ratio >= 1 + TIE:
        return f"{ours.schedule} is {ratio:.2f}x as fast as the fastest peer, {best.schedule}"
    if ratio > 1 - TIE:
        return f"{ours.schedule} is as fast as the fastest peer, {best.schedule}"
    return f"{ours.schedule} is SLOWER than the fastest peer: {best.schedule} is {1 / ratio:.2f}x as fast"


def _median_s(row: OperatorRow) -> float:
    assert row.median_s is not None, "only what was timed"
    return row.median_s
