"""What kernels do to rows: torch's LayerNorm and ReLU with all gradients, and sums in the order of edges."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from dense import keeps
from marks import slow
from one_operation import KINDS, call
from torch.nn import functional as F

from domainpar.nn import operations
from domainpar.nn.kernels import (
    BIAS,
    EPS,
    KEPT,
    NUM_CONSTANTS,
    SCALE,
    SHIFT,
    EdgeSums,
    EndRows,
    split_partials,
)
from domainpar.nn.lanes import ROWS_AT_ONCE
from domainpar.nn.mlp import ACTIVATIONS, padded
from domainpar.nn.noise import Noise, threshold_of
from domainpar.parallel.integer_sums import LARGEST_PARTIAL, IntegerSums

WIDTHS = (16, 112, *map(slow, (32, 48, 64)))
NUM_EDGES, FIRST, NUM_LOCAL, NUM_OWNED = 300, 37, 23, 17


@dataclass
class Block:
    """Products of some edges of a part, what is at their ends, and the gradient of what comes out."""

    rows: np.ndarray
    constants: np.ndarray
    ends: EndRows
    at_ends: np.ndarray
    gradient: np.ndarray
    of_ends: np.ndarray
    noise: Noise | None = None
    normed: bool = True
    activation: str = "relu"

    @property
    def width(self):
        return self.rows.shape[1]

    @property
    def dtype(self):
        return self.constants.dtype

    def nothing(self):
        return np.empty((0, self.width), self.dtype)

    def nowhere(self):
        return EdgeSums(self.nothing(), self.nothing())

    def new_sums(self):
        num_pairs = int(self.ends.pair.max()) + 1
        of_ends, of_pairs = (NUM_OWNED, 2 * self.width), (num_pairs, self.width)
        return EdgeSums(np.zeros(of_ends, self.dtype), np.zeros(of_pairs, self.dtype))

    def layer(self, first):
        """The operands of the layer, of rows from an edge on."""
        of_layer = (self.constants, self.normed, ACTIVATIONS.index(self.activation))
        if self.noise is None:
            return *of_layer, 0, 0, 0
        return *of_layer, self.noise.ids[first:], self.noise.key_of_layer(1), threshold_of(self.noise.rate)

    def ends_from(self, first):
        """The operands of the ends of edges from one on."""
        return *(end[first:] for end in self.ends[:3]), self.ends.num_owned


def drawn(width, dtype=np.float64, num_rows=100, seed=0):
    """Some nodes are ghosts: their sums belong to another part."""
    rng = np.random.default_rng(seed)

    def table(rows, columns=width):
        return rng.normal(size=(rows, columns)).astype(dtype)

    dst, src = rng.integers(0, NUM_LOCAL, (2, NUM_EDGES))
    src[FIRST] = 0  # so that the first pair is among them
    pair = np.where(src < NUM_OWNED, np.arange(NUM_EDGES) // 60 * NUM_OWNED + src, -1)
    constants = table(NUM_CONSTANTS)
    constants[EPS] = 1e-5
    ends = EndRows(src, dst, pair, NUM_OWNED)
    at_ends, of_ends = table(NUM_LOCAL, 2 * width), table(NUM_LOCAL, 2 * width)
    return Block(table(num_rows), constants, ends, at_ends, table(num_rows), of_ends)


@dataclass
class Work:
    """Memory of a layer, with NaN beyond the rows: a group may end there."""

    rows: np.ndarray
    inverse: np.ndarray
    totals: np.ndarray
    gradient: np.ndarray

    @classmethod
    def of(cls, block):
        size = padded(len(block.rows), ROWS_AT_ONCE) + ROWS_AT_ONCE
        rows, gradient = np.full((2, size, block.width), np.nan, block.dtype)
        rows[: len(block.rows)] = block.rows
        shapes = ((1, size), (2, ROWS_AT_ONCE))
        return cls(rows, *(np.full(shape, np.nan, block.dtype) for shape in shapes), gradient)

    def __iter__(self):
        return iter((self.rows, self.inverse, self.totals, self.gradient))


def forward(block, gathered=True, first=FIRST, sums=None, out=None, residual=None, work=None):
    """Results, and the memory between the two ways."""
    work = Work.of(block) if work is None else work
    out = np.full(block.rows.shape, 7, block.dtype) if out is None else out
    at_ends = block.at_ends if gathered else block.nothing()
    residual = out[:0] if residual is None else residual
    sums = block.nowhere() if sums is None else sums
    kernel = operations.layer_forward(block.width, KINDS[block.dtype], KINDS[out.dtype])
    operands = (*block.layer(first), *work, *block.ends_from(first), *sums, at_ends, residual, out)
    call(kernel, *operands, count=len(block.rows))
    return out, work


def backward(
    block, gathered=True, first=FIRST, sums=None, out=None, grad_constants=None, carried=None, work=None, in_place=False
):
    """Gradient of the products, and of bias, scale and shift; after forward with what is at the ends, or without."""
    if work is None:
        _, work = forward(block, gathered, first, out=block.nothing())
    gradient = block.gradient
    out = np.full(gradient.shape, 7, gradient.dtype) if out is None else out
    out = work.rows if in_place else out
    grad_constants = np.zeros((3, block.width), block.dtype) if grad_constants is None else grad_constants
    of_ends = block.of_ends if gathered else block.nothing()
    carried = gradient[:0] if carried is None else carried
    sums = block.nowhere() if sums is None else sums
    kinds = [KINDS[table.dtype] for table in (block.constants, gradient, out, carried)]
    kernel = operations.layer_backward(block.width, *kinds)
    operands = (*block.layer(first), *work, *block.ends_from(first), *sums)
    call(kernel, *operands, of_ends, gradient, carried, out, grad_constants, count=len(block.rows))
    return out[: len(block.rows)], grad_constants


def gathered_by_torch(block, table, first=FIRST):
    edges = slice(first, first + len(block.rows))
    dst, src = block.ends.dst[edges], block.ends.src[edges]
    return torch.from_numpy(table[dst, : block.width] + table[src, block.width :])


def layer_of_torch(block, rows):
    """LayerNorm and ReLU as torch writes them, and their parameters."""
    parameters = [torch.from_numpy(block.constants[row]).clone().requires_grad_() for row in (BIAS, SCALE, SHIFT)]
    bias, scale, shift = parameters
    rows = rows + bias
    if block.normed:
        rows = F.layer_norm(rows, (block.width,), scale, shift, float(block.constants[EPS, 0]))
    return (F.relu(rows) if block.activation == "relu" else rows), parameters


def assert_close(found, expected):
    """max |difference| / max |value| of at most 1e-12."""
    expected = np.asarray(expected)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-12 * np.abs(expected).max()


def assert_same_bits(found, expected):
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.view(f"u{found.itemsize}"), expected.view(f"u{expected.itemsize}"))


LAYERS = {
    "norm, relu": {},
    "norm": {"activation": "none"},
    "relu": {"normed": False},
    "plain": {"normed": False, "activation": "none"},
}
each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


@each_layer
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_forward_is_torchs_layer_of_rows_and_what_is_at_their_ends(width, gathered, layer):
    block = replace(drawn(width), **layer)
    residual = np.random.default_rng(9).normal(size=block.rows.shape)
    rows = torch.from_numpy(block.rows) + (gathered_by_torch(block, block.at_ends) if gathered else 0)
    expected = layer_of_torch(block, rows)[0].detach()
    assert_close(forward(block, gathered)[0], expected)
    assert_close(forward(block, gathered, residual=residual)[0], expected + torch.from_numpy(residual))


@each_layer
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_backward_is_torchs_autograd(width, gathered, layer):
    block = replace(drawn(width), **layer)
    carried = np.zeros_like(block.gradient)
    out, grad_constants = backward(block, gathered, carried=carried)
    rows = torch.from_numpy(block.rows).requires_grad_()
    ends = gathered_by_torch(block, block.at_ends) if gathered else 0
    expected, parameters = layer_of_torch(block, rows + ends)
    upstream = torch.from_numpy(block.gradient) + (gathered_by_torch(block, block.of_ends) if gathered else 0)
    parameters = parameters if block.normed else parameters[:1]
    grad_rows, *of_parameters = torch.autograd.grad(expected, [rows, *parameters], upstream)
    assert_close(out, grad_rows)
    assert_close(grad_constants[: len(parameters)], torch.stack(of_parameters))
    assert not grad_constants[len(parameters) :].any()
    assert_close(carried, upstream)


def test_backward_adds_to_the_gradients_of_the_constants():
    block = drawn(32)
    _, once = backward(block)
    _, twice = backward(block, grad_constants=once.copy())
    assert_close(twice, 2 * once)


def test_without_results_forward_leaves_the_same_for_the_way_back_and_sums_nothing():
    block = drawn(48)
    sums = block.new_sums()
    _, expected = forward(block)
    _, found = forward(block, out=block.nothing(), sums=sums)
    for ours, theirs in zip(found, expected):
        np.testing.assert_array_equal(ours, theirs)
    assert not any(table.any() for table in sums)


def added_up_one_by_one(block, rows, first=FIRST):
    """Sums at both ends in the order of edges, as a plain loop takes them: every sum starts at +0.0."""
    sums = block.new_sums()
    for row, edge in zip(rows, range(first, first + len(rows))):
        dst, pair = block.ends.dst[edge], block.ends.pair[edge]
        if dst < NUM_OWNED:
            sums.at_ends[dst, : block.width] += row
        if pair >= 0:
            sums.at_pairs[pair] += row
    return sums


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kernel", [forward, backward])
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_summed_at_owned_ends_in_the_order_of_edges(width, kernel, dtype):
    block = drawn(width, dtype, num_rows=250)
    sums = block.new_sums()
    out, _ = kernel(block, sums=sums)
    for found, expected in zip(sums, added_up_one_by_one(block, out)):
        assert_same_bits(found, expected)
    backwards = block.new_sums()
    for edge in reversed(range(len(out))):
        one = added_up_one_by_one(block, out[edge : edge + 1], FIRST + edge)
        backwards = EdgeSums(backwards.at_ends + one.at_ends, backwards.at_pairs + one.at_pairs)
    assert (backwards.at_ends != sums.at_ends).any(), "another order would be seen"


def test_a_sum_of_rows_of_minus_zero_is_plus_zero():
    block = drawn(32)
    block.constants[SHIFT] = 100.0  # all pass the ReLU; scales of either sign
    block = replace(block, gradient=np.zeros_like(block.gradient))
    sums = block.new_sums()
    out, _ = backward(block, gathered=False, sums=sums)
    minus_zeros = (out == 0) & np.signbit(out)
    assert minus_zeros.any()
    assert not np.signbit(sums.at_ends).any()
    assert not np.signbit(sums.at_pairs).any()
    for found, expected in zip(sums, added_up_one_by_one(block, out)):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", WIDTHS)
def test_partials_of_pairs_are_added_in_ascending_order_to_the_second_half(width, dtype):
    rng = np.random.default_rng(1)
    at_ends = np.zeros((NUM_OWNED, 2 * width), dtype)
    at_ends[:, :width] = rng.normal(size=(NUM_OWNED, width))
    partials = rng.normal(size=(60, width)).astype(dtype)
    partials[:, 5] = -0.0
    nodes = rng.integers(0, NUM_OWNED - 1, 60)
    expected = at_ends.copy()
    for partial, node in zip(partials, nodes):
        expected[node, width:] += partial
    pairs = np.argsort(nodes, kind="stable")
    starts = np.searchsorted(nodes[pairs], np.arange(NUM_OWNED + 1))
    kernel = operations.sum_pairs(width, KINDS[np.dtype(dtype)])
    for first, count in ((0, 5), (11, NUM_OWNED - 11), (5, 6), (3, 0)):  # in strips, and in any order of them
        call(kernel, starts, pairs, partials, at_ends, first=first, count=count)
    assert_same_bits(at_ends, expected)
    assert not np.signbit(at_ends[:, width + 5]).any()
    assert (at_ends[NUM_OWNED - 1, width:] == 0).all()


def other_company(block, seed):
    """Some of the rows in another order, after other edges, and which these are."""
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(len(block.rows))[: rng.integers(1, len(block.rows))]
    edges, first = FIRST + chosen, int(rng.integers(0, 50))
    before = rng.integers(0, NUM_LOCAL, (2, first))
    src, dst = (np.append(some, end[edges]) for some, end in zip(before, block.ends))
    ends = EndRows(src, dst, np.append(before[0], block.ends.pair[edges]), NUM_OWNED)
    noise = replace(block.noise, ids=np.append(before[0], block.noise.ids[edges]))
    rows, gradient = (table[chosen].copy() for table in (block.rows, block.gradient))
    return replace(block, rows=rows, gradient=gradient, ends=ends, noise=noise), chosen, first


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_keeps_its_bits_in_any_company_at_any_place(width, gathered, dtype):
    block = dropping(drawn(width, dtype))
    (out, work), (back, _) = forward(block, gathered), backward(block, gathered)
    for seed in range(5):
        some, chosen, first = other_company(block, seed)
        some_out, some_work = forward(some, gathered, first)
        assert_same_bits(some_out, out[chosen])
        assert_same_bits(some_work.rows[: len(chosen)], work.rows[chosen])
        assert_same_bits(backward(some, gathered, first)[0], back[chosen])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 17, 47])
def test_a_row_that_is_not_finite_is_nan_in_all_its_results_and_no_other_row_is(column, value):
    block = drawn(48)
    block.rows[3, column] = value
    sums = block.new_sums()
    out, _ = forward(block, sums=sums)
    assert np.isnan(out[3]).all()
    assert np.isfinite(np.delete(out, 3, axis=0)).all()
    for found, expected in zip(sums, added_up_one_by_one(block, out)):
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    back, grad_constants = backward(block)
    assert np.isnan(back[3]).all()
    assert np.isfinite(np.delete(back, 3, axis=0)).all()
    assert np.isnan(grad_constants[:2]).all()  # bias and scale


def test_a_gradient_that_is_nan_is_not_lost_unless_the_relu_is_closed():
    block = drawn(16)
    block.constants[SHIFT] = 100.0  # all pass
    block.gradient[3, 7] = np.nan
    back, grad_constants = backward(block)
    assert np.isnan(back[3]).all()
    assert np.isnan(grad_constants[0]).all()
    assert np.isnan(grad_constants[1:]).sum() == 2
    block.constants[SHIFT] = -100.0  # none do
    back, grad_constants = backward(block)
    assert not back.any()
    assert not grad_constants.any()


def test_the_normed_rows_may_be_replaced_by_the_gradient_of_the_products():
    block = drawn(32, np.float32)
    back, grad_constants = backward(block)
    found, again = backward(block, in_place=True)
    assert_same_bits(found, back)
    assert_same_bits(again, grad_constants)


def test_only_the_rows_of_the_strip_are_written():
    block = drawn(32)
    out, grad_constants = forward(block)[0], backward(block)[1]
    wide_out, wide_back, carried = np.full((3, 109, 32), 7.0)
    forward(block, out=wide_out)
    assert_same_bits(wide_out[:100], out)
    assert_same_bits(backward(block, out=wide_back, carried=carried)[1], grad_constants)
    assert_same_bits(wide_back[:100], backward(block)[0])
    for table in (wide_out, wide_back, carried):
        assert (table[100:] == 7).all()


def test_a_strip_without_rows_writes_nothing():
    block = drawn(16, num_rows=0)
    sums, out, back = block.new_sums(), np.full((3, 16), 7.0), np.full((3, 16), 7.0)
    forward(block, first=NUM_EDGES, sums=sums, out=out)
    _, grad_constants = backward(block, first=NUM_EDGES, sums=sums, out=back)
    assert (out == 7).all()
    assert (back == 7).all()
    assert not any(table.any() for table in (*sums, grad_constants))


def dropping(block, rate=0.3, seed=5):
    """With dropout; ids are not the rows' numbers."""
    ids = np.random.default_rng(seed).permutation(10 * NUM_EDGES)[:NUM_EDGES] + 2**33
    block.constants[KEPT] = 1 / (1 - rate)
    return replace(block, noise=Noise(2**63 + 12345, rate, ids))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", WIDTHS)
def test_results_are_dropped_or_scaled_up_by_the_ids_of_their_rows_alone(width, dtype):
    block = drawn(width, dtype)
    out, work = forward(dropping(block))
    whole_out, whole_work = forward(block)
    assert_same_bits(work.rows, whole_work.rows)
    expected = keeps(dropping(block).noise, 1, slice(FIRST, FIRST + 100), torch.from_numpy(out)).numpy()
    assert_same_bits(out, whole_out * expected)
    assert 0.6 < (expected > 0).mean() < 0.8
    np.testing.assert_allclose(expected[expected > 0], 1 / 0.7, rtol=1e-6)


@pytest.mark.parametrize("gathered", [True, False])
def test_backward_drops_what_forward_dropped(gathered):
    block = dropping(drawn(48))
    out, grad_constants = backward(block, gathered)
    rows = torch.from_numpy(block.rows).requires_grad_()
    expected, parameters = layer_of_torch(block, rows + (gathered_by_torch(block, block.at_ends) if gathered else 0))
    expected = expected * keeps(block.noise, 1, slice(FIRST, FIRST + 100), expected)
    upstream = torch.from_numpy(block.gradient) + (gathered_by_torch(block, block.of_ends) if gathered else 0)
    grad_rows, *of_parameters = torch.autograd.grad(expected, [rows, *parameters], upstream)
    assert_close(out, grad_rows)
    assert_close(grad_constants, torch.stack(of_parameters))


def test_a_residual_is_added_after_dropout():
    block = dropping(drawn(48))
    residual = np.random.default_rng(9).normal(size=block.rows.shape)
    assert_same_bits(forward(block, residual=residual)[0], residual + forward(block)[0])


def as_bfloat16(table):
    return torch.from_numpy(table).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def as_float32(table):
    return torch.from_numpy(table.view(np.int16)).view(torch.bfloat16).float().numpy()


@pytest.mark.parametrize("width", WIDTHS)
def test_bfloat16_tables_are_computed_with_as_float32_and_rounded_once(width):
    block = drawn(width, np.float32)
    residual = as_bfloat16(np.random.default_rng(9).normal(size=block.rows.shape).astype(np.float32))
    narrow = replace(block, gradient=as_bfloat16(block.gradient))
    rounded = replace(block, gradient=as_float32(narrow.gradient))
    out, _ = forward(block, out=np.zeros_like(residual), residual=residual)
    assert_same_bits(out, as_bfloat16(forward(block, residual=as_float32(residual))[0]))
    carried, exact_carried = np.zeros_like(narrow.gradient), np.zeros_like(rounded.gradient)
    for found, expected in zip(backward(narrow, carried=carried), backward(rounded, carried=exact_carried)):
        assert_same_bits(found, as_bfloat16(expected) if found.dtype == np.uint16 else expected)
    assert_same_bits(carried, as_bfloat16(exact_carried))


@pytest.mark.parametrize("kernel", [forward, backward])
def test_what_is_summed_is_what_was_stored_also_where_that_is_rounded(kernel):
    block = drawn(32, np.float32, num_rows=250)
    sums, narrow = block.new_sums(), np.zeros(block.rows.shape, np.uint16)
    given = replace(block, gradient=as_bfloat16(block.gradient)) if kernel is backward else block
    out, _ = kernel(given, sums=sums, out=narrow)
    for found, expected in zip(sums, added_up_one_by_one(block, as_float32(out))):
        assert_same_bits(found, expected)


# Partials of gradients, split into integers.

AWKWARD = [0.0, -0.0, 1.0, -1.0, 2.0**-20, 2.0**-21, -(2.0**-21), 3 * 2.0**-21, 2.0**-73, -(2.0**-73), 1e-30, 0.1, -7.3,
           LARGEST_PARTIAL, -LARGEST_PARTIAL, np.nextafter(LARGEST_PARTIAL, 0), np.nextafter(-LARGEST_PARTIAL, 0),
           1e300, np.inf, -np.inf, np.nan]  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("accepted_only", [True, False])
def test_partials_are_split_as_integer_sums_split_them_to_the_last_bit_and_as_many_left_out(dtype, accepted_only):
    rng = np.random.default_rng(3)
    sums, limbs = IntegerSums(500), np.zeros(2 * 500 + 2, np.int64)
    for _ in range(3000):  # more than the low limbs could take without a carry
        values = rng.normal(size=500) * 10.0 ** rng.uniform(-25, 7, 500)
        values[rng.permutation(500)[: len(AWKWARD)]] = AWKWARD
        with np.errstate(over="ignore"):
            partials = values.astype(dtype)
        if accepted_only:
            partials[~(np.abs(partials) < LARGEST_PARTIAL)] = 0.999 * LARGEST_PARTIAL
        sums.add(torch.from_numpy(partials))
        call(operations.split(KINDS[partials.dtype]), partials, 500, limbs, count=0)
    sums.total()  # carried
    assert limbs[:-1].tolist() == sums._limbs.tolist()
    assert sums.rejected == limbs[-2]
    assert (limbs[-2] > 0) != accepted_only


@pytest.mark.parametrize(
    ("values", "largest"),
    [([1.0, -7.0], 0.0), ([1e8, -3e9, 1.0], 3e9), ([1e8, -np.inf, 2e8], np.inf), ([np.inf, -np.nan, 1e8], np.nan)],
)
def test_the_largest_of_the_partials_that_were_left_out_is_kept_and_nan_is_larger_than_all(values, largest):
    for partials in (np.array(values), np.array(values[::-1])):
        limbs = np.zeros(2 * len(partials) + 2, np.int64)
        for partial in partials:
            split_partials(np.array([partial, 0.0]), limbs[-6:])
        np.testing.assert_array_equal(limbs[-1:].view(np.float64), [largest])
