"""Many numbers at once are so many numbers: each operation to the last bit what numpy or torch makes of them."""

import operator

import numpy as np
import pytest
import torch
from marks import slow
from numba import njit
from numba.core.errors import TypingError

from domainpar.nn import COLUMN_BLOCK
from domainpar.nn.lanes import (
    ROWS_AT_ONCE,
    as_kept,
    exp,
    inverse_root,
    lanes_of,
    load,
    sigmoid,
    store,
    stream,
    tanh,
    totals,
    where_positive,
    zeros,
)

FLOATS = [np.float32, np.float64]
ONE = lanes_of(COLUMN_BLOCK)
WIDTHS = [16, 32, 48, 64, 112, 128]
# Each combination is compiled: of every width one.
of_each_width = pytest.mark.parametrize(
    ("dtype", "width"),
    [
        (pytest.param if (place + other) % 2 else slow)(dtype, width, id=f"{dtype.__name__}-{width}")
        for place, width in enumerate(WIDTHS)
        for other, dtype in enumerate(FLOATS)
    ],
)
AWKWARD = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 1e-45, 3e38, -3e38, 0.1, -7.3, 1e7, 2.0**-126]


@njit
def _copy(source, target, lanes_of):
    for row in range(source.shape[0]):
        for column in range(0, source.shape[1], COLUMN_BLOCK * len(lanes_of)):
            store(target, row, column, load(source, row, column, lanes_of))


@njit
def _totals_of_groups(source, other, target, lanes_of):
    for row in range(0, source.shape[0], ROWS_AT_ONCE):
        store(target, 0, row, totals(source, other, row, lanes_of))


@njit
def _inverse_roots(values, target):
    for row in range(values.shape[0]):
        store(target, row, 0, inverse_root(load(values, row, 0, ONE)))


@njit
def _with_one_number(values, target):
    for row in range(values.shape[0]):
        lanes = load(values, row, 0, ONE)
        store(target[0], row, 0, lanes + values[row, 3])
        store(target[1], row, 0, lanes - values[row, 3])
        store(target[2], row, 0, lanes * values[row, 3])


@njit
def _where_positive(condition, values, target):
    for row in range(values.shape[0]):
        store(target, row, 0, where_positive(load(condition, row, 0, ONE), load(values, row, 0, ONE)))


@njit
def _arithmetic(left, right, target):
    for row in range(left.shape[0]):
        a, b = load(left, row, 0, ONE), load(right, row, 0, ONE)
        store(target[0], row, 0, a + b)
        store(target[1], row, 0, a - b)
        store(target[2], row, 0, a * b)


@njit
def _functions(values, target, lanes_of):
    for row in range(values.shape[0]):
        lanes = load(values, row, 0, lanes_of)
        store(target[0], row, 0, exp(lanes))
        store(target[1], row, 0, sigmoid(lanes))
        store(target[2], row, 0, tanh(lanes))


@njit
def _stream_all(source, target, lanes_of):
    for row in range(source.shape[0]):
        stream(target, row, load(source, row, 0, lanes_of))


@njit
def _as_kept_in(source, kept, target, lanes_of):
    for row in range(source.shape[0]):
        store(target, row, 0, as_kept(load(source, row, 0, lanes_of), kept))


@njit
def _zeros_plus(source, target, lanes_of):
    for row in range(source.shape[0]):
        store(target, row, 0, zeros(source, lanes_of) + load(source, row, 0, lanes_of))


@njit
def _what_products_lose(left, right, product, target):
    for row in range(left.shape[0]):
        store(target, row, 0, load(left, row, 0, ONE) * load(right, row, 0, ONE) - load(product, row, 0, ONE))


def _drawn(dtype, rows=200, seed=0, columns=COLUMN_BLOCK):
    """Numbers of many magnitudes, some of them awkward, [rows, columns]."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(rows, columns)) * 10.0 ** rng.uniform(-8, 8, (rows, columns))
    values = values.astype(dtype)
    values[::7] = rng.permutation(np.tile(AWKWARD, columns // COLUMN_BLOCK))
    return values


def _bits(values):
    return np.ascontiguousarray(values).view(f"u{values.itemsize}")


def _assert_same_bits(found, expected):
    """NaN for NaN, whatever its bits, and all else bit for bit."""
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    rest = ~np.isnan(expected)
    np.testing.assert_array_equal(_bits(found)[rest], _bits(expected)[rest])


@of_each_width
def test_a_store_puts_back_what_a_load_took_whatever_its_bits(dtype, width):
    bits = np.random.default_rng(1).integers(0, 2**8, (40, 3 * width * np.dtype(dtype).itemsize), dtype=np.uint8)
    source = bits.view(dtype)
    target = np.zeros_like(source)
    _copy(source, target, lanes_of(width))
    np.testing.assert_array_equal(_bits(target), _bits(source))


@pytest.mark.parametrize("dtype", [*FLOATS, np.uint16])
def test_sixteen_numbers_go_where_row_and_column_say_and_nowhere_else(dtype):
    source = np.arange(5 * 48).reshape(5, 48).astype(dtype)
    target = np.full_like(source, 7)

    @njit
    def one(source, target):
        store(target, 3, 16, load(source, 1, 32, ONE))

    one(source, target)
    expected = np.full_like(source, 7)
    expected[3, 16:32] = source[1, 32:48]
    np.testing.assert_array_equal(target, expected)


def _as_table(bfloat16):
    return bfloat16.view(torch.int16).numpy().view(np.uint16).reshape(-1, COLUMN_BLOCK)


def test_every_bfloat16_is_loaded_as_torch_reads_it():
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    found = np.zeros((2**12, COLUMN_BLOCK), np.float32)
    _copy(_as_table(halves), found, ONE)
    _assert_same_bits(found.ravel(), halves.float().numpy())


FLOAT32_BITS = {
    "random bits": np.random.default_rng(2).integers(0, 2**32, 2**16, dtype=np.uint32),
    # Everything next to every bfloat16 and to every half between two of them: ties go to even, up to infinity.
    "all ties": (np.arange(2**16, dtype=np.uint32)[:, None] * 2**16 + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF],
                 np.uint32)).ravel(),
    "subnormal": np.random.default_rng(3).integers(0, 2**23, 2**12, dtype=np.uint32),
    "large": np.random.default_rng(4).integers(0x7F000000, 0x7F800001, 2**12, dtype=np.uint32),
    "negative and large": np.random.default_rng(5).integers(0xFF000000, 0xFF800001, 2**12, dtype=np.uint32),
}  # fmt: skip


@pytest.mark.parametrize("bits", FLOAT32_BITS.values(), ids=FLOAT32_BITS)
def test_a_number_is_rounded_to_bfloat16_as_torch_rounds_it_and_nan_stays_nan(bits):
    values = bits.view(np.float32)
    found = np.zeros((len(bits) // COLUMN_BLOCK, COLUMN_BLOCK), np.uint16)
    _copy(values.reshape(-1, COLUMN_BLOCK), found, ONE)
    expected = _as_table(torch.from_numpy(values).to(torch.bfloat16))
    is_nan = np.isnan(values).reshape(-1, COLUMN_BLOCK)
    np.testing.assert_array_equal(found[~is_nan], expected[~is_nan])
    stored = found[is_nan]
    assert (((stored & 0x7F80) == 0x7F80) & ((stored & 0x7F) != 0)).all()


def _halving(row):
    """The sum as documented, one rounding a time in the type of the row."""
    length = len(row) & -len(row)
    whole = row[:length]
    for first in range(length, len(row), length):
        whole = whole + row[first : first + length]
    while len(whole) > 1:
        whole = whole[: len(whole) // 2] + whole[len(whole) // 2 :]
    return whole[0]


@of_each_width
def test_totals_of_eight_rows_are_taken_by_halving_each(dtype, width):
    """Of rows, and of their products with others: in any place of a group, whatever the other rows are."""
    values, other = _drawn(dtype, columns=width), _drawn(dtype, seed=1, columns=width)
    values[1], other[1] = -0.0, 1.0
    for others in (None, other):
        found = np.zeros((1, len(values)), dtype)
        _totals_of_groups(values, others, found, lanes_of(width))
        with np.errstate(all="ignore"):
            rows = values if others is None else values * other
            _assert_same_bits(found[0], np.array([_halving(row) for row in rows]))
            one_by_one = np.array([sum(row, dtype(0)) for row in rows])
        finite = np.isfinite(found[0])
        assert (found[0, finite] != one_by_one[finite]).any(), "another order would be seen"
        assert np.signbit(found[0, 1])


@pytest.mark.parametrize("dtype", FLOATS)
def test_an_inverse_root_is_rounded_after_the_root_and_after_the_division(dtype):
    values = np.abs(_drawn(dtype, seed=7))
    values[1], values[2, :4] = -0.0, (4, 0.25, -1, -np.inf)
    found = np.zeros_like(values)
    _inverse_roots(values, found)
    with np.errstate(all="ignore"):
        _assert_same_bits(found, dtype(1) / np.sqrt(values))


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_number_takes_part_in_every_lane(dtype):
    values = _drawn(dtype)
    found = tuple(np.zeros_like(values) for _ in range(3))
    _with_one_number(values, found)
    with np.errstate(all="ignore"):
        for operation, of_lanes in zip((operator.add, operator.sub, operator.mul), found, strict=True):
            _assert_same_bits(of_lanes, operation(values, values[:, 3:4]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_lanes_pass_where_the_condition_is_positive_and_nan_is_not_lost(dtype):
    condition, values = (table.ravel() for table in np.meshgrid(AWKWARD, AWKWARD))
    condition, values = (table.astype(dtype).reshape(-1, COLUMN_BLOCK) for table in (condition, values))
    found = np.ones_like(values)
    _where_positive(condition, values, found)
    _assert_same_bits(found, np.where(condition <= 0, dtype(0), values))


@pytest.mark.parametrize("dtype", FLOATS)
def test_arithmetic_is_lane_by_lane(dtype):
    left, right = _drawn(dtype, seed=5), _drawn(dtype, seed=6)
    found = tuple(np.zeros_like(left) for _ in range(3))
    _arithmetic(left, right, found)
    with np.errstate(all="ignore"):
        for operation, of_lanes in zip((operator.add, operator.sub, operator.mul), found, strict=True):
            _assert_same_bits(of_lanes, operation(left, right))


@pytest.mark.parametrize("dtype", FLOATS)
def test_no_product_is_fused_into_a_sum(dtype):
    """Else what a product loses by rounding would come back when the rounded product is taken from it."""
    left, right = _drawn(dtype, seed=5), _drawn(dtype, seed=6)
    found = np.ones_like(left)
    with np.errstate(all="ignore"):
        product = left * right
        _what_products_lose(left, right, product, found)
    assert not found[np.isfinite(product)].any()


def test_lanes_of_different_types_do_not_mix():
    @njit
    def mixed(narrow, lanes_of):
        store(lanes_of, 0, 0, load(narrow, 0, 0, ONE) + load(lanes_of, 0, 0, ONE))

    with pytest.raises(TypingError):
        mixed(np.zeros((1, COLUMN_BLOCK), np.float32), np.zeros((1, COLUMN_BLOCK), np.float64))


FUNCTIONS = {  # and how far it is from the true value, in units of the last place of that value, and of 1
    "exp": (np.exp, 2, 0),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), 4, 0),
    "tanh": (np.tanh, 0, 4),
}
LARGEST = {np.float32: 87, np.float64: 708}


def _of_functions(values):
    found = tuple(np.zeros_like(values) for _ in FUNCTIONS)
    _functions(values, found, lanes_of(values.shape[1]))
    return dict(zip(FUNCTIONS, found))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_exponentials_are_right_to_a_few_units_of_the_last_place(dtype, name):
    exact, of_value, of_one = FUNCTIONS[name]
    rng, largest = np.random.default_rng(8), LARGEST[dtype]
    values = np.concatenate(
        [rng.uniform(-largest, largest, 4800), rng.normal(size=4800), 10.0 ** -rng.uniform(0, 30, 4800)]
    )
    values = values.astype(dtype).reshape(-1, COLUMN_BLOCK)
    expected = exact(values.astype(np.longdouble))
    unit = np.finfo(dtype).eps
    difference = np.abs(_of_functions(values)[name] - expected)
    assert (difference <= unit * (of_value * np.abs(expected) + of_one)).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_exponentials_of_all_numbers_are_finite_and_nan_stays_nan(dtype):
    largest = LARGEST[dtype]
    values = np.array(AWKWARD, dtype).reshape(1, -1)
    found = _of_functions(values)
    bounded = _of_functions(np.clip(values, -largest, largest))
    for name, of_all in found.items():
        _assert_same_bits(np.isnan(of_all), np.isnan(values))
        assert np.isfinite(of_all[~np.isnan(values)]).all(), name
    _assert_same_bits(found["exp"], bounded["exp"])
    at = {name: dict(zip(AWKWARD, of_all[0])) for name, of_all in found.items()}
    assert at["exp"][0.0] == 1
    assert (at["sigmoid"][np.inf], at["sigmoid"][0.0]) == (1, 0.5)
    assert 0 <= at["sigmoid"][-np.inf] <= np.exp(-dtype(largest)) * dtype(1.01)
    assert [at["tanh"][x] for x in (-np.inf, -3e38, 0.0, 3e38, np.inf)] == [-1, -1, 0, 1, 1]


@pytest.mark.parametrize("dtype", FLOATS)
def test_exponentials_have_the_same_bits_in_any_lane_of_any_width(dtype):
    values = np.random.default_rng(9).normal(size=(6, 48)).astype(dtype) * 10
    expected = _of_functions(values)
    for width in (16, 48, 96, 144):
        order = np.random.default_rng(width).permutation(values.size)
        found = _of_functions(np.ascontiguousarray(values.ravel()[order].reshape(-1, width)))
        for name in FUNCTIONS:
            _assert_same_bits(found[name].ravel(), expected[name].ravel()[order])


def _aligned(shape, dtype):
    """A table whose rows are where `stream` wants them, full of 7."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, np.uint8)
    first = -memory.ctypes.data % 64
    table = memory[first : first + size].view(dtype).reshape(shape)
    table[:] = 7
    return table


@pytest.mark.parametrize("width", [16, 48, 128])
@pytest.mark.parametrize("kinds", [(np.float32,) * 2, (np.float64,) * 2, (np.float32, np.uint16)], ids=str)
def test_what_goes_past_the_caches_is_what_a_store_leaves(kinds, width):
    source, target = _drawn(kinds[0], columns=width), _aligned((202, width), kinds[1])
    stored = np.zeros((200, width), kinds[1])
    _copy(source, stored, lanes_of(width))
    _stream_all(source, target, lanes_of(width))
    np.testing.assert_array_equal(target[:200], stored)
    assert (target[200:] == 7).all()


@pytest.mark.parametrize("width", [16, 48])
@pytest.mark.parametrize("kinds", [(np.float32,) * 2, (np.float64,) * 2, (np.float32, np.uint16)], ids=str)
def test_lanes_as_kept_are_what_a_table_gives_back(kinds, width):
    source, kept = _drawn(kinds[0], columns=width), np.zeros((200, width), kinds[1])
    expected, found = np.zeros_like(source), np.zeros_like(source)
    _copy(source, kept, lanes_of(width))
    _copy(kept, expected, lanes_of(width))
    _as_kept_in(source, kept, found, lanes_of(width))
    _assert_same_bits(found, expected)
    assert (kinds[1] == np.uint16) == bool((found != source)[~np.isnan(source)].any())


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_are_plus_zero(dtype):
    source = np.array([-0.0, 1.0] * 24, dtype).reshape(1, 48)
    found = np.ones_like(source)
    _zeros_plus(source, found, lanes_of(48))
    _assert_same_bits(found, source + dtype(0))  # -0.0 + +0.0 is +0.0
    assert not np.signbit(found).any()
