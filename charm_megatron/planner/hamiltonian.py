"""Edge-disjoint directed Hamiltonian rings: n - 1 of them use every directed link between n ranks exactly once.

For odd n they are Walecki's rings, each taken both ways. For even n they exist for all but n = 4 and 6 (Tillson,
1980); here a local search finds them: it begins with n - 1 disjoint sets of rings, most of them one ring already, and
exchanges links between two sets until each is a single ring.
"""

from collections.abc import Iterator
from functools import cache
from random import Random

from charm_megatron.errors import PlanError

Ring = tuple[int, ...]
Successors = list[int]
"""`successors[x]` follows x: a set of disjoint rings over all ranks."""

MAX_TRIES = 200_000
"""Exchanges tried before the search gives up; some 500 are needed for 32 ranks, at most 42,000 up to 128."""


@cache
def hamiltonian_rings(size: int) -> tuple[Ring, ...]:
    """The `size` - 1 rings, the same in every process. Raises `PlanError` where there are none, or none is found."""
    if size in (4, 6):
        raise PlanError(
            f"{size} ranks have no {size - 1} edge-disjoint Hamiltonian rings; any other number of ranks has, such "
            f"as {size - 1} or 8"
        )
    if size < 3:
        return (tuple(range(size)),) * (size - 1)
    return _walecki(size) if size % 2 else tuple(_ring(successors) for successors in _search(size))


def _walecki(size: int) -> tuple[Ring, ...]:
    """A zigzag through the first size - 1 ranks, turned step by step, closed by the last rank; then all backwards."""
    around = size - 1
    zigzag = [(i + 1) // 2 * (1 if i % 2 else -1) for i in range(around)]
    rings = [(around, *((x + turn) % around for x in zigzag)) for turn in range(around // 2)]
    return (*rings, *(ring[::-1] for ring in rings))


def _search(size: int) -> list[Successors]:
    """Exchanges links between a set of several rings and any other set while that makes no more rings.

    One that makes one more is let through once in fifty times, to leave dead ends.
    """
    sets = _with_right_parity(_two_matchings_each(size))
    num_rings = [_count_rings(successors) for successors in sets]
    random = Random(size)  # only random() itself is the same in every version of Python
    for _ in range(MAX_TRIES):
        unfinished = [i for i, count in enumerate(num_rings) if count > 1]
        if not unfinished:
            return sets
        i, j = unfinished[int(random.random() * len(unfinished))], int(random.random() * len(sets))
        closed = _exchangeable(sets[i], sets[j])
        if len(closed) < 2:
            continue  # i is j, or they can only swap all links
        ranks = closed[int(random.random() * len(closed))]
        changed = _exchanged(sets[i], sets[j], ranks)
        after = [_count_rings(successors) for successors in changed]
        more = sum(after) - num_rings[i] - num_rings[j]
        if random.random() < 0.02**more:
            sets[i], sets[j] = changed
            num_rings[i], num_rings[j] = after
    raise PlanError(
        f"no {size - 1} edge-disjoint Hamiltonian rings of {size} ranks were found; they are known for {size - 1} or "
        f"{size + 1} ranks"
    )


def _two_matchings_each(size: int) -> list[Successors]:
    """Links of a round robin: each two rounds in a row are one ring, taken both ways; the last round is pairs.

    In round t rank x meets t - x modulo size - 1; the last rank meets the one that would meet itself.
    """
    last = size - 1

    def partner(x: int, t: int) -> int:
        if x == last:
            return t * size // 2 % last  # twice this is t
        y = (t - x) % last
        return last if y == x else y

    sets = []
    for first in range(0, last - 1, 2):
        for rounds in ((first, first + 1), (first + 1, first)):
            successors, x = [0] * size, 0
            for hop in range(size):
                successors[x] = partner(x, rounds[hop % 2])
                x = successors[x]
            sets.append(successors)
    return [*sets, [partner(x, last - 1) for x in range(size)]]


def _with_right_parity(sets: list[Successors]) -> list[Successors]:
    """Exchanges links of two ranks in an odd number of sets, if needed, so that the search can end.

    The search keeps the product of the signs of the sets, taken as permutations. It is to end at -1, that of n - 1
    rings of even length n. At the start it is the sign of the n / 2 pairs of the last set.
    """
    size = len(sets) + 1
    if size // 2 % 2:
        return sets
    for y in range(size):
        for x in range(y):
            for among in _closed_sets(sets, x, y):
                if len(among) % 2:
                    for i in among:
                        sets[i][x], sets[i][y] = sets[i][y], sets[i][x]
                    return sets
    raise AssertionError(f"no odd exchange between two of {size} ranks")


def _closed_sets(sets: list[Successors], x: int, y: int) -> Iterator[list[int]]:
    """Groups of sets in which x has the successors that y has, so that the two can swap them."""
    set_of_y = {successors[y]: i for i, successors in enumerate(sets)}
    seen: set[int] = set()
    for start in range(len(sets)):
        among: list[int] = []
        i = start
        while i not in seen:
            seen.add(i)
            among.append(i)
            i = set_of_y.get(sets[i][x], -1)  # -1: x is followed by y itself
            if i < 0 or sets[i][y] == x:
                break
        else:
            if among and i == start:
                yield among


def _exchangeable(a: Successors, b: Successors) -> list[list[int]]:
    """The smallest groups of ranks that have the same successors in `a` as in `b`."""
    predecessor = [0] * len(a)
    for x, y in enumerate(a):
        predecessor[y] = x
    seen = [False] * len(a)
    groups = []
    for start in range(len(a)):
        group, x = [], start
        while not seen[x]:
            seen[x] = True
            group.append(x)
            x = predecessor[b[x]]
        if group:
            groups.append(group)
    return groups


def _exchanged(a: Successors, b: Successors, ranks: list[int]) -> tuple[Successors, Successors]:
    a, b = a.copy(), b.copy()
    for x in ranks:
        a[x], b[x] = b[x], a[x]
    return a, b


def _count_rings(successors: Successors) -> int:
    seen = [False] * len(successors)
    count = 0
    for start in range(len(successors)):
        if not seen[start]:
            count += 1
            x = start
            while not seen[x]:
                seen[x] = True
                x = successors[x]
    return count


def _ring(successors: Successors) -> Ring:
    ring = [0]
    while len(ring) < len(successors):
        ring.append(successors[ring[-1]])
    return tuple(ring)
