"""Perfect matchings: in each, every rank has at most one partner, and every pair of ranks meets once."""

Matching = tuple[int | None, ...]
"""`matching[x]` is the partner of x; None: x rests."""


def xor_matchings(size: int) -> list[Matching]:
    """The size - 1 matchings x <-> x ^ i of a power of two (CHARM+, Algorithm 1, without its swap)."""
    assert size & (size - 1) == 0, f"{size} is not a power of two"
    return [tuple(x ^ i for x in range(size)) for i in range(1, size)]


def round_robin_matchings(size: int) -> list[Matching]:
    """The round-robin 1-factorisation: size - 1 matchings of an even size, size of an odd one, one rank resting."""
    odd = size if size % 2 else size - 1
    return [_round(size, odd, t) for t in range(odd)]


def _round(size: int, odd: int, t: int) -> Matching:
    """Round t: x meets t - x modulo `odd`; the one that would meet itself meets the rank left over, if any."""

    def partner(x: int) -> int | None:
        if x == odd:  # the rank left over, of an even size
            return next(y for y in range(odd) if 2 * y % odd == t)
        y = (t - x) % odd
        if y != x:
            return y
        return odd if size > odd else None

    return tuple(partner(x) for x in range(size))


def exchanges(size: int) -> list[tuple[Matching, Matching | None]]:
    """The steps of RM+ over `size` ranks: (KV partners, Q partners or None), smallest merge level first.

    For a power of two, level l = 2, 4, .. pairs the partner x ^ (l + j) for KV with x ^ (l + l/2 + j) for Q,
    and level 1 has the one KV partner x ^ 1 (CHARM+, Algorithm 1). Any other size deals out a round robin.
    """
    if size < 2:
        return []
    if size & (size - 1):
        first, *rest = round_robin_matchings(size)  # always an odd number of them
        return [(first, None), *zip(rest[::2], rest[1::2], strict=True)]
    by_xor = xor_matchings(size)
    steps: list[tuple[Matching, Matching | None]] = [(by_xor[0], None)]
    level = 2
    while level < size:
        half = level // 2
        steps += [(by_xor[level + j - 1], by_xor[level + half + j - 1]) for j in range(half)]
        level *= 2
    return steps
