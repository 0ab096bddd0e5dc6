"""The operations of a `Program`: compiled functions behind one signature, made once for each width and type.

Each takes its operands as addresses and numbers in one array, in the order of its docstring, and sees them as tables.
An address of 0 is an empty table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit, types
from numba.extending import intrinsic
from torch import Tensor

from domainpar.common.compiling import compiled
from domainpar.nn import COLUMN_BLOCK, kernels, products
from domainpar.nn.kernels import NUM_CONSTANTS, EdgeSums, EndRows, Epilogue, SavedLayer, Workspace
from domainpar.nn.lanes import ROWS_AT_ONCE, lanes_of, load, store
from domainpar.nn.program import NOTHING, STRIP, Operand, Program, When, shared

NUMBERS = {torch.float32: np.float32, torch.float64: np.float64, torch.bfloat16: np.uint16}
"""How kernels see the numbers of tables: uint16 stands for bfloat16."""

FETCH_SLOT = 6
"""Of the two operands of a product that say what to fetch meanwhile: address, and how many times 64 bytes."""

_integers, _bytes = np.int64, np.uint8
_SIXTEEN = lanes_of(COLUMN_BLOCK)


@intrinsic
def _pointer(typing: Any, address: Any, kind: Any) -> Any:
    """An address as a pointer to numbers."""
    pointer = types.CPointer(kind.dtype)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(types.int64, kind), generate


@njit(inline="always")
def _table(arguments: Any, slot: int, rows: int, columns: int, kind: Any) -> Any:
    """The table at an address, or an empty one."""
    here = arguments[slot]
    return carray(_pointer(here, kind), (rows if here != 0 else 0, columns))


@njit(inline="always")
def _numbers(arguments: Any, slot: int, count: int, kind: Any) -> Any:
    here = arguments[slot]
    return carray(_pointer(here, kind), (count if here != 0 else 0,))


@njit(inline="always")
def _list(arguments: Any, slot: int, count: int) -> Any:
    return _numbers(arguments, slot, count, _integers)


_CODE = types.void(types.CPointer(types.int64), types.int64, types.int64)
_alive: list[Any] = []


def _address(function: Callable[..., None]) -> int:
    """Address of the machine code of `function(arguments, first, count)`, as C calls it."""
    kernel = compiled(function)
    result = kernel.get_compile_result(_CODE)
    _alive.append(kernel)  # its code goes with it
    return int(result.library.get_pointer_to_function(result.fndesc.llvm_cfunc_wrapper_name))


@cache
def multiply_rows(kind: torch.dtype, out_kind: torch.dtype) -> int:
    """`out = rows @ weight`: rows, their columns, weight, out, its columns, whether to add; what to fetch."""
    numbers, grad_out = NUMBERS[kind], NUMBERS[out_kind]
    exact = np.float64 if torch.float64 in (kind, out_kind) else np.float32

    def multiply_rows(arguments: Any, first: int, count: int) -> None:
        inputs, outputs = arguments[1], arguments[4]
        rows = _table(arguments, 0, count, inputs, numbers)
        weight = _table(arguments, 2, inputs, outputs, exact)
        out = _table(arguments, 3, count, outputs, grad_out)
        products.multiply(rows, count, weight, out, arguments[5] != 0, arguments[6], arguments[7])

    return _address(multiply_rows)


@cache
def outer_of_rows(kind: torch.dtype, of_gradient: torch.dtype) -> int:
    """`out += rows.T @ gradient`: rows, their columns, gradient, its columns, out; what to fetch."""
    numbers, of_gradients = NUMBERS[kind], NUMBERS[of_gradient]
    exact = np.float64 if torch.float64 in (kind, of_gradient) else np.float32

    def outer_of_rows(arguments: Any, first: int, count: int) -> None:
        inputs, outputs = arguments[1], arguments[3]
        rows = _table(arguments, 0, count, inputs, numbers)
        gradient = _table(arguments, 2, count, outputs, of_gradients)
        out = _table(arguments, 4, inputs, outputs, exact)
        products.outer(rows, gradient, count, out, arguments[6], arguments[7])

    return _address(outer_of_rows)


@njit(inline="always")
def _layer(arguments: Any, count: int, columns: int, exact: Any, lanes: Any) -> Any:
    """Operands 0 to 5: constants, whether normed, activation, ids, key and threshold of dropout."""
    return Epilogue(
        _table(arguments, 0, NUM_CONSTANTS, columns, exact),
        arguments[1],
        arguments[2],
        _list(arguments, 3, count),
        np.uint64(arguments[4]),
        np.uint32(arguments[5]),
        lanes,
    )


@njit(inline="always")
def _work(arguments: Any, columns: int, exact: Any) -> Any:
    """Operands 6 to 9: rows, inverse deviations, totals, gradient."""
    return Workspace(
        _table(arguments, 6, STRIP, columns, exact),
        _table(arguments, 7, 1, STRIP, exact),
        _table(arguments, 8, 2, ROWS_AT_ONCE, exact),
        _table(arguments, 9, STRIP, columns, exact),
    )


@njit(inline="always")
def _ends(arguments: Any, count: int) -> Any:
    """Operands 10 to 13: rows of `src` and of `dst`, pairs, owned nodes."""
    src, dst, pair = _list(arguments, 10, count), _list(arguments, 11, count), _list(arguments, 12, count)
    return EndRows(src, dst, pair, arguments[13])


MANY = 2**40
"""Rows of a table of nodes or pairs, for what need not know their number."""


@njit(inline="always")
def _sums(arguments: Any, columns: int, exact: Any) -> Any:
    """Operands 14 and 15: sums at ends and at pairs."""
    return EdgeSums(_table(arguments, 14, MANY, 2 * columns, exact), _table(arguments, 15, MANY, columns, exact))


@cache
def layer_forward(width: int, exact_kind: torch.dtype, out_kind: torch.dtype) -> int:
    """`kernels.forward`: 0 to 15 as above, gathered, residual, out, kept rows and deviations, again, streams."""
    exact, grad_out, lanes = NUMBERS[exact_kind], NUMBERS[out_kind], lanes_of(width)

    def layer_forward(arguments: Any, first: int, count: int) -> None:
        kernels.forward(
            count,
            _layer(arguments, count, width, exact, lanes),
            _work(arguments, width, exact),
            _ends(arguments, count),
            _table(arguments, 16, MANY, 2 * width, exact),
            _table(arguments, 17, count, width, grad_out),
            _table(arguments, 18, count, width, grad_out),
            _sums(arguments, width, exact),
            SavedLayer(_table(arguments, 19, count, width, exact), _numbers(arguments, 20, count, exact)),
            arguments[21] != 0,
            arguments[22] != 0,
        )

    return _address(layer_forward)


@cache
def layer_backward(
    width: int,
    exact_kind: torch.dtype,
    gradient_kind: torch.dtype,
    out_kind: torch.dtype,
    carried_kind: torch.dtype,
) -> int:
    """`kernels.backward`: 0 to 15 as above, gathered, gradient, carried, out, gradient of constants."""
    exact, of_gradient, lanes = NUMBERS[exact_kind], NUMBERS[gradient_kind], lanes_of(width)
    grad_out, of_carried = NUMBERS[out_kind], NUMBERS[carried_kind]

    def layer_backward(arguments: Any, first: int, count: int) -> None:
        kernels.backward(
            count,
            _layer(arguments, count, width, exact, lanes),
            _work(arguments, width, exact),
            _ends(arguments, count),
            _table(arguments, 17, count, width, of_gradient),
            _table(arguments, 16, MANY, 2 * width, exact),
            _table(arguments, 18, count, width, of_carried),
            _table(arguments, 19, count, width, grad_out),
            _table(arguments, 20, 3, width, exact),
            _sums(arguments, width, exact),
        )

    return _address(layer_backward)


@cache
def copy_columns(kind: torch.dtype, out_kind: torch.dtype) -> int:
    """Copy rows into a wider or narrower table, the columns beyond theirs 0: rows, their columns, out, its columns.

    Into another type go only rows of as many columns, a multiple of 16. Of one type, 4: a table that is added, and 5:
    factors of the left and of the right half of a row.
    """
    numbers, grad_out, alike = NUMBERS[kind], NUMBERS[out_kind], kind == out_kind

    def copy_columns(arguments: Any, first: int, count: int) -> None:
        rows = _table(arguments, 0, count, arguments[1], numbers)
        out = _table(arguments, 2, count, arguments[3], grad_out)
        common = min(rows.shape[1], out.shape[1])
        added, factors = _table(arguments, 4, count, common, numbers), _table(arguments, 5, count, 2, numbers)
        for i in range(count):
            if len(added) > 0:
                for column in range(common):
                    out[i, column] = rows[i, column] + added[i, column]
            elif len(factors) > 0:
                for half in range(2):
                    for column in range(half * common // 2, (half + 1) * common // 2):
                        out[i, column] = rows[i, column] * factors[i, half]
            elif alike:
                for column in range(common):
                    out[i, column] = rows[i, column]
                for column in range(common, out.shape[1]):
                    out[i, column] = 0
            else:
                for column in range(0, common, COLUMN_BLOCK):
                    store(out, i, column, load(rows, i, column, _SIXTEEN))

    return _address(copy_columns)


@cache
def clear_bytes() -> int:
    """Set to 0: the first bytes, how many in a row, bytes from row to row, and how many rows if not the given ones."""

    def clear_bytes(arguments: Any, first: int, count: int) -> None:
        rows = arguments[3] if arguments[3] > 0 else count
        for row in range(rows):
            memory = carray(_pointer(arguments[0] + row * arguments[2], _bytes), (arguments[1],))
            for i in range(len(memory)):
                memory[i] = 0

    return _address(clear_bytes)


@cache
def split(kind: torch.dtype) -> int:
    """`kernels.split_partials`: partials, how many, limbs."""
    numbers = NUMBERS[kind]

    def split(arguments: Any, first: int, count: int) -> None:
        size = arguments[1]
        partials = carray(_pointer(arguments[0], numbers), (size,))
        kernels.split_partials(partials, carray(_pointer(arguments[2], _integers), (2 * size + 2,)))

    return _address(split)


@cache
def sum_pairs(width: int, kind: torch.dtype) -> int:
    """`kernels.sum_pairs`: starts, pairs, at pairs, at ends, scale."""
    numbers, lanes = NUMBERS[kind], lanes_of(width)

    def sum_pairs(arguments: Any, first: int, count: int) -> None:
        kernels.sum_pairs(
            first,
            count,
            _list(arguments, 0, MANY),
            _list(arguments, 1, MANY),
            _table(arguments, 2, MANY, width, numbers),
            _table(arguments, 3, MANY, 2 * width, numbers),
            _table(arguments, 4, MANY, 2, numbers),
            lanes,
        )

    return _address(sum_pairs)


def multiply(program: Program, rows: Operand, weight: Tensor, out: Operand, add: bool = False) -> None:
    """Add to a program: `out = rows @ weight`, or `out +=`."""
    kernel = multiply_rows(rows.dtype, out.dtype)
    program.add(kernel, rows, rows.width, shared(weight), out, weight.shape[1], add, fetches=FETCH_SLOT)


def add_outer(program: Program, rows: Operand, gradient: Operand, out: Operand) -> None:
    """Add to a program: `out += rows.T @ gradient`, of owned tiles."""
    kernel = outer_of_rows(rows.dtype, gradient.dtype)
    program.add(kernel, rows, rows.width, gradient, gradient.width, out, when=When.OWNED_STRIP, fetches=FETCH_SLOT)


def copy(program: Program, rows: Operand, out: Operand, added: Operand = NOTHING, factors: Operand = NOTHING) -> None:
    """Add to a program: copy rows, into more or fewer columns; or in as many, plus others or times two factors each."""
    program.add(copy_columns(rows.dtype, out.dtype), rows, rows.width, out, out.width, added, factors)


def clear_rows(program: Program, rows: Operand, when: When = When.STRIP, columns: int | None = None) -> None:
    """Add to a program: set the first columns of rows to 0, or all."""
    item, width = rows.dtype.itemsize, rows.width if columns is None else columns
    program.add(clear_bytes(), rows, width * item, rows.width * item, 0, when=when)
