"""Pieces: what a schedule moves and computes with, and their numbers in tables.

A *piece* is one chunk of one head group of one payload. Programs name pieces (`Piece`); tables of hops and blocks hold
numbers (`Numbering`). Nothing outside this module knows how one becomes the other.
"""

from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class Piece(NamedTuple):
    """One chunk of one head group of one payload.

    `src`: the rank from which a partial result was received; None for operands and for the rank's own results.
    `copy` > 0: a piece that is resent after it was freed, see `lowering.decisions.Decisions`.
    """

    payload: str
    chunk: int
    head: int = 0
    src: int | None = None
    copy: int = 0

    def __str__(self) -> str:
        head = f".{self.head}" if self.head else ""
        copy = f"~{self.copy}" if self.copy else ""
        return f"{self.payload}{self.chunk}{head}{copy}" + ("" if self.src is None else f"<{self.src}")

    @property
    def own(self) -> "Piece":
        """The rank's own result, to which this received partial result belongs."""
        return self._replace(src=None)

    def of(self, payload: str) -> "Piece":
        """The same chunk, head group and copy of another payload."""
        return self._replace(payload=payload)


class Numbering(NamedTuple):
    """Pieces of one side by number: (copy * num_chunks + chunk) * head_groups + head.

    Takes and returns integers, or arrays of them.
    """

    num_chunks: int
    head_groups: int

    @property
    def num_first(self) -> int:
        """How many pieces there are, each counted once however often it is resent."""
        return self.num_chunks * self.head_groups

    @overload
    def number(self, chunk: int, head: int, copy: int = 0) -> int: ...
    @overload
    def number(self, chunk: IntArray, head: IntArray | int, copy: IntArray | int = 0) -> IntArray: ...
    def number(self, chunk: int | IntArray, head: int | IntArray, copy: int | IntArray = 0) -> int | IntArray:
        """The number of a piece."""
        return (copy * self.num_chunks + chunk) * self.head_groups + head

    @overload
    def chunk(self, number: int) -> int: ...
    @overload
    def chunk(self, number: IntArray) -> IntArray: ...
    def chunk(self, number: int | IntArray) -> int | IntArray:
        return number // self.head_groups % self.num_chunks

    @overload
    def head(self, number: int) -> int: ...
    @overload
    def head(self, number: IntArray) -> IntArray: ...
    def head(self, number: int | IntArray) -> int | IntArray:
        return number % self.head_groups

    @overload
    def copy_of(self, number: int) -> int: ...
    @overload
    def copy_of(self, number: IntArray) -> IntArray: ...
    def copy_of(self, number: int | IntArray) -> int | IntArray:
        return number // self.num_first

    def first(self, number: IntArray) -> IntArray:
        """The same pieces with copy 0."""
        return number % self.num_first

    def piece(self, payload: str, number: int, src: int | None = None) -> Piece:
        """The piece with a number."""
        return Piece(payload, self.chunk(number), self.head(number), src, self.copy_of(number))
