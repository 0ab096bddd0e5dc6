"""Products are those of their definition, to the last bit: one chain of fused multiply-adds for each number."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_operation import multiply, outer

from domainpar.nn.program import STRIP

FLOAT32, FLOAT64, BFLOAT16 = np.float32, np.float64, np.uint16
TYPES = {  # of the rows, of the weight, of what comes out
    "float32": (FLOAT32, FLOAT32, FLOAT32),
    "float64": (FLOAT64, FLOAT64, FLOAT64),
    "bfloat16": (BFLOAT16, FLOAT32, FLOAT32),
    "bfloat16 out": (FLOAT32, FLOAT32, BFLOAT16),
    "bfloat16 in and out": (BFLOAT16, FLOAT32, BFLOAT16),
}
OF_OUTER = {  # of the rows, of the gradient, of what comes out
    "float32": (FLOAT32, FLOAT32, FLOAT32),
    "float64": (FLOAT64, FLOAT64, FLOAT64),
    "bfloat16": (BFLOAT16, BFLOAT16, FLOAT32),
    "bfloat16 rows": (BFLOAT16, FLOAT32, FLOAT32),
    "bfloat16 gradient": (FLOAT32, BFLOAT16, FLOAT32),
}
each_type = pytest.mark.parametrize("kinds", TYPES.values(), ids=TYPES)
each_type_of_outer = pytest.mark.parametrize("kinds", OF_OUTER.values(), ids=OF_OUTER)
with_and_without_add = pytest.mark.parametrize("add", [False, True], ids=["", "add"])

COLUMNS = range(16, 145, 16)
WIDTHS = (1, 16, 19)
BEFORE, AFTER = 3, 8
"""Rows of a table before and after those that are meant: as many as a block that reaches too far would touch."""


def narrowed(table):
    """float32 numbers as bfloat16, to the nearest, ties to even; for numbers that are finite."""
    bits = table.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(table):
    """What the numbers of a table are, in float64."""
    numbers = (table.astype(np.uint32) << 16).view(np.float32) if table.dtype == np.uint16 else table
    return numbers.astype(np.float64)


def drawn(generator, rows, columns, kind):
    numbers = generator.standard_normal((rows, columns))
    return narrowed(numbers.astype(np.float32)) if kind == BFLOAT16 else numbers.astype(kind)


def nan(kind):
    return 0x7FC0 if kind == BFLOAT16 else np.nan


def among(table, number):
    """The same rows in a larger table that holds this number elsewhere."""
    larger = np.full((BEFORE + len(table) + AFTER, table.shape[1]), number, table.dtype)
    larger[BEFORE : BEFORE + len(table)] = table
    return larger


def nan_around(table):
    return among(table, nan(table.dtype))


def bits(table):
    return table.tobytes()


def assert_near(found, before, left, right):
    """By how much a chain of multiply-adds can miss `before + left @ right`, and what is rounded to bfloat16."""
    terms = np.abs(before) + np.abs(left) @ np.abs(right)
    unit = 2.0**-53 if found.dtype == FLOAT64 else 2.0**-24
    bound = (left.shape[1] + 1) * unit * terms
    if found.dtype == BFLOAT16:
        bound += 2.0**-8 * terms
    assert (np.abs(widened(found) - (before + left @ right)) <= bound).all()


@with_and_without_add
@each_type
def test_a_product_is_that_of_its_definition_for_any_number_of_rows_and_columns(kinds, add):
    """And reads and writes nothing else: operands lie among NaN, and so is what was there, unless it is added to."""
    generator = np.random.default_rng(0)
    for num_rows in range(21):
        for columns in COLUMNS:
            rows = drawn(generator, num_rows, WIDTHS[num_rows % 3], kinds[0])
            weight = drawn(generator, rows.shape[1], columns, kinds[1])
            before = drawn(generator, num_rows, columns, kinds[2])
            out = among(before if add else np.full_like(before, nan(kinds[2])), 5)
            multiply(nan_around(rows)[BEFORE:], num_rows, weight, out[BEFORE:], add)
            found = out[BEFORE : BEFORE + num_rows].copy()
            assert_near(found, widened(before) * add, widened(rows), widened(weight))
            assert bits(out) == bits(among(found, 5)), "something was written outside of the block"


@each_type_of_outer
def test_the_gradient_of_a_weight_is_added_as_its_definition_says_for_any_shape(kinds):
    generator = np.random.default_rng(1)
    for num_rows in range(21):
        for columns in COLUMNS:
            rows = drawn(generator, num_rows, (1, 2, 5, 11, 16, 19, 32)[num_rows % 7], kinds[0])
            gradient = drawn(generator, num_rows, columns, kinds[1])
            before = drawn(generator, rows.shape[1], columns, kinds[2])
            found = before.copy()
            outer(nan_around(rows)[BEFORE:], nan_around(gradient)[BEFORE:], num_rows, found)
            assert_near(found, widened(before), widened(rows).T, widened(gradient))
            assert num_rows or bits(found) == bits(before)


def test_rows_come_from_one_place_and_go_to_another():
    generator = np.random.default_rng(2)
    rows, weight = drawn(generator, 40, 16, FLOAT32), drawn(generator, 16, 80, FLOAT32)
    gradient = drawn(generator, 40, 80, FLOAT32)
    moved, expected = np.zeros((40, 80), np.float32), np.zeros((40, 80), np.float32)
    multiply(rows[7:], 9, weight, moved[21:], False)
    multiply(rows, 40, weight, expected, False)
    assert bits(moved[21:30]) == bits(expected[7:16])
    assert not moved[:21].any()
    assert not moved[30:].any()
    moved, expected = np.zeros((16, 80), np.float32), np.zeros((16, 80), np.float32)
    outer(rows[7:], gradient[21:], 9, moved)
    outer(rows[7:16].copy(), gradient[21:30].copy(), 9, expected)
    assert bits(moved) == bits(expected)


def fused(left, right, before, kind):
    """`left * right + before`, rounded once."""
    exact = Fraction(float(left)) * Fraction(float(right)) + Fraction(float(before))
    near = kind(float(exact))  # rounded twice, so it may be the neighbour
    three = np.nextafter(near, kind(-np.inf)), near, np.nextafter(near, kind(np.inf))
    return min(three, key=lambda one: (abs(Fraction(float(one)) - exact), one.tobytes()[0] & 1))  # ties to even


def chain(left, right, before, kind):
    """Multiply-adds in the order of the index."""
    for one, other in zip(left, right, strict=True):
        before = fused(one, other, before, kind)
    return before


def by_chains(before, left, right, kind):
    return np.array([[chain(row, right[:, j], kind(before[i, j]), kind) for j in range(right.shape[1])]
                     for i, row in enumerate(left)], kind)  # fmt: skip


@with_and_without_add
@each_type
def test_every_number_is_a_chain_of_fused_multiply_adds_in_the_order_of_the_index(kinds, add):
    """80 columns are computed in two ways, and so are 11 rows."""
    generator = np.random.default_rng(3)
    rows, weight = drawn(generator, 11, 9, kinds[0]), drawn(generator, 9, 80, kinds[1])
    out = drawn(generator, 11, 80, kinds[2])
    some = np.arange(0, 80, 7)
    expected = by_chains(widened(out)[:, some] * add, widened(rows), widened(weight)[:, some], kinds[1])
    multiply(rows, 11, weight, out, add)
    assert bits(out[:, some]) == bits(narrowed(expected) if kinds[2] == BFLOAT16 else expected)


@each_type_of_outer
def test_the_gradient_of_a_weight_is_a_chain_of_fused_multiply_adds_in_the_order_of_rows(kinds):
    generator = np.random.default_rng(4)
    rows, gradient = drawn(generator, 9, 11, kinds[0]), drawn(generator, 9, 80, kinds[1])
    out = drawn(generator, 11, 80, kinds[2])
    some = np.arange(0, 80, 7)
    expected = by_chains(widened(out)[:, some], widened(rows).T, widened(gradient)[:, some], kinds[2])
    outer(rows, gradient, 9, out)
    assert bits(out[:, some]) == bits(expected)


some_rows = st.integers(0, 2 * STRIP + 20)


@pytest.mark.parametrize("columns", [16, 144])
@each_type
@given(count=some_rows, cuts=st.lists(some_rows, max_size=5), add=st.booleans())
@settings(max_examples=25)
def test_rows_keep_their_bits_however_they_are_cut_into_blocks(kinds, columns, count, cuts, add):
    generator = np.random.default_rng(count)
    rows, weight = drawn(generator, count, 24, kinds[0]), drawn(generator, 24, columns, kinds[1])
    whole = drawn(generator, count, columns, kinds[2])
    in_pieces = whole.copy()
    multiply(rows, count, weight, whole, add)
    ends = sorted(min(cut, count) for cut in (0, *cuts, count))
    for first, stop in pairwise(ends):
        multiply(rows[first:], stop - first, weight, in_pieces[first:], add)
    assert bits(in_pieces) == bits(whole)


@pytest.mark.parametrize("columns", [16, 144])
@each_type_of_outer
@given(count=some_rows, cuts=st.lists(some_rows, max_size=5))
@settings(max_examples=25)
def test_a_gradient_that_is_added_piece_by_piece_has_the_bits_of_the_whole(kinds, columns, count, cuts):
    generator = np.random.default_rng(count)
    rows, gradient = drawn(generator, count, 21, kinds[0]), drawn(generator, count, columns, kinds[1])
    whole = drawn(generator, 21, columns, kinds[2])
    in_pieces = whole.copy()
    outer(rows, gradient, count, whole)
    ends = sorted(min(cut, count) for cut in (0, *cuts, count))
    for first, stop in pairwise(ends):
        outer(rows[first:], gradient[first:], stop - first, in_pieces)
    assert bits(in_pieces) == bits(whole)


@each_type
def test_columns_keep_their_bits_beside_any_others(kinds):
    generator = np.random.default_rng(5)
    rows, weight = drawn(generator, 30, 24, kinds[0]), drawn(generator, 24, 144, kinds[1])
    whole = np.zeros((30, 144), kinds[2])
    multiply(rows, 30, weight, whole, False)
    for first, stop in ((0, 16), (16, 80), (48, 128), (128, 144)):
        part = np.zeros((30, stop - first), kinds[2])
        multiply(rows, 30, weight[:, first:stop].copy(), part, False)
        assert bits(part) == bits(whole[:, first:stop])


def test_without_inputs_a_product_is_zero_or_what_was_there():
    rows, weight = np.empty((5, 0), np.float32), np.empty((0, 80), np.float32)
    for add in (False, True):
        out = np.ones((5, 80), np.float32)
        multiply(rows, 5, weight, out, add)
        assert (out == add).all()


def test_a_row_that_is_not_finite_stays_alone():
    generator = np.random.default_rng(6)
    rows, weight = drawn(generator, 20, 16, FLOAT32), drawn(generator, 16, 80, FLOAT32)
    finite, found = np.empty((2, 20, 80), np.float32)
    multiply(rows, 20, weight, finite, False)
    rows[7], rows[8, 0] = np.nan, np.inf
    multiply(rows, 20, weight, found, False)
    others = np.delete(np.arange(20), [7, 8])
    assert bits(found[others]) == bits(finite[others])
    assert np.isnan(found[7]).all()
    assert np.isinf(found[8]).all()
