"""Which partial results are added up two at a time.

An accumulator is read and written with each partial result that is added to it, which takes longer than to read the
results themselves. Where an Attend's result is followed by another one for the same pieces, it waits and both are added
at once, in their order. What arrives from others does not wait: its buffer is given back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from charm_megatron.lowering.storage import (
    AccumulateStep,
    AttendStep,
    FreeStep,
    PostStep,
    Range,
    Step,
    Storage,
)


def join_accumulations(storage: Storage) -> list[Step | None]:
    """The steps, in which neighbouring pieces of one message are added to neighbouring pieces at once, with the first.

    They are pieces of one head group. The step of each other one is None.
    """
    joined: list[Step | None] = list(storage.steps)
    first: int | None = None
    for number, step in enumerate(storage.steps):
        if isinstance(step, FreeStep):
            continue
        head = None if first is None else joined[first]
        if (
            isinstance(step, AccumulateStep)
            and isinstance(head, AccumulateStep)
            and _follows(storage, head, step)
        ):
            assert first is not None, "there is a head"
            joined[first] = AccumulateStep(_both(head.source, step.source), _both(head.target, step.target))
            joined[number] = None
        else:
            first = number
    return joined


def _follows(storage: Storage, head: AccumulateStep, step: AccumulateStep) -> bool:
    pairs = ((head.source, step.source), (head.target, step.target))
    if not all((a.buffer, a.stop, a.is_fresh) == (b.buffer, b.start, b.is_fresh) for a, b in pairs):
        return False
    pieces = storage.buffers[head.target.buffer].pieces
    return pieces[head.target.stop - 1].head == pieces[step.target.start].head


def _both(first: Range, second: Range) -> Range:
    return first._replace(stop=second.stop, last_row=first.last_row + second.last_row - second.first_row)


class Addition(NamedTuple):
    """Of the step at `step`: its result number `result`, as it is added to range number `into` of it."""

    step: int
    result: int
    into: int


@dataclass(frozen=True)
class Pairs:
    """By the addition that waits, and by the one that takes it along: the number of the place where it waits."""

    waiting: dict[Addition, int] = field(default_factory=dict)
    taking: dict[Addition, int] = field(default_factory=dict)


class _Seen(NamedTuple):
    """The last thing that happened to a piece of an accumulator; `addition` is None where it may not wait."""

    at: Range
    addition: Addition | None


def pair_additions(steps: Sequence[Step | None]) -> Pairs:
    """Pairs neighbours greedily, in program order."""
    pairs = Pairs()
    last: dict[tuple[int, int], _Seen] = {}
    for number, step in enumerate(steps):
        if step is None:
            continue
        for at in step.sources if isinstance(step, PostStep) else ():
            last.update((piece, _Seen(at, None)) for piece in _pieces(at))
        for addition, at, may_wait, may_take in _additions(number, step):
            before = {last.get(piece) for piece in _pieces(at)}
            seen = before.pop() if may_take and len(before) == 1 else None
            waits = addition if may_wait else None
            if seen is not None and seen.addition is not None and _pieces(seen.at) == _pieces(at):
                pairs.waiting[seen.addition] = pairs.taking[addition] = len(pairs.waiting)
                waits = None
            last.update((piece, _Seen(at, waits)) for piece in _pieces(at))
    return pairs


def _pieces(at: Range) -> list[tuple[int, int]]:
    return [(at.buffer, index) for index in range(at.start, at.stop)]


def _additions(number: int, step: Step) -> Iterator[tuple[Addition, Range, bool, bool]]:
    """What a step adds, to what, and whether it may wait for the next, or take the one before along."""
    match step:
        case AttendStep():
            is_whole = step.action.band is None
            for result, ranges in enumerate(step.results):
                for into, at in enumerate(ranges):
                    yield Addition(number, result, into), at, is_whole, is_whole
        case AccumulateStep():
            yield Addition(number, 0, 0), step.target, False, True
