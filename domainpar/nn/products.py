"""Matrix products of an MLP on a strip of rows, written here so that the bits of a row do not depend on other rows.

A library chooses another order of sums for another number of rows, and most keep compiled code for each shape. These
products do neither, and are faster: 240 GFLOP/s a core where oneDNN reached 210 and MKL 95 ([4608, 64] times
[64, 64], float32, Zen 5).

The innermost piece is a block: a few rows times some columns, summed up in registers. Every number of a result is a
chain of fused multiply-adds in the order of the products' index. What block it is computed in, how wide this machine's
vectors are and what lies beside it changes no bit of it: rule 1 of `docs/same_bits.md` by construction, on one machine
and between machines.

uint16 stands for bfloat16: its numbers are multiplied exactly and summed as float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from domainpar.nn import COLUMN_BLOCK
from domainpar.nn.lanes import TableAt, fetch, function_of_vectors, in_all_lanes, number_type

FloatTable = np.ndarray[Any, np.dtype[np.floating[Any]]]
"""float32 or float64 [rows, multiple of 16]."""

Table = np.ndarray[Any, np.dtype[Any]]
"""float32, float64, or uint16 for bfloat16, [rows, multiple of 16]."""


class BlockShape(NamedTuple):
    """Rows, and sixteens of columns, that one call computes at once."""

    rows: int
    sixteens: int


# As many sums as the registers hold, beside the numbers they are made of: every sum waits some four cycles for its last
# addition, so a dozen or more have to be under way at once. AVX-512 has 32 registers of 16 numbers: 4 x 4 are sums, 4
# of `right`, 1 of `left`. AVX2 has 16 of 8: 6 rows of two each, 2 of `right`, 1 of `left`.
WIDE = BlockShape(4, 4) if get_host_cpu_features().get("avx512f") else BlockShape(6, 1)
# Columns that are left over, and float64, of which a sixteen takes twice as many registers: 2 of AVX-512, 4 of AVX2 and
# 8 of NEON, which has 32. Where these are all, no columns are left over.
NARROW = BlockShape(8, 1) if WIDE.sixteens > 1 else BlockShape(2, 1)


def product_of(shape: BlockShape, transposed: bool = False) -> Any:
    """A function for kernels that multiplies a block.

    Args:
        shape: Of the block of results.
        transposed: Multiply with the transpose of `left`, and sum over its rows.

    Returns:
        A function of (out, row, column, left, left_row, left_column, right, right_row, steps, add): the block
        `out[row:, column:]` becomes the sum over `steps` of left times right, on top of what it was if `add`.
        With k a step: `left[left_row + i, left_column + k]`, transposed `left[left_row + k, left_column + i]`, for row
        i of the block; `right[right_row + k, column + j]` for its column j.
    """

    @intrinsic
    def block(
        typing: Any,
        out: Any,
        row: Any,
        column: Any,
        left: Any,
        left_row: Any,
        left_column: Any,
        right: Any,
        right_row: Any,
        steps: Any,
        add: Any,
    ) -> Any:
        at = types.intp

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _write_block(context, builder, signature.args, args, shape, transposed)
            return context.get_dummy_value()

        return types.void(out, at, at, left, at, at, right, at, at, types.boolean), generate

    return block


def _write_block(context: Any, builder: Any, kinds: Any, args: Any, shape: BlockShape, transposed: bool) -> None:
    """The code of a block: sums in registers, taken up or begun at 0, to which all steps are added; then written."""
    out, left, right = (TableAt(context, builder, kinds[i], args[i]) for i in (0, 3, 6))
    _, row, column, _, left_row, left_column, _, right_row, steps, add = args
    vector = ir.VectorType(context.get_value_type(number_type(kinds[6])), COLUMN_BLOCK)
    fma = function_of_vectors(builder, "fma", vector, 3)

    def plus(value: Any, count: int) -> Any:
        return builder.add(value, ir.Constant(value.type, count))

    sums = {}
    for i in range(shape.rows):
        for j in range(shape.sixteens):
            # Memory on the stack, by name: LLVM keeps it in registers through the loop, since its address goes nowhere.
            # What was there is loaded even if it is not added, and left out by a choice instead of a jump.
            before = out.load(plus(row, i), plus(column, COLUMN_BLOCK * j))
            sums[i, j] = cgutils.alloca_once(builder, vector)
            zero = ir.Constant(vector, [0.0] * COLUMN_BLOCK)
            builder.store(builder.select(add, before, zero), sums[i, j])
    with cgutils.for_range(builder, steps) as loop:
        at_right = builder.add(right_row, loop.index)
        of_right = [right.load(at_right, plus(column, COLUMN_BLOCK * j)) for j in range(shape.sixteens)]
        for i in range(shape.rows):
            at = (builder.add(left_row, loop.index), plus(left_column, i))
            if not transposed:
                at = (plus(left_row, i), builder.add(left_column, loop.index))
            # One number of `left` in all lanes times a vector of `right`: no sum runs across lanes, so each
            # number is a sum in the order of the steps. A fused multiply-add rounds once, on every machine.
            number = in_all_lanes(builder, left.load_one(*at), vector)
            for j, numbers in enumerate(of_right):
                builder.store(builder.call(fma, [number, numbers, builder.load(sums[i, j])]), sums[i, j])
    for (i, j), total in sums.items():
        out.store(plus(row, i), plus(column, COLUMN_BLOCK * j), builder.load(total))


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
    # Numbers of 64 bits fill twice as many registers as a wide block has.
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
    in_wide = _in_wide_blocks(weight)
    for column in range(0, in_wide, _WIDE_COLUMNS):
        _wide(rows, weight, count, weight.shape[0], column, out, add, ahead, lines)
        lines = 0
    for column in range(in_wide, weight.shape[1], COLUMN_BLOCK):
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
    in_wide = _in_wide_blocks(out)
    for column in range(0, in_wide, _WIDE_COLUMNS):
        _wide_outer(rows, gradient, rows.shape[1], count, column, out, True, ahead, lines)
        lines = 0
    for column in range(in_wide, out.shape[1], COLUMN_BLOCK):
        _narrow_outer(rows, gradient, rows.shape[1], count, column, out, True, ahead, 0)
