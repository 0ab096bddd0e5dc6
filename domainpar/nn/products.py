"""Matrix products of an MLP on a strip of rows, written here so that the bits of a row do not depend on other rows.

A library chooses another order of sums for another number of rows, and most keep compiled code for each shape. These
products do neither, and are faster: 240 GFLOP/s a core where oneDNN reached 210 and MKL 95 ([4608, 64] times
[64, 64], float32, Zen 5). `microkernel` says why no bit depends on how a product is cut into blocks.

uint16 stands for bfloat16: its numbers are multiplied exactly and summed as float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from domainpar.nn import COLUMN_BLOCK
from domainpar.nn.lanes import fetch
from domainpar.nn.microkernel import NARROW, WIDE, BlockShape, product_of

FloatTable = np.ndarray[Any, np.dtype[np.floating[Any]]]
"""float32 or float64 [rows, multiple of 16]."""

Table = np.ndarray[Any, np.dtype[Any]]
"""float32, float64, or uint16 for bfloat16, [rows, multiple of 16]."""

_LINE = 64  # bytes that come from memory at once
_WIDE_COLUMNS = WIDE.sixteens * COLUMN_BLOCK


def _strip_of(shape: BlockShape, transposed: bool) -> Any:
    """A product for some columns of the result: in blocks of a shape, the rows left over one by one."""
    # Rows left over go through a block of one row: the same chain of multiply-adds for each number, so the same bits.
    block, single = product_of(shape, transposed), product_of(BlockShape(1, shape.sixteens), transposed)

    @njit(error_model="numpy")
    def strip(
        left: Table, right: Table, num_rows: int, steps: int, column: int, out: Table, add: bool, ahead: int, lines: int
    ) -> None:
        # A share of what comes next at each block, which computes for longer than that takes to come.
        share, fetched = -(-lines * shape.rows // max(num_rows, 1)), 0
        # Row i of the result is made of row i of `left`, or of its column.
        row_of, column_of, i = int(not transposed), int(transposed), 0
        while i + shape.rows <= num_rows:
            block(out, i, column, left, i * row_of, i * column_of, right, 0, steps, add)
            i += shape.rows
            for line in range(fetched, min(fetched + share, lines)):
                fetch(ahead + line * _LINE)
            fetched += share
        while i < num_rows:
            single(out, i, column, left, i * row_of, i * column_of, right, 0, steps, add)
            i += 1

    return strip


_wide, _narrow = _strip_of(WIDE, False), _strip_of(NARROW, False)
_wide_outer, _narrow_outer = _strip_of(WIDE, True), _strip_of(NARROW, True)


@njit(inline="always")
def _in_wide_blocks(table: Table) -> int:
    """The number of columns of a table that go into wide blocks."""
    # Numbers of 64 bits fill twice as many registers as a lanes_of block has.
    return 0 if table.itemsize == 8 else table.shape[1] // _WIDE_COLUMNS * _WIDE_COLUMNS


@njit(error_model="numpy")
def multiply(
    rows: Table, count: int, weight: FloatTable, out: Table, add: bool, ahead: int = 0, lines: int = 0
) -> None:
    """`out = rows @ weight` for `count` rows.

    Args:
        rows: [>= count, in].
        count: Number of rows; few enough that they stay in cache while all columns are multiplied with them.
        weight: [in, out], a multiple of 16 columns.
        out: Takes the products, [>= count, out].
        add: Add them to what is there.
        ahead: Address of what is fetched into cache meanwhile.
        lines: How many times 64 bytes.
    """
    lanes_of = _in_wide_blocks(weight)
    for column in range(0, lanes_of, _WIDE_COLUMNS):
        _wide(rows, weight, count, weight.shape[0], column, out, add, ahead, lines)
        lines = 0
    for column in range(lanes_of, weight.shape[1], COLUMN_BLOCK):
        _narrow(rows, weight, count, weight.shape[0], column, out, add, ahead, 0)


@njit(error_model="numpy")
def outer(rows: Table, gradient: Table, count: int, out: FloatTable, ahead: int = 0, lines: int = 0) -> None:
    """Add `rows.T @ gradient` for `count` rows to `out`: the gradient of a weight.

    `out` is small and taken up again by every strip: a sum over rows continues where the last strip left it, so that
    its order is that of the rows, whatever a strip is.

    Args:
        rows: What was multiplied, [>= count, in].
        gradient: Gradient of the products, [>= count, out], a multiple of 16 columns.
        count: Number of rows.
        out: [in, out].
        ahead, lines: As in `multiply`.
    """
    lanes_of = _in_wide_blocks(out)
    for column in range(0, lanes_of, _WIDE_COLUMNS):
        _wide_outer(rows, gradient, rows.shape[1], count, column, out, True, ahead, lines)
        lines = 0
    for column in range(lanes_of, out.shape[1], COLUMN_BLOCK):
        _narrow_outer(rows, gradient, rows.shape[1], count, column, out, True, ahead, 0)
