"""The memory of runs: one stretch for each, in which `cost.buffers.arena` has placed all buffers of its program."""

from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from typing import cast

import torch
from torch import Tensor

MOST_PROGRAMS = 16
"""Whose views one stretch of memory keeps: with more, those of the one used longest ago are made again."""


class Stretch:
    """Memory of one run at a time, as bytes and in other dtypes."""

    def __init__(self, num_bytes: int, device: torch.device):
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._typed: dict[torch.dtype, Tensor] = {}
        self._kept: OrderedDict[object, object] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        return self.memory.numel()

    def typed(self, dtype: torch.dtype) -> Tensor:
        """All of it in another dtype."""
        if dtype not in self._typed:
            self._typed[dtype] = self.memory.view(dtype)
        return self._typed[dtype]

    def kept[T](self, program: object, make: Callable[[], T]) -> T:
        """What a program keeps with this memory: the views that it has made of it."""
        if program not in self._kept:
            self._kept[program] = make()
            if len(self._kept) > MOST_PROGRAMS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(program)
        return cast(T, self._kept[program])

    def release(self) -> None:
        """Forgets what programs keep with it, which holds it in turn: then it goes when its run does."""
        self._kept.clear()


class Memory:
    """Gives each run its stretch of memory, and takes it back.

    On a GPU nothing is kept: torch's allocator keeps what it was given back, by stream. Elsewhere stretches are used
    again, of at most `most_idle_bytes` while no run has them: the one used longest ago goes first. A run takes the
    smallest that is large enough; where none is, those that lie idle make way for a larger one.
    """

    watches_frees = False
    """Whether `freed` wants to hear of buffers, which costs a view for each."""

    def __init__(self, device: torch.device, most_idle_bytes: int):
        self.device, self.most_idle_bytes = device, most_idle_bytes
        self.num_bytes = 0
        """Bytes held, in use or idle."""
        self._idle: OrderedDict[int, Stretch] = OrderedDict()  # by age; the one given back last comes last
        self._ages = count()

    def take(self, num_bytes: int) -> Stretch:
        """At least `num_bytes`, uninitialised."""
        fitting = [(one.num_bytes, age) for age, one in self._idle.items() if one.num_bytes >= num_bytes]
        if fitting:
            return self._idle.pop(min(fitting)[1])
        while self._idle:
            self._drop()
        self.num_bytes += num_bytes
        return Stretch(num_bytes, self.device)

    def give(self, stretch: Stretch) -> None:
        """Takes it back; on a GPU its next user comes later on the same stream."""
        if self.device.type == "cuda":
            self.lose(stretch)
            return
        self._idle[next(self._ages)] = stretch
        while self._idle and sum(one.num_bytes for one in self._idle.values()) > self.most_idle_bytes:
            self._drop()

    def lose(self, stretch: Stretch) -> None:
        """Keeps it no longer, as where a run has failed and transfers may still be under way in it."""
        stretch.release()
        self.num_bytes -= stretch.num_bytes

    def freed(self, buffer: Tensor) -> None:
        """A run needs the bytes of this buffer no more; for those who watch."""

    def _drop(self) -> None:
        self.lose(self._idle.popitem(last=False)[1])
