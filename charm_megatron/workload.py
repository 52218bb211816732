"""What is to be computed: one attention call over a whole sequence, before it is split over ranks."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from charm_megatron.errors import WorkloadError, nearest, quoted
from charm_megatron.limits import (
    MOST_BATCH,
    MOST_DOCUMENTS,
    MOST_HEAD_DIM,
    MOST_HEADS,
    MOST_MASK_CHARACTERS,
    MOST_TOKENS,
)
from charm_megatron.reading import is_number, is_whole, whole_number

ITEMSIZE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

_MASK_WORD = re.compile(r"(?P<word>[a-z]+)(?::(?P<numbers>-?[0-9]+(?:,-?[0-9]+)*))?")


class Band(NamedTuple):
    """Which (row a, column b) of a block count: those with lo <= a - b <= hi."""

    lo: int
    hi: int

    def __str__(self) -> str:
        return f"{self.lo}:{self.hi}"

    def is_full(self, num_rows: int, num_columns: int) -> bool:
        """Whether a block of this size has no masked element."""
        return self.lo <= 1 - num_columns and self.hi >= num_rows - 1

    def is_causal(self, num_rows: int, num_columns: int) -> bool:
        """Whether exactly the upper triangle of a square block is masked."""
        return num_rows == num_columns and self.lo == 0 and self.hi >= num_rows - 1

    def trimmed(self, num_rows: int, num_columns: int) -> tuple[slice, slice, "Band"]:
        """The rows and columns of a block that have an unmasked element, and the band within those."""
        rows = slice(max(0, self.lo), min(num_rows, num_columns + self.hi))
        columns = slice(max(0, rows.start - self.hi), min(num_columns, rows.stop - self.lo))
        shift = columns.start - rows.start
        return rows, columns, Band(self.lo + shift, self.hi + shift)

    def num_pairs(self, num_rows: int, num_columns: int) -> int:
        """Number of unmasked elements of a block of this size."""

        def at_most(bound: int) -> int:
            """Elements with a - b <= bound: row by row, those from column a - bound on."""
            bound = min(max(bound, -num_columns), num_rows - 1)
            whole = min(bound + 1, num_rows) if bound >= 0 else 0  # rows that keep all their columns
            first, last = bound + 1 if bound >= 0 else 0, num_rows - 1
            last = min(last, bound + num_columns - 1)  # later rows keep none
            cut = max(0, last - first + 1)
            return whole * num_columns + cut * (num_columns + bound) - (first + last) * cut // 2

        return max(0, at_most(self.hi) - at_most(self.lo - 1))


@dataclass(frozen=True)
class Mask:
    """Which keys a query at position p sees: positions p - left .. p + right of its own document.

    None is without bound. `documents` are lengths in tokens that add up to the sequence; empty: one document.
    """

    left: int | None = None
    right: int | None = 0
    documents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for reach in (self.left, self.right):
            if reach is not None and not is_whole(reach):
                raise WorkloadError(
                    f"a window reaches a whole number of tokens, or None, but is {type(reach).__name__} "
                    f"{quoted(reach)}"
                )
        if (self.left is not None and self.left < 0) or (self.right is not None and self.right < 0):
            raise WorkloadError(
                f"a window reaches 0 or more tokens to either side, but is {quoted(str(self))}"
            )
        if not isinstance(self.documents, tuple):
            raise WorkloadError(
                f"documents are a tuple of lengths in tokens, but are {type(self.documents).__name__} "
                f"{quoted(self.documents)}; tuple(documents) would work"
            )
        if len(self.documents) > MOST_DOCUMENTS:
            raise WorkloadError(
                f"a sequence has at most {MOST_DOCUMENTS} documents, but there are {len(self.documents)}"
            )
        if not all(is_whole(length) for length in self.documents):
            raise WorkloadError(f"documents are whole numbers of tokens, but are {quoted(self.documents)}")
        if any(length < 1 for length in self.documents):
            raise WorkloadError(f"documents have at least 1 token, but are {quoted(self.documents)}")
        if sum(self.documents) > MOST_TOKENS or any(
            reach > MOST_TOKENS for reach in (self.left, self.right) if reach is not None
        ):
            raise WorkloadError(
                f"documents and windows have at most {MOST_TOKENS} tokens, but are {quoted(str(self))}"
            )

    @property
    def is_causal(self) -> bool:
        """Plain causal attention, nothing else."""
        return self == Mask()

    @property
    def is_none(self) -> bool:
        """Every query sees every key."""
        return self == Mask(None, None)

    def __str__(self) -> str:
        parts = [f"window:{_number(self.left)},{_number(self.right)}"]
        if self.left is None and self.right in (None, 0):
            parts = ["none" if self.right is None else "causal"]
        if self.documents:
            parts.append(f"documents:{','.join(map(str, self.documents))}")
        return "+".join(parts)


def _number(reach: int | None) -> str:
    return "-1" if reach is None else str(reach)


CAUSAL = Mask()
NO_MASK = Mask(None, None)


def parse_mask(text: str) -> Mask:
    """Reads `causal`, `none`, `window:LEFT,RIGHT` (-1: unbounded), each with `+documents:LENGTH,..` if wanted."""
    left: int | None = None
    right: int | None = 0
    documents: tuple[int, ...] = ()
    if len(text) > MOST_MASK_CHARACTERS:
        raise WorkloadError(f"mask {quoted(text)} has more than {MOST_MASK_CHARACTERS:,} characters")
    for part in text.split("+"):
        match = _MASK_WORD.fullmatch(part.strip())
        word = match["word"] if match else part
        numbers = _mask_numbers(match["numbers"] or "", text) if match else ()
        if word == "causal" and not numbers:
            left, right = None, 0
        elif word == "none" and not numbers:
            left, right = None, None
        elif word == "window" and len(numbers) == 2:
            left, right = (None if number == -1 else number for number in numbers)
        elif word == "documents" and numbers:
            documents = numbers
        else:
            words = ("causal", "none", "window", "documents")
            known = "" if word in words else nearest(word, words)
            raise WorkloadError(
                f"mask {quoted(text)}: {quoted(part.strip())} is not causal, none, window:LEFT,RIGHT or "
                f"documents:LENGTH,..{known}"
            )
    return Mask(left, right, documents)


def _mask_numbers(text: str, mask: str) -> tuple[int, ...]:
    words = text.split(",") if text else []
    if len(words) > MOST_DOCUMENTS:
        raise WorkloadError(
            f"mask {quoted(mask)} has {len(words)} numbers, but a sequence has at most {MOST_DOCUMENTS} documents"
        )
    numbers = []
    for word in words:
        number = whole_number(word.removeprefix("-"), MOST_TOKENS)
        if number is None:
            raise WorkloadError(
                f"mask {quoted(mask)}: {quoted(word)} is more than {MOST_TOKENS} tokens, the most of a sequence"
            )
        numbers.append(-number if word.startswith("-") else number)
    return tuple(numbers)


def as_mask(mask: Mask | str) -> Mask:
    """A mask, or what `parse_mask` reads. Raises `WorkloadError` for anything else."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, str):
        return parse_mask(mask)
    raise WorkloadError(
        f"a mask is a Mask or a word such as 'causal' or 'none', but is {type(mask).__name__} {quoted(mask)}"
    )


def require_softmax_scale(scale: float) -> None:
    """Raises `WorkloadError` for a scale with which a softmax makes no sense: not positive, or not finite."""
    if not is_number(scale):
        raise WorkloadError(
            f"softmax_scale is a number, but is {type(scale).__name__} {quoted(scale)}; None is 1 / sqrt(head_dim)"
        )
    if not 0 < scale < math.inf:
        raise WorkloadError(
            f"softmax_scale must be positive and finite, but is {scale!r}; None is 1 / sqrt(head_dim)"
        )


_MOST_OF_SIZE = {
    "batch": MOST_BATCH,
    "seq_len": MOST_TOKENS,
    "num_heads": MOST_HEADS,
    "num_kv_heads": MOST_HEADS,
    "head_dim": MOST_HEAD_DIM,
    "head_dim_v": MOST_HEAD_DIM,
}


@dataclass(frozen=True)
class Workload:
    """Sizes of one attention call, of all ranks of a context-parallel group together.

    `seq_len` counts tokens of the unsplit sequence; `num_heads` and `num_kv_heads` are those of one
    tensor-parallel rank. `head_dim` is the width of q and k, `head_dim_v` that of v and out.
    """

    batch: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str = "float32"
    mask: Mask = CAUSAL

    def __post_init__(self) -> None:
        for name, most in _MOST_OF_SIZE.items():
            value = getattr(self, name)
            if not is_whole(value):
                raise WorkloadError(
                    f"{name} must be a whole number, but is {type(value).__name__} {quoted(value)}"
                )
            if not 1 <= value <= most:
                bound = "at least 1" if value < 1 else f"at most {most}"
                raise WorkloadError(f"{name} must be {bound}, but is {quoted(value)}")
        if self.num_heads % self.num_kv_heads:
            raise WorkloadError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly; "
                f"num_heads must be a multiple of num_kv_heads"
            )
        if not isinstance(self.mask, Mask):
            raise WorkloadError(
                f"the mask of a workload is a Mask, but is {type(self.mask).__name__} {quoted(self.mask)}; "
                f"parse_mask reads words"
            )
        if self.dtype not in ITEMSIZE_BYTES:
            *others, last = ITEMSIZE_BYTES
            raise WorkloadError(
                f"attention takes tensors of dtype {', '.join(others)} or {last}, but they are {self.dtype}"
            )

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element of q, k, v and out."""
        return ITEMSIZE_BYTES[self.dtype]

    @property
    def accumulate_dtype(self) -> str:
        """Dtype of accumulators, lse and delta: float32, or float64 where the model itself is float64."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def summary(self) -> str:
        """As in "4 x 512 tokens, 8 on 2 heads of 64 and 64, bfloat16, mask causal"."""
        heads = f"{self.num_heads} on {self.num_kv_heads} heads of {self.head_dim} and {self.head_dim_v}"
        return f"{self.batch} x {self.seq_len} tokens, {heads}, {self.dtype}, mask {self.mask}"

    @property
    def softmax_scale(self) -> float:
        """What logits are multiplied by where nothing else is asked for: 1 / sqrt(head_dim)."""
        return 1.0 / math.sqrt(self.head_dim)

    def width(self, name: str) -> int:
        """The width of a head by its name, `head_dim` or `head_dim_v`."""
        return {"head_dim": self.head_dim, "head_dim_v": self.head_dim_v}[name]

    def block_flops(self, num_pairs: float, num_heads: int, products: Iterable[str]) -> float:
        """Floating-point operations for `num_pairs` (query, key) pairs of each sequence and `num_heads` heads.

        `products` names the width of each matrix product, see `schedule.passes.Pass`.
        """
        return 2.0 * num_pairs * self.batch * num_heads * sum(self.width(name) for name in products)
