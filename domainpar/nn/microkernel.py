"""The innermost piece of a matrix product: a few rows times some columns, summed up in registers.

Every number of a result is a chain of fused multiply-adds in the order of the products' index. What block it is
computed in, how wide this machine's vectors are and what lies beside it changes no bit of it: rule 1 of
`docs/same_bits.md` by construction, on one machine and between machines.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from domainpar.nn import COLUMN_BLOCK
from domainpar.nn.lanes import TableAt, in_all_lanes, number_type


class BlockShape(NamedTuple):
    """Rows, and sixteens of columns, that one call computes at once."""

    rows: int
    sixteens: int


def _wide_shape() -> BlockShape:
    """As many sums as the registers hold, beside the numbers they are made of.

    Every sum waits some four cycles for its last addition, so a dozen or more have to be under way at once.
    """
    # AVX-512 has 32 registers of 16 numbers: 4 x 4 are sums, 4 of `right`, 1 of `left`. AVX2 has 16 of 8: 6 rows of two
    # each, 2 of `right`, 1 of `left`.
    return BlockShape(4, 4) if get_host_cpu_features().get("avx512f") else BlockShape(6, 1)


WIDE = _wide_shape()
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
        signature = types.void(out, at, at, left, at, at, right, at, at, types.boolean)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            tables = [TableAt(context, builder, signature.args[i], args[i]) for i in (0, 3, 6)]
            vector = ir.VectorType(context.get_value_type(number_type(signature.args[6])), COLUMN_BLOCK)
            _BlockWriter(builder, shape, transposed, vector, *tables).generate(*args[1:3], *args[4:6], *args[7:])
            return context.get_dummy_value()

        return signature, generate

    return block


class _BlockWriter:
    """Writes the code of one block."""

    def __init__(
        self,
        builder: Any,
        shape: BlockShape,
        transposed: bool,
        vector: Any,
        out: TableAt,
        left: TableAt,
        right: TableAt,
    ) -> None:
        self._builder, self._vector, self._transposed = builder, vector, transposed
        self._out, self._left, self._right = out, left, right
        self._cells = [(i, j) for i in range(shape.rows) for j in range(shape.sixteens)]
        self._shape = shape
        kind = ir.FunctionType(vector, [vector] * 3)
        name = f"llvm.fma.v{COLUMN_BLOCK}f{32 if vector.element == ir.FloatType() else 64}"
        self._fma = cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]

    def generate(
        self, row: Any, column: Any, left_row: Any, left_column: Any, right_row: Any, steps: Any, add: Any
    ) -> None:
        """Sums in registers: taken up or begun at 0, all steps added, written."""
        builder = self._builder
        zero = ir.Constant(self._vector, [0.0] * COLUMN_BLOCK)
        sums = {}
        for i, j in self._cells:
            # Memory on the stack, by name: LLVM keeps it in registers through the loop, since its address goes nowhere.
            # What was there is loaded even if it is not added, and left out by a choice instead of a jump.
            before = self._out.load(self._plus(row, i), self._plus(column, COLUMN_BLOCK * j))
            sums[i, j] = cgutils.alloca_once(builder, self._vector)  # type: ignore[no-untyped-call]
            builder.store(builder.select(add, before, zero), sums[i, j])
        with cgutils.for_range(builder, steps) as loop:
            self._step(sums, column, (left_row, left_column), builder.add(right_row, loop.index), loop.index)
        for i, j in self._cells:
            self._out.store(self._plus(row, i), self._plus(column, COLUMN_BLOCK * j), builder.load(sums[i, j]))

    def _step(self, sums: Any, column: Any, left: tuple[Any, Any], right_row: Any, step: Any) -> None:
        builder, (row, first) = self._builder, left
        right = [self._right.load(right_row, self._plus(column, COLUMN_BLOCK * j)) for j in range(self._shape.sixteens)]
        for i in range(self._shape.rows):
            at = (builder.add(row, step), self._plus(first, i))
            if not self._transposed:
                at = (self._plus(row, i), builder.add(first, step))
            # One number of `left` in all lanes times a vector of `right`: no sum runs across lanes, so each
            # number is a sum in the order of the steps. A fused multiply-add rounds once, on every machine.
            number = in_all_lanes(builder, self._left.load_one(*at), self._vector)
            for j, numbers in enumerate(right):
                builder.store(builder.call(self._fma, [number, numbers, builder.load(sums[i, j])]), sums[i, j])

    def _plus(self, value: Any, count: int) -> Any:
        return self._builder.add(value, ir.Constant(value.type, count))
