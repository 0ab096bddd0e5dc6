"""Memory for tables of rows that is used again, within a step and from step to step.

A step frees tables of hundreds of megabytes and asks for as many again. From the C library each would come as zeroed
pages, which takes a quarter of a step on CPU. So freed blocks are kept here for the next table of about the same size,
and returned to the system if none comes for a while. Used and free blocks together never exceed the largest amount that
was in use at once.

Where memory is short, tables lie in files: `lie_in_files`. Code that goes through tables from one end to the other
calls `let_go` on the way. The memory of rows that were read and written is then left to the system's page cache, which
writes them to the disk when others need the room.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from domainpar.common.problems import as_problem

ALIGNMENT = 64
SMALLEST_KEPT = 2**20  # bytes; smaller ones the C library keeps itself
LARGEST_EXCESS = 1.25  # of a block over the table it is given to
PATIENCE = 1024  # tables, those of many steps: a block that none of them took is given back

Block = npt.NDArray[np.uint8]


def empty_table(rows: int, columns: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised table [rows, columns], 64-byte aligned, on the device of `like`."""
    dtype = dtype or like.dtype
    if like.device.type != "cpu":
        return like.new_empty(rows, columns, dtype=dtype)
    block = torch.from_numpy(_kept.lend(rows * columns * dtype.itemsize + ALIGNMENT))
    first = -block.data_ptr() % ALIGNMENT // dtype.itemsize
    # Not a view of the block: autograd takes it as the result of a function.
    return torch.empty(0, dtype=dtype, device="cpu").set_(block.untyped_storage(), first, (rows, columns))  # type: ignore[call-overload, no-any-return]


class BlockPool:
    """Blocks of memory that are lent, return when the last reference to them is dropped, and are lent again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._returned: deque[Block] = deque()  # filled when a last reference is dropped, at any time: no lock there
        self._free: dict[int, list[tuple[Block, int]]] = {}  # by size: blocks, and how many were lent before they came
        self._num_lent = 0
        self._lent = self._most_lent = 0  # bytes of the blocks in use: now, and at most so far

    @property
    def bytes_lent(self) -> int:
        """Bytes of the blocks in use."""
        with self._lock:
            return self._lent - sum(block.nbytes for block in list(self._returned))

    def lend(self, size: int) -> Block:
        """At least `size` uninitialised bytes."""
        if size < SMALLEST_KEPT:
            return np.empty(size, np.uint8)
        with self._lock:
            self._num_lent += 1
            while self._returned:
                back = self._returned.popleft()
                self._lent -= back.nbytes
                self._free.setdefault(back.nbytes, []).append((back, self._num_lent))
                del back  # else it would still be here when it is to make place
            for size_of_free, free in list(self._free.items()):  # each list from the one that came first to the last
                while free and self._num_lent - free[0][1] > PATIENCE:
                    self._give_back(size_of_free)
            fitting = min((of for of in self._free if size <= of <= size * LARGEST_EXCESS), default=None)
            lent = self._lent + (fitting or size)
            most_lent = max(self._most_lent, lent)
            if fitting is not None:
                block, _ = self._free[fitting].pop()
                if not self._free[fitting]:
                    del self._free[fitting]
            else:
                # Free ones that do not fit are released before another block is allocated: those of the most similar
                # size, which are for the same thing in an event of another size. All others are wanted again in this
                # step.
                while self._free and lent + sum(of * len(free) for of, free in self._free.items()) > most_lent:
                    self._give_back(min(self._free, key=lambda of: max(of, size) / min(of, size)))
                block = _new_block(size) if _files is None else _files.new_block(size)
            self._lent, self._most_lent = lent, most_lent  # now that the block is there
        return np.asarray(_Loan(block, self._returned))

    def _give_back(self, size: int) -> None:
        """Give the block of this size that came back first to the system."""
        del self._free[size][0]
        if not self._free[size]:
            del self._free[size]


def _new_block(size: int) -> Block:
    """Pages of its own: in the C library's heap, a freed block leaves a gap that the next larger one does not fit."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # by default a forked process would write into them
    pages = mmap.mmap(-1, size, flags=private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # of a system without huge pages: those of the usual size are slower, and nothing else
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


class Files:
    """Blocks that lie in files of a folder, without a name, which end with the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: WeakSet[mmap.mmap] = WeakSet()
        self._lock = threading.Lock()  # ranks may be threads: one makes a table while another lets go

    def new_block(self, size: int) -> Block:
        """A block in a file of its own; NotWritten if there is no room for it."""
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a page that finds no room later would end the process
                pages = mmap.mmap(file.fileno(), size)
        except OSError as error:
            error.filename = self.folder
            raise as_problem(error, "--scratch") or error from error
        if hasattr(mmap, "MADV_DONTFORK"):  # a forked process would write into them
            pages.madvise(mmap.MADV_DONTFORK)
        with self._lock:
            self._open.add(pages)
        return np.frombuffer(pages, np.uint8)

    def let_go(self) -> None:
        """Take the pages of all blocks out of this process; they come back from the system's copies, or the disk."""
        with self._lock:
            blocks = list(self._open)
        for pages in blocks:
            pages.madvise(mmap.MADV_DONTNEED)


class _Loan:
    """Shows numpy a block, and puts it where it is found when the array is gone."""

    def __init__(self, block: Block, returned: deque[Block]) -> None:
        self._block, self._returned = block, returned
        self.__array_interface__: dict[str, Any] = block.__array_interface__

    def __del__(self) -> None:
        self._returned.append(self._block)


_kept = BlockPool()
_files: Files | None = None


def lie_in_files(folder: Path | None) -> None:
    """Let all tables of this process that are made from now on lie in files of a folder; None: in memory again."""
    global _files, _kept
    if folder != (None if _files is None else _files.folder):  # ranks may be threads that ask for the same
        _files, _kept = None if folder is None else Files(folder), BlockPool()


def in_files() -> bool:
    """Whether tables lie in files."""
    return _files is not None


def let_go() -> None:
    """Give back the memory of tables that lie in files; their numbers stay, and come back where they are read."""
    if _files is not None:
        _files.let_go()


def bytes_of_tables() -> int:
    """Bytes of all tables in use on the host, except small ones."""
    return _kept.bytes_lent
