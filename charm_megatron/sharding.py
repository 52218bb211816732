"""Which context-parallel rank holds which tokens.

A sequence is cut into chunks, and every chunk has one home rank. Over n ranks:

* `contiguous` gives rank r the r-th of n chunks.
* `zigzag`, Megatron's layout for causal attention, cuts 2n chunks and gives rank r the chunks r and 2n - 1 - r,
  so that every rank has equally many unmasked blocks.
* `striped` gives rank r the tokens r, r + n, r + 2n, .. (arXiv:2311.09431).
* `document_zigzag` cuts each document of a packed sequence by itself into a zigzag.

A chunk never reaches over the end of a document: the first three layouts cut it there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from charm_megatron.errors import PlanError, WorkloadError, nearest


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
    for rank, chunk in zip(home, whole, strict=True):
        for number, (start, stop) in enumerate(_spans(documents)):
            first, last = max(start, chunk.start), min(stop, chunk.start + chunk.length)
            if first < last:
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


def make_sharding(layout: str, cp_size: int, seq_len: int, documents: tuple[int, ...] = ()) -> Sharding:
    """Splits `seq_len` tokens over `cp_size` ranks; `documents` are the lengths of a packed sequence.

    Raises `PlanError` for an unknown layout and `WorkloadError` for lengths that do not divide.
    """
    if layout not in LAYOUTS:
        raise PlanError(f"unknown layout {layout!r}{nearest(layout, LAYOUTS)}")
    if cp_size < 1:
        raise PlanError(f"a context-parallel group has at least 1 rank, but cp_size is {cp_size}")
    if documents and sum(documents) != seq_len:
        raise WorkloadError(f"documents have {sum(documents)} tokens, the sequence has {seq_len}")
    made = LAYOUTS[layout]
    multiple = made.chunks_per_rank * cp_size
    lengths = documents if made.each_document and documents else (seq_len,)
    for length in lengths:
        if length < 1 or length % multiple:
            what = "document" if len(lengths) > 1 else "sequence"
            below = length - length % multiple
            near = f"{below} or {below + multiple}" if below else str(multiple)
            raise WorkloadError(
                f"{what} length {length} does not divide over {cp_size} ranks in {layout} layout: "
                f"it must be a multiple of {multiple}, such as {near}"
            )
    home, chunks = made.cut(cp_size, seq_len, documents)
    return Sharding(layout, tuple(home), tuple(chunks))


def refine(sharding: Sharding, parts: int) -> Sharding:
    """The same shards with each chunk cut into `parts`, equally long or, where it does not divide, but for one token.

    A chunk of fewer tokens is cut into single ones.
    """
    if parts == 1:
        return sharding
    home, chunks = [], []
    for rank, chunk in zip(sharding.home, sharding.chunks, strict=True):
        bounds = sorted({chunk.length * part // parts for part in range(parts + 1)})
        for first, stop in pairwise(bounds):
            home.append(rank)
            start = chunk.start + first * chunk.stride
            chunks.append(Chunk(start, stop - first, chunk.stride, chunk.document))
    return Sharding(sharding.layout, tuple(home), tuple(chunks), sharding.parts * parts)
