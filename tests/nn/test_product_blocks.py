"""Blocks of any shape have the same bits, and tables whose rows do not lie side by side are refused."""

import numpy as np
import pytest
from marks import slow
from numba import njit
from one_operation import multiply, outer

from domainpar.nn import products
from domainpar.nn.products import NARROW, WIDE, BlockShape, product_of

ROWS, STEPS, COLUMNS = 13, 37, 64
SHAPES = (BlockShape(1, 1), BlockShape(3, 2), BlockShape(4, 4), BlockShape(6, 1))
"""Those of machines with and without vectors of 512 bits are among them."""
SPOILT = {"every other": lambda table: table[:, ::2], "by columns": np.asfortranarray}


def in_blocks_of(shape, transposed=False):
    """A kernel that computes the first whole block of rows, in all columns."""
    block = product_of(shape, transposed)
    rows, columns = shape.rows, shape.sixteens * 16

    @njit
    def kernel(out, left, right):
        steps = right.shape[0]
        for first in range(0, ROWS - rows + 1, rows):
            for column in range(0, COLUMNS, columns):
                at = (0, first) if transposed else (first, 0)
                block(out, first, column, left, at[0], at[1], right, 0, steps, True)

    return kernel


def tables(dtype):
    generator = np.random.default_rng(0)
    return [
        generator.standard_normal(shape).astype(dtype) for shape in ((ROWS, COLUMNS), (ROWS, STEPS), (STEPS, COLUMNS))
    ]


def test_the_shapes_that_are_used_are_among_those_that_are_tried_or_smaller():
    assert WIDE in SHAPES
    assert NARROW.sixteens == 1


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.rows} by {shape.sixteens}")
def test_blocks_of_any_shape_have_the_same_bits(shape):
    """Both ways of multiplying, in the type that is computed in most."""
    before, left, right = tables(np.float32)
    expected, found, transposed = before.copy(), before.copy(), before.copy()
    multiply(left, ROWS, right, expected, True)
    in_blocks_of(shape)(found, left, right)
    in_blocks_of(shape, transposed=True)(transposed, left.T.copy(), right)
    whole = ROWS // shape.rows * shape.rows
    for table in (found, transposed):
        assert table[:whole].tobytes() == expected[:whole].tobytes()
        assert table[whole:].tobytes() == before[whole:].tobytes(), "rows beyond the block"


def test_the_two_ways_of_multiplying_have_the_same_bits():
    for dtype in (np.float32, np.float64):
        expected, left, right = tables(dtype)
        found = expected.copy()
        multiply(left, ROWS, right, expected, True)
        outer(left.T.copy(), right, STEPS, found)
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("position", "spoilt"),
    [
        (pytest.param if position % 2 == place else slow)(position, spoilt, id=f"{position}, {name}")
        for position in (0, 1, 2)
        for place, (name, spoilt) in enumerate(SPOILT.items())
    ],
)
def test_a_table_whose_numbers_do_not_lie_side_by_side_is_refused(position, spoilt):
    given = [np.zeros((32, 32), np.float32) for _ in range(3)]
    given[position] = spoilt(given[position])
    rows, weight, out = given
    with pytest.raises(TypeError, match="only in C-contiguous tables, not in array"):
        products.multiply(rows, 16, weight, out, False)
    with pytest.raises(TypeError, match="only in C-contiguous tables, not in array"):
        products.outer(rows, weight, 16, out)
