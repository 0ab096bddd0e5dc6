"""Tables of rows whose memory is used again, within a step and from step to step.

A step frees tables of hundreds of megabytes and asks for as many again. From the C library each would come as fresh
zeroed pages, which costs a quarter of a step on CPU; so freed blocks are kept here for the next table of about the
same size, and given back when none has come for a while.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 64
SMALLEST_KEPT = 2**20  # bytes; smaller ones the C library keeps itself
LARGEST_EXCESS = 1.25  # of a block over the table it is given to
OUTGROWN = 1.6  # a new block takes the place of a free one that differs less: the next event is larger, or smaller
PATIENCE = 1024  # tables, many steps' worth: a block that none of them took is given back

Block = npt.NDArray[np.uint8]


def empty_table(rows: int, columns: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A table [rows, columns], 64-byte aligned, with whatever was in its memory.

    Args:
        rows, columns: Its shape.
        like: Gives device, and type if `dtype` is None.
        dtype: Type of the numbers.
    """
    dtype = dtype or like.dtype
    if like.device.type != "cpu":
        return like.new_empty(rows, columns, dtype=dtype)
    block = torch.from_numpy(_kept.lend(rows * columns * dtype.itemsize + ALIGNMENT))
    first = -block.data_ptr() % ALIGNMENT // dtype.itemsize
    # Not a view of the block: autograd takes it as the result of a function.
    return torch.empty(0, dtype=dtype).set_(block.untyped_storage(), first, (rows, columns))  # type: ignore[call-overload, no-any-return]


class Kept:
    """Blocks of memory that are lent, come back by themselves when nothing refers to them, and are lent again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._returned: deque[Block] = deque()  # filled by whoever drops the last reference, at any time: no lock there
        self._free: dict[int, list[tuple[Block, int]]] = {}  # by size: blocks, and how many were lent before they came
        self._num_lent = 0
        self._there = 0  # bytes of all blocks, lent or free

    @property
    def bytes_lent(self) -> int:
        """Bytes of the blocks that somebody refers to."""
        with self._lock:
            free = sum(size * len(blocks) for size, blocks in self._free.items())
            return self._there - free - sum(block.nbytes for block in list(self._returned))

    def lend(self, size: int) -> Block:
        """At least `size` bytes, with whatever was in them."""
        if size < SMALLEST_KEPT:
            return np.empty(size, np.uint8)
        with self._lock:
            self._num_lent += 1
            while self._returned:
                back = self._returned.popleft()
                self._free.setdefault(back.nbytes, []).append((back, self._num_lent))
                del back  # else it would still be here when it is to make place
            for free in self._free.values():  # each from the one that came first to the last
                while free and self._num_lent - free[0][1] > PATIENCE:
                    self._there -= free[0][0].nbytes
                    del free[0]
            self._free = {of: free for of, free in self._free.items() if free}
            fitting = min((of for of in self._free if size <= of <= size * LARGEST_EXCESS), default=None)
            if fitting is not None:
                block, _ = self._free[fitting].pop()
            else:  # in the place of one for the same thing in an event of another size, which does not fit
                alike = [of for of in self._free if size / OUTGROWN < of < size * OUTGROWN]
                if alike:
                    other = min(alike, key=lambda of: abs(of - size))
                    self._free[other].pop()  # before another block is asked for
                    self._there -= other
                block = _new_block(size)
                self._there += block.nbytes
        return np.asarray(_Loan(block, self._returned))


def _new_block(size: int) -> Block:
    """Pages of its own: in the C library's heap, a freed block leaves a gap that the next larger one does not fit."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # by default a forked process would write into them
    pages = mmap.mmap(-1, size, flags=private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


class _Loan:
    """Shows numpy a block, and puts it where it is found when the array is gone."""

    def __init__(self, block: Block, returned: deque[Block]) -> None:
        self._block, self._returned = block, returned
        self.__array_interface__: dict[str, Any] = block.__array_interface__

    def __del__(self) -> None:
        self._returned.append(self._block)


_kept = Kept()


def bytes_of_tables() -> int:
    """Bytes of all tables that somebody refers to, but for small ones, on the host."""
    return _kept.bytes_lent
