"""Which context-parallel rank holds which tokens.

A sequence is cut into chunks of equal length, and every chunk has one home rank. `contiguous` gives
rank r chunk r of n. `zigzag`, Megatron's layout for causal attention, cuts 2n chunks and gives rank r
the chunks r and 2n - 1 - r, so that every rank has the same number of unmasked blocks.
"""

from dataclasses import dataclass

from charm_megatron.errors import PlanError, WorkloadError, nearest


@dataclass(frozen=True)
class Sharding:
    """`home[chunk]` is the rank that holds the chunk; chunks are numbered along the sequence."""

    layout: str
    home: tuple[int, ...]

    @property
    def num_chunks(self) -> int:
        return len(self.home)

    @property
    def cp_size(self) -> int:
        return max(self.home) + 1

    def chunks_of(self, cp_rank: int) -> tuple[int, ...]:
        """The chunks of one rank's shard, in sequence order."""
        return tuple(chunk for chunk, home in enumerate(self.home) if home == cp_rank)

    def chunk_len(self, seq_len: int) -> int:
        """Tokens of one chunk. Raises `WorkloadError` when the sequence does not divide evenly."""
        if seq_len % self.num_chunks:
            below = seq_len - seq_len % self.num_chunks
            near = f"{below} or {below + self.num_chunks}" if below else str(self.num_chunks)
            raise WorkloadError(
                f"sequence length {seq_len} does not divide over {self.cp_size} ranks in {self.layout} layout: "
                f"it must be a multiple of {self.num_chunks}, such as {near}"
            )
        return seq_len // self.num_chunks

    def token_ranges(self, cp_rank: int, seq_len: int) -> tuple[tuple[int, int], ...]:
        """Half-open token ranges of one rank's shard, in the order in which the shard holds them."""
        size = self.chunk_len(seq_len)
        return tuple((chunk * size, (chunk + 1) * size) for chunk in self.chunks_of(cp_rank))


def contiguous(cp_size: int) -> Sharding:
    """One chunk a rank."""
    return Sharding("contiguous", tuple(range(cp_size)))


def zigzag(cp_size: int) -> Sharding:
    """Chunks r and 2n - 1 - r on rank r (Megatron-LM, `get_batch_on_this_cp_rank`)."""
    return Sharding("zigzag", (*range(cp_size), *reversed(range(cp_size))))


LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag}


def make_sharding(layout: str, cp_size: int) -> Sharding:
    """The sharding named `layout` over `cp_size` ranks."""
    if layout not in LAYOUTS:
        raise PlanError(f"unknown layout {layout!r}{nearest(layout, LAYOUTS)}")
    if cp_size < 1:
        raise PlanError(f"a context-parallel group has at least 1 rank, but cp_size is {cp_size}")
    return LAYOUTS[layout](cp_size)
