"""Threads over tiles, and the memory each of them works in.

A rank's tiles are independent of each other, so its threads take them one by one. Which thread takes which tile
changes no bit: sums at nodes of different tiles lie apart, and all else is added as integers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Scratch:
    """Blocks of memory by name, kept from tile to tile, stage to stage and step to step; one thread's own."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """A block [rows, columns], 64-byte aligned, with whatever was in it; until `name` is taken again."""
        size = rows * columns
        kept = self._kept.get((name, dtype))
        if kept is None or kept.numel() < size:
            kept = self._kept[name, dtype] = torch.zeros(size, dtype=dtype)
        return kept[:size].view(rows, columns)

    def zeros(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """`take`, filled with zeros."""
        return self.take(name, rows, columns, dtype).zero_()


class Team:
    """The threads of one rank: the one that called, and `size - 1` more.

    Args:
        size: Threads that compute, at least 1.

    Raises:
        ValueError: If there would be none.
    """

    def __init__(self, size: int = 1) -> None:
        if size < 1:
            raise ValueError(f"a team of {size} threads cannot compute; ask for at least 1.")
        self.size = size
        self.scratch = [Scratch() for _ in range(size)]
        self._pool = ThreadPoolExecutor(size - 1, "domainpar", torch.set_num_threads, (1,)) if size > 1 else None

    def each(
        self, items: Sequence[T], work: Callable[[T, Scratch], None], between: Callable[[], None] = lambda: None
    ) -> None:
        """Do `work(item, scratch)` for every item, in any order, and wait for the last.

        Args:
            items: Usually tiles.
            work: Called by any thread of the team, with that thread's scratch.
            between: Called by the calling thread only, after each of its items: pokes a transport.
        """
        waiting = deque(items)

        def take() -> T | None:
            with suppress(IndexError):
                return waiting.popleft()  # an item is taken by one thread only
            return None

        def drain(scratch: Scratch, after: Callable[[], None] = lambda: None) -> None:
            try:
                with torch.no_grad():  # what autograd is to see is a thread's own setting
                    while (item := take()) is not None:
                        work(item, scratch)
                        after()
            except BaseException:
                waiting.clear()  # the others end their items and begin no more
                raise

        helping = [] if self._pool is None else [self._pool.submit(drain, scratch) for scratch in self.scratch[1:]]
        try:
            drain(self.scratch[0], between)
        finally:
            errors = [error for helper in helping if (error := helper.exception()) is not None]
        if errors:
            raise errors[0]


_of_rank = threading.local()


def team() -> Team:
    """The team of the rank that calls; a rank may be a thread of its own."""
    if not hasattr(_of_rank, "team"):
        _of_rank.team = Team()
    of_rank: Team = _of_rank.team
    return of_rank


def set_threads(size: int) -> None:
    """Let this rank compute with `size` threads from now on; the same bits with any number.

    Raises:
        ValueError: If there would be none.
    """
    _of_rank.team = Team(size)
