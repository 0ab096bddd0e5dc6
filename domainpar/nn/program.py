"""A stage as a list of operations on strips of rows, which compiled code runs over all tiles of a part.

Python says what is to be done with some hundred rows: multiply these by that weight, norm them, sum them at nodes. One
compiled call per thread then takes tile after tile, cuts each into strips and does every operation on a strip before
the next, without the interpreter. So the number of Python calls does not depend on the number of tiles, threads never
wait for the interpreter's lock, and what an operation leaves for the next lies in the first caches:

    table of edges  [num_edges, width]        memory of one thread, the same for every strip
    +------------------------------+         +-----------------+
    | tile 0                       |         | rows of layer 0 |  [STRIP, width]
    +------------------------------+         | rows of layer 1 |
    | tile 1   | strip 0           | ------> | ...             |
    |          +-------------------+         | weight partials |  zero at the start of a tile
    |          | strip 1           | ------> | limbs of sums   |  zero at the start of the stage
    +------------------------------+         +-----------------+

An operand is an address and the bytes by which it moves from one row to the next: those of a table's row, or none for
what all strips share. Which thread takes which tile, and where a strip ends, changes no bit: a row's results are its
own, sums over a tile's rows go on where the last strip left them, sums at nodes of different tiles lie apart, and all
else is added as integers (`docs/same_bits.md`, rules 1, 2 and 4).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from domainpar.common.compiling import compiled
from domainpar.common.words import several
from domainpar.parallel import tables
from domainpar.plan import IntArray

STRIP = 128
"""Rows that are taken through all operations of a stage at a time; no bit depends on it."""

ALIGNMENT = CACHE_LINE = 64
MOST_OPERANDS = 23
POKES = 8
"""How often at least, in a stage, the calling thread looks after a transport while rows are under way."""

PASSAGES = 32
"""How often at least, in a stage, it lets go of the rows behind it where tables lie in files."""


class When(IntEnum):
    """When an operation is due, and with which rows.

    Of a foreign tile no gradient of a weight is made: its owner does.
    """

    NODES_START = -1  # the tile's nodes
    TILE_STARTS = 0  # the tile's pairs
    OWNED_TILE_STARTS = 1  # none
    STRIP = 2  # the strip's rows
    OWNED_STRIP = 3
    OWNED_TILE_ENDS = 4  # none


class Operand(NamedTuple):
    """What an operation works with: memory, or a number.

    Attributes:
        address: Of the first row of all, or within the memory of a thread; or the number itself.
        row_bytes: By which it moves with each row; 0 for what all strips share.
        of_thread: Whether it is in the memory of a thread.
        width: Columns; 0 for what is no table.
        dtype: Of its numbers.
        alive: What owns the memory.
    """

    address: int = 0
    row_bytes: int = 0
    of_thread: bool = False
    width: int = 0
    dtype: torch.dtype = torch.float32
    alive: Any = None


NOTHING = Operand()


def table(tensor: Tensor) -> Operand:
    """A table whose rows are those of the tiles, on CPU, contiguous; nothing, if it has no column or no row."""
    width = tensor.shape[1]
    return Operand(tensor.data_ptr(), width * tensor.itemsize, False, width, tensor.dtype, tensor)


def shared(values: Tensor | np.ndarray[Any, Any]) -> Operand:
    """What all strips share: a weight, constants, rows of nodes."""
    if isinstance(values, Tensor):
        width = values.shape[1] if values.dim() == 2 else 0
        return Operand(values.data_ptr(), 0, False, width, values.dtype, values)
    return Operand(values.ctypes.data, 0, False, values.shape[1] if values.ndim == 2 else 0, alive=values)


def numbers(values: IntArray) -> Operand:
    """An integer of each row, int64 [rows]; nothing, if there is none."""
    return Operand(values.ctypes.data, values.itemsize, alive=values) if len(values) else NOTHING


def tiles_of(rows: IntArray) -> IntArray:
    """Ranges for `Program.run` of owned pieces without pairs, given their rows from and to, int64 [pieces, 2]."""
    ranges = np.zeros((len(rows), 7), np.int64)
    ranges[:, :2], ranges[:, 6] = rows, 1
    return ranges


@intrinsic
def _call(typing: Any, address: Any, arguments: Any, first: Any, count: Any) -> Any:
    """Call the operation at an address with the operands in an array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        integer = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [integer.as_pointer(), integer, integer])
        operands = context.make_array(signature.args[1])(context, builder, args[1]).data
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [operands, args[2], args[3]])
        return context.get_dummy_value()

    return types.void(types.int64, arguments, types.int64, types.int64), generate


@intrinsic
def _next(typing: Any, counter: Any) -> Any:
    """The number in an array of one, which becomes one more: no two threads get the same."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        # A release: ARM needs it so that threads which take a later tile see what this one has written.
        return builder.atomic_rmw("add", data, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(counter), generate


@compiled
def _run(
    kernels: Any,
    whens: Any,
    addresses: Any,
    row_bytes: Any,
    ranges: Any,
    counter: Any,
    most: int,
    strip: int,
    arguments: Any,
) -> bool:
    """Take tiles until none is left, or `most` are done; says whether some may be left.

    Args:
        kernels: Address of each operation, int64 [operations].
        whens: See `When`, ascending, [operations].
        addresses, row_bytes: Of its operands, int64 [operations, MOST_OPERANDS].
        ranges: See `Program.run`.
        counter: Number of the next tile, int64 [1]; of all threads.
        most: Tiles.
        strip: Rows of a strip.
        arguments: Where the operands of a call are put, int64 [MOST_OPERANDS]; this thread's own.
    """
    for _ in range(most):
        tile = _next(counter)
        if tile >= len(ranges):
            return False
        first, stop, first_pair, stop_pair, first_node, stop_node, owned = ranges[tile]
        last = len(kernels)
        begin = 0
        for op in range(last):
            if whens[op] > 1:
                break
            begin = op + 1
            if whens[op] == -1:
                _operate(kernels, addresses, row_bytes, op, first_node, stop_node - first_node, arguments)
            elif whens[op] == 0:
                _operate(kernels, addresses, row_bytes, op, first_pair, stop_pair - first_pair, arguments)
            elif owned:
                _operate(kernels, addresses, row_bytes, op, first, 0, arguments)
        for row in range(first, stop, strip):
            count = min(strip, stop - row)
            for op in range(begin, last):
                if whens[op] == 2 or (whens[op] == 3 and owned):
                    _operate(kernels, addresses, row_bytes, op, row, count, arguments)
        for op in range(begin, last):
            if whens[op] == 4 and owned:
                _operate(kernels, addresses, row_bytes, op, first, 0, arguments)
    return True


@compiled
def _operate(kernels: Any, addresses: Any, row_bytes: Any, op: int, first: int, count: int, arguments: Any) -> None:
    for i in range(MOST_OPERANDS):
        arguments[i] = addresses[op, i] + first * row_bytes[op, i]
    _call(kernels[op], arguments, first, count)


class Program:
    """Operations of one stage, in order."""

    def __init__(self) -> None:
        self._operations: list[tuple[When, int, list[Operand]]] = []
        self._fetching: list[tuple[list[Operand], int]] = []
        self._bytes = 0

    def add(self, kernel: int, *operands: Operand | int, when: When = When.STRIP, fetches: int = 0) -> None:
        """Add an operation.

        Args:
            kernel: Address of its code, of `operations`.
            operands: As it wants them.
            when: When it is due.
            fetches: The first of two operands that say what it may fetch into cache meanwhile; 0: it fetches nothing.
        """
        filled = [operand if isinstance(operand, Operand) else Operand(int(operand)) for operand in operands]
        self._operations.append((when, kernel, filled))
        if fetches:
            filled += [NOTHING] * (fetches + 2 - len(filled))
            self._fetching.append((filled, fetches))

    def reads(self, operand: Operand) -> None:
        """Say that a table's rows are read: an operation that can fetches those of the next strip during this one."""
        if operand.row_bytes < CACHE_LINE:
            return
        for filled, slot in self._fetching:
            if filled[slot] is NOTHING:
                filled[slot] = operand._replace(address=operand.address + STRIP * operand.row_bytes)
                filled[slot + 1] = Operand(STRIP * operand.row_bytes // CACHE_LINE)
                return

    def room(self, rows: int, width: int, dtype: torch.dtype) -> Operand:
        """Memory of each thread for a table [rows, width], with whatever was in it."""
        first = self._bytes
        self._bytes += -(-rows * width * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return Operand(first, 0, True, width, dtype)

    def run(self, ranges: IntArray, between: Callable[[], None] | None = None) -> None:
        """Do all tiles, with the threads of this rank's team.

        Args:
            ranges: Tiles, int64 [tiles, 7]: rows from and to, pairs from and to, nodes from and to, and whether owned.
            between: Called now and then by the calling thread, while others compute.
        """
        if len(ranges) == 0 or not self._operations:
            return
        # Before the strips of a tile, at each strip, after them; as they were added within each of the three.
        ordered = sorted(self._operations, key=lambda operation: (operation[0] > 1) + (operation[0] > 3))
        whens, kernels = (np.array([operation[i] for operation in ordered], np.int64) for i in (0, 1))
        filled = [[*operands, *[NOTHING] * (MOST_OPERANDS - len(operands))] for _, _, operands in ordered]
        addresses, row_bytes, in_thread = (
            np.array([[operand[i] for operand in operands] for operands in filled], np.int64) for i in range(3)
        )
        counter, members = np.zeros(1, np.int64), team()
        threads = min(members.size, len(ranges))

        def worker(thread: int) -> Callable[[int], bool]:
            own = addresses + in_thread * members.memory(thread, self._bytes).ctypes.data
            arguments = np.empty(MOST_OPERANDS, np.int64)
            return lambda most: bool(_run(kernels, whens, own, row_bytes, ranges, counter, most, STRIP, arguments))

        pauses, looks_after = POKES, between
        if tables.in_files():
            pauses = PASSAGES

            def looks_after() -> None:
                tables.let_go()
                if between is not None:
                    between()

        most = len(ranges) if looks_after is None else -(-len(ranges) // (pauses * threads))

        def stop() -> None:
            counter[0] = len(ranges)  # the others end their tiles and begin no more

        members.each(threads, worker, most, stop, looks_after)
        tables.let_go()

    def thread_arrays(self, operand: Operand, count: int, dtype: Any) -> list[Any]:
        """The same memory of every thread, as arrays of `count` numbers."""
        first, size = operand.address, count * np.dtype(dtype).itemsize
        return [memory[first : first + size].view(dtype) for memory in team().memories(self._bytes)]


class Team:
    """The threads of one rank: the one that called, and `size - 1` more, each with memory of its own.

    Args:
        size: Threads that compute, at least 1.

    Raises:
        ValueError: If there would be none.
    """

    def __init__(self, size: int = 1) -> None:
        if size < 1:
            raise ValueError(f"a team of {size} threads cannot compute; ask for at least 1.")
        self.size = size
        self._memory = [np.zeros(0, np.uint8) for _ in range(size)]
        self._pool = ThreadPoolExecutor(size - 1, "domainpar", torch.set_num_threads, (1,)) if size > 1 else None

    def memory(self, thread: int, size: int) -> Any:
        """At least `size` bytes of a thread's own, 64-byte aligned, with what it left there; zeros at first."""
        if len(self._memory[thread]) < size:
            block = np.zeros(size + ALIGNMENT, np.uint8)
            first = -block.ctypes.data % ALIGNMENT
            self._memory[thread] = block[first : first + size]
        return self._memory[thread]

    def memories(self, size: int) -> list[Any]:
        """The memory of every thread."""
        return [self.memory(thread, size) for thread in range(self.size)]

    def each(
        self,
        threads: int,
        worker: Callable[[int], Callable[[int], bool]],
        most: int,
        stop: Callable[[], None],
        between: Callable[[], None] | None = None,
    ) -> None:
        """Let some threads work until nothing is left.

        Args:
            threads: How many.
            worker: Makes the function of a thread, given its number. That takes how much it may do before it returns,
                and returns whether there may be more.
            most: So much for the calling thread; the others come back at the end.
            stop: Called after an error in any thread, which is raised when the others have come back: makes them.
            between: Called by the calling thread whenever it comes back.
        """

        def take_part(thread: int, most: int, between: Callable[[], None] | None) -> None:
            try:
                work = worker(thread)
                while work(most):
                    if between is not None:
                        between()
            except BaseException:
                stop()
                raise

        others = [] if self._pool is None else [self._pool.submit(take_part, i, 2**62, None) for i in range(1, threads)]
        try:
            take_part(0, most, between)
        finally:
            errors = [error for other in others if (error := other.exception()) is not None]
        if errors:
            raise errors[0]


_of_rank = threading.local()


def team() -> Team:
    """The team of the rank that calls; a rank may be a thread of its own."""
    if not hasattr(_of_rank, "team"):
        _of_rank.team = Team()
    of_rank: Team = _of_rank.team
    return of_rank


def means_of(device: torch.device) -> str:
    """Words for what each rank computes with."""
    return several(team().size, "thread") if device.type == "cpu" else torch.cuda.get_device_name(device)


def set_threads(size: int) -> None:
    """Let this rank compute with `size` threads from now on; the same bits with any number.

    Raises:
        ValueError: If there would be none.
    """
    _of_rank.team = Team(size)
