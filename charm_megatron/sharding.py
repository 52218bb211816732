"""Which context-parallel rank holds which tokens.

A sequence is cut into chunks, and every chunk has one home rank. Over n ranks:

* `contiguous` gives rank r the r-th of n chunks.
* `zigzag`, Megatron's layout for causal attention, cuts 2n chunks and gives rank r the chunks r and 2n - 1 - r,
  so that every rank has equally many unmasked blocks.
* `striped` gives rank r the tokens r, r + n, r + 2n, .. (arXiv:2311.09431).
* `document_zigzag` cuts each document of a packed sequence by itself into a zigzag.

A chunk never reaches over the end of a document: the first three layouts cut it there.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from charm_megatron.errors import PlanError, WorkloadError, nearest, quoted
from charm_megatron.limits import MOST_CHUNKS, MOST_RANKS, MOST_TOKENS
from charm_megatron.reading import is_whole


@dataclass(frozen=True)
class Chunk:
    """Tokens start, start + stride, .. , `length` of them, of one document."""

    start: int
    length: int
    stride: int = 1
    document: int = 0

    @property
    def tokens(self) -> range:
        return range(self.start, self.start + self.length * self.stride, self.stride)


class Run(NamedTuple):
    """Tokens start, start + stride, .. , `length` of them, as far as that goes on within a shard."""

    start: int
    length: int
    stride: int


@dataclass(frozen=True)
class Sharding:
    """`home[i]` is the rank that holds `chunks[i]`. A rank's shard is its chunks in this order.

    `parts` says into how many pieces the layout's own chunks were cut, see `refine`.
    """

    layout: str
    home: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    parts: int = 1

    @property
    def num_chunks(self) -> int:
        return len(self.home)

    @property
    def cp_size(self) -> int:
        return max(self.home) + 1

    @property
    def seq_len(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def chunks_of(self, cp_rank: int) -> tuple[int, ...]:
        """The chunks of one rank's shard, in order."""
        return tuple(chunk for chunk, home in enumerate(self.home) if home == cp_rank)

    @property
    def runs_by_rank(self) -> tuple[tuple[Run, ...], ...]:
        """The tokens of all shards as `tokens_by_rank` lists them, but in few words however many tokens there are."""
        runs: list[list[Run]] = [[] for _ in range(self.cp_size)]
        for rank, chunk in zip(self.home, self.chunks, strict=True):
            of_rank, run = runs[rank], Run(chunk.start, chunk.length, chunk.stride)
            last = of_rank[-1] if of_rank else None
            if last and last.stride == run.stride and last.start + last.length * last.stride == run.start:
                of_rank[-1] = last._replace(length=last.length + run.length)
            else:
                of_rank.append(run)
        return tuple(tuple(run._replace(stride=1) if run.length == 1 else run for run in of) for of in runs)

    @property
    def tokens_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of all shards: equal for two shardings that only cut chunks differently."""
        return tuple(self.tokens_of(rank) for rank in range(self.cp_size))

    def tokens_of(self, cp_rank: int) -> tuple[int, ...]:
        """The tokens of one rank's shard, in order."""
        return tuple(token for chunk in self.chunks_of(cp_rank) for token in self.chunks[chunk].tokens)


Cut = tuple[list[int], list[Chunk]]


def _contiguous(cp_size: int, seq_len: int, documents: tuple[int, ...]) -> Cut:
    size = seq_len // cp_size
    whole = [Chunk(rank * size, size) for rank in range(cp_size)]
    return _cut_at_documents(list(range(cp_size)), whole, documents)


def _zigzag(cp_size: int, seq_len: int, documents: tuple[int, ...]) -> Cut:
    size = seq_len // (2 * cp_size)
    whole = [Chunk(i * size, size) for i in range(2 * cp_size)]
    return _cut_at_documents([*range(cp_size), *reversed(range(cp_size))], whole, documents)


def _striped(cp_size: int, seq_len: int, documents: tuple[int, ...]) -> Cut:
    home, chunks = [], []
    for number, (start, stop) in enumerate(_spans(documents or (seq_len,))):
        for first in range(start, min(start + cp_size, stop)):
            home.append(first % cp_size)
            chunks.append(Chunk(first, -(-(stop - first) // cp_size), cp_size, number))
    return home, chunks


def _document_zigzag(cp_size: int, seq_len: int, documents: tuple[int, ...]) -> Cut:
    home, chunks = [], []
    for number, (start, stop) in enumerate(_spans(documents or (seq_len,))):
        size = (stop - start) // (2 * cp_size)
        home += [*range(cp_size), *reversed(range(cp_size))]
        chunks += [Chunk(start + i * size, size, 1, number) for i in range(2 * cp_size)]
    return home, chunks


def _spans(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Half-open token ranges of documents."""
    stops = list(accumulate(lengths))
    return list(zip([0, *stops], stops, strict=False))


def _cut_at_documents(home: list[int], whole: list[Chunk], documents: tuple[int, ...]) -> Cut:
    if not documents:
        return home, whole
    out_home, out = [], []
    spans, stops = _spans(documents), list(accumulate(documents))
    for rank, chunk in zip(home, whole, strict=True):
        end = chunk.start + chunk.length
        for number in range(bisect_right(stops, chunk.start), len(spans)):
            start, stop = spans[number]
            if start >= end:
                break
            first, last = max(start, chunk.start), min(stop, end)
            out_home.append(rank)
            out.append(Chunk(first, last - first, 1, number))
    return out_home, out


@dataclass(frozen=True)
class _Layout:
    cut: Callable[[int, int, tuple[int, ...]], Cut]
    chunks_per_rank: int
    each_document: bool = False


LAYOUTS: Mapping[str, _Layout] = {
    "contiguous": _Layout(_contiguous, 1),
    "zigzag": _Layout(_zigzag, 2),
    "striped": _Layout(_striped, 1),
    "document_zigzag": _Layout(_document_zigzag, 2, each_document=True),
}


def require_layout(layout: str) -> None:
    """Raises `PlanError` for what is no layout's name."""
    if not isinstance(layout, str):
        raise PlanError(
            f"a layout is one of {', '.join(LAYOUTS)}, but is {type(layout).__name__} {quoted(layout)}"
        )
    if layout not in LAYOUTS:
        raise PlanError(f"unknown layout {quoted(layout)}{nearest(layout, LAYOUTS)}")


def make_sharding(layout: str, cp_size: int, seq_len: int, documents: tuple[int, ...] = ()) -> Sharding:
    """Splits `seq_len` tokens over `cp_size` ranks; `documents` are the lengths of a packed sequence.

    Raises `PlanError` for an unknown layout and `WorkloadError` for lengths that do not divide.
    """
    require_layout(layout)
    if not 1 <= cp_size <= MOST_RANKS:
        bound = "at least 1 rank" if cp_size < 1 else f"at most {MOST_RANKS} ranks"
        raise PlanError(f"a context-parallel group has {bound}, but cp_size is {quoted(cp_size)}")
    if not is_whole(seq_len):
        raise WorkloadError(
            f"seq_len is a whole number of tokens, but is {type(seq_len).__name__} {quoted(seq_len)}"
        )
    if seq_len > MOST_TOKENS:
        raise WorkloadError(f"a sequence has at most {MOST_TOKENS} tokens, but seq_len is {quoted(seq_len)}")
    if documents and sum(documents) != seq_len:
        raise WorkloadError(f"documents have {sum(documents)} tokens, the sequence has {seq_len}")
    made = LAYOUTS[layout]
    multiple = made.chunks_per_rank * cp_size
    lengths = documents if made.each_document and documents else (seq_len,)
    for length in lengths:
        if length < 1 or length % multiple:
            what = "document" if len(lengths) > 1 else "sequence"
            below = length - length % multiple
            near = f"{below} or {below + multiple}" if below > 0 else str(multiple)
            raise WorkloadError(
                f"{what} length {length} does not divide over {cp_size} ranks in {layout} layout: "
                f"it must be a multiple of {multiple}, such as {near}"
            )
    _require_few(_most_chunks(layout, cp_size, documents or (seq_len,)))
    home, chunks = made.cut(cp_size, seq_len, documents)
    return Sharding(layout, tuple(home), tuple(chunks))


def _most_chunks(layout: str, cp_size: int, documents: tuple[int, ...]) -> int:
    """No less than the number of chunks that a layout cuts."""
    made = LAYOUTS[layout]
    if layout == "striped":
        return sum(min(length, cp_size) for length in documents)
    if made.each_document:
        return made.chunks_per_rank * cp_size * len(documents)
    return made.chunks_per_rank * cp_size + len(documents) - 1


def _require_few(num_chunks: int) -> None:
    if num_chunks > MOST_CHUNKS:
        raise WorkloadError(
            f"a sequence is cut into at most {MOST_CHUNKS} chunks, but this would be {quoted(num_chunks)}; "
            f"fewer ranks, documents or parts work"
        )


def refine(sharding: Sharding, parts: int) -> Sharding:
    """The same shards with each chunk cut into `parts`, equally long or, where it does not divide, but for one token.

    A chunk of fewer tokens is cut into single ones.
    """
    if parts == 1:
        return sharding
    _require_few(sum(min(chunk.length, parts) for chunk in sharding.chunks))
    home, chunks = [], []
    for rank, chunk in zip(sharding.home, sharding.chunks, strict=True):
        bounds = sorted({chunk.length * part // parts for part in range(parts + 1)})
        for first, stop in pairwise(bounds):
            home.append(rank)
            start = chunk.start + first * chunk.stride
            chunks.append(Chunk(start, stop - first, chunk.stride, chunk.document))
    return Sharding(sharding.layout, tuple(home), tuple(chunks), sharding.parts * parts)
