"""Matrix products of a perceptron on a block of rows, written here so that a row's bits are its own.

A library picks another order of sums for another number of rows, and most keep compiled code for each shape they
meet; these do neither, and are faster: 240 GFLOP/s a core where oneDNN reached 210 and MKL 95 ([4608, 64] times
[64, 64], float32, Zen 5). See `microkernel` for why no bit depends on how a product is cut into blocks.

uint16 stands for bfloat16: its numbers are multiplied exactly and summed as float32.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from domainpar.nn import COLUMN_BLOCK
from domainpar.nn.compiled import compiled
from domainpar.nn.kernels import FloatTable, Table
from domainpar.nn.microkernel import NARROW, WIDE, Shape, product_of

STRIP = 96  # rows that stay in the first cache while all columns are multiplied with them

_WIDE_COLUMNS = WIDE.sixteens * COLUMN_BLOCK


def _strip_of(shape: Shape) -> Any:
    """`multiply` for some columns of the result: in blocks of a shape, the rows left over one by one."""
    # Rows left over go through a block of one row: the same chain of multiply-adds for each number, so the same bits.
    block, single = product_of(shape), product_of(Shape(1, shape.sixteens))

    @njit(error_model="numpy")
    def strip(
        rows: Table, first: int, count: int, weight: FloatTable, column: int, out: Table, out_first: int, add: bool
    ) -> None:
        steps, i = weight.shape[0], 0
        while i + shape.rows <= count:
            block(out, out_first + i, column, rows, first + i, 0, weight, 0, steps, add)
            i += shape.rows
        while i < count:
            single(out, out_first + i, column, rows, first + i, 0, weight, 0, steps, add)
            i += 1

    return strip


def _outer_strip_of(shape: Shape) -> Any:
    """`outer` for some columns of the result and some rows of the operands."""
    block, single = product_of(shape, transposed=True), product_of(Shape(1, shape.sixteens), transposed=True)

    @njit(error_model="numpy")
    def strip(
        rows: Table, first: int, gradient: Table, gradient_first: int, count: int, column: int, out: FloatTable
    ) -> None:
        i = 0
        while i + shape.rows <= rows.shape[1]:
            block(out, i, column, rows, first, i, gradient, gradient_first, count, True)
            i += shape.rows
        while i < rows.shape[1]:
            single(out, i, column, rows, first, i, gradient, gradient_first, count, True)
            i += 1

    return strip


_wide, _narrow = _strip_of(WIDE), _strip_of(NARROW)
_wide_outer, _narrow_outer = _outer_strip_of(WIDE), _outer_strip_of(NARROW)


@njit(inline="always")
def _in_wide_blocks(table: Table) -> int:
    """The number of columns of a table that go into wide blocks."""
    # Numbers of 64 bits fill twice as many registers as a wide block has.
    return 0 if table.itemsize == 8 else table.shape[1] // _WIDE_COLUMNS * _WIDE_COLUMNS


@compiled
def multiply(rows: Table, first: int, count: int, weight: FloatTable, out: Table, out_first: int, add: bool) -> None:
    """`out[out_first:] = rows[first:] @ weight` for `count` rows.

    Args:
        rows: [>= first + count, in].
        first: First row to be multiplied.
        count: Number of rows.
        weight: [in, out], a multiple of 16 columns.
        out: Takes the products, [>= out_first + count, out].
        out_first: Its first row.
        add: Add them to what is there.
    """
    wide = _in_wide_blocks(weight)
    # Strip by strip, and within one all columns: rows are read from memory once, and the weight, which is small, stays
    # in cache throughout.
    for begin in range(0, count, STRIP):
        num_rows, row, into = min(STRIP, count - begin), first + begin, out_first + begin
        for column in range(0, wide, _WIDE_COLUMNS):
            _wide(rows, row, num_rows, weight, column, out, into, add)
        for column in range(wide, weight.shape[1], COLUMN_BLOCK):
            _narrow(rows, row, num_rows, weight, column, out, into, add)


@compiled
def outer(rows: Table, first: int, gradient: Table, gradient_first: int, count: int, out: FloatTable) -> None:
    """Add `rows[first:].T @ gradient[gradient_first:]` for `count` rows to `out`: the gradient of a weight.

    Args:
        rows: What was multiplied, [>= first + count, in].
        first: First of its rows.
        gradient: Gradient of the products, [>= gradient_first + count, out], a multiple of 16 columns.
        gradient_first: First of its rows.
        count: Number of rows.
        out: [in, out].
    """
    wide = _in_wide_blocks(out)
    # `out` is small and taken up again by every strip: a sum over rows continues where the last strip left it, so that
    # its order is that of the rows, whatever a strip is.
    for begin in range(0, count, STRIP):
        num_rows, row, came = min(STRIP, count - begin), first + begin, gradient_first + begin
        for column in range(0, wide, _WIDE_COLUMNS):
            _wide_outer(rows, row, gradient, came, num_rows, column, out)
        for column in range(wide, out.shape[1], COLUMN_BLOCK):
            _narrow_outer(rows, row, gradient, came, num_rows, column, out)
