"""What kernels do to rows: torch's LayerNorm and ReLU with all gradients, and sums in the order of edges."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from domainpar.nn.kernels import Ends, Norm, Sums, add_pairs, norm_backward, norm_forward
from domainpar.nn.lanes import wide
from domainpar.nn.noise import Noise, keeps, no_drop

WIDTHS = (16, 32, 48, 64, 112)
NUM_EDGES, FIRST, NUM_LOCAL, NUM_OWNED = 300, 37, 23, 17


@dataclass
class Block:
    """Rows of some edges of a part, what is at their ends, and the gradient of what comes out."""

    rows: np.ndarray
    norm: Norm
    ends: Ends
    at_ends: np.ndarray
    gradient: np.ndarray
    of_ends: np.ndarray
    noise: Noise | None = None

    @property
    def drop(self):
        return no_drop(self.dtype) if self.noise is None else self.noise.of_layer(1, self.dtype)

    @property
    def width(self):
        return self.rows.shape[1]

    @property
    def dtype(self):
        return self.norm.bias.dtype

    def nothing(self):
        return np.empty((0, self.width), self.dtype)

    def nowhere(self):
        return Sums(self.nothing(), self.nothing())

    def new_sums(self):
        num_pairs = int(self.ends.pair.max()) + 1
        of_ends, of_pairs = (NUM_OWNED, 2 * self.width), (num_pairs, self.width)
        return Sums(np.zeros(of_ends, self.dtype), np.zeros(of_pairs, self.dtype))


def drawn(width, dtype=np.float64, num_rows=100, seed=0):
    """Some nodes are ghosts: their sums belong to another part."""
    rng = np.random.default_rng(seed)

    def table(rows, columns=width):
        return rng.normal(size=(rows, columns)).astype(dtype)

    dst, src = rng.integers(0, NUM_LOCAL, (2, NUM_EDGES))
    src[FIRST] = 0  # so that the first pair is among them
    pair = np.where(src < NUM_OWNED, np.arange(NUM_EDGES) // 60 * NUM_OWNED + src, -1)
    norm = Norm(table(1), table(1), table(1), np.dtype(dtype).type(1e-5), wide(width))
    ends = Ends(src, dst, pair, NUM_OWNED)
    return Block(table(num_rows), norm, ends, table(NUM_LOCAL, 2 * width), table(num_rows), table(NUM_LOCAL, 2 * width))


def forward(block, gathered=True, first=FIRST, sums=None, out=None, out_first=0, kept=None, rows=None):
    """Results, and what was normalised."""
    rows = block.rows.copy() if rows is None else rows
    out = np.full_like(block.rows, 7) if out is None else out
    kept = np.full(block.rows.shape, 7, block.dtype) if kept is None else kept
    at_ends = block.at_ends if gathered else block.at_ends[:0]
    sums = block.nowhere() if sums is None else sums
    count = len(block.rows)
    norm_forward(rows, first, count, block.norm, block.ends, at_ends, kept, out, out_first, block.drop, sums)
    return out, kept


def backward(
    block, gathered=True, first=FIRST, sums=None, out=None, rows=None, gradient=None, gradient_first=0, of_norm=None
):
    """Gradient of the products, and of bias, scale and shift."""
    rows = block.rows.copy() if rows is None else rows
    gradient = block.gradient if gradient is None else gradient
    out = np.full_like(block.rows, 7) if out is None else out
    of_norm = np.zeros((3, block.width), block.dtype) if of_norm is None else of_norm
    of_ends = block.of_ends if gathered else block.of_ends[:0]
    sums = block.nowhere() if sums is None else sums
    where, what = (rows, first, len(block.rows)), (block.norm, block.ends)
    norm_backward(*where, *what, gradient, gradient_first, of_ends, block.drop, out, of_norm, sums)
    return out, of_norm


def gathered_by_torch(block, table, first=FIRST):
    edges = slice(first, first + len(block.rows))
    dst, src = block.ends.dst[edges], block.ends.src[edges]
    return torch.from_numpy(table[dst, : block.width] + table[src, block.width :])


def layer_of_torch(block, rows):
    """LayerNorm and ReLU as torch writes them, and their parameters."""
    parameters = [torch.from_numpy(table[0]).clone().requires_grad_() for table in block.norm[:3]]
    bias, scale, shift = parameters
    return F.relu(F.layer_norm(rows + bias, (block.width,), scale, shift, float(block.norm.eps))), parameters


def assert_close(found, expected):
    """max |difference| / max |value| of at most 1e-12."""
    expected = np.asarray(expected)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-12 * np.abs(expected).max()


def assert_same_bits(found, expected):
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.view(f"u{found.itemsize}"), expected.view(f"u{expected.itemsize}"))


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_forward_is_torchs_layer_norm_and_relu_of_rows_and_what_is_at_their_ends(width, gathered):
    block = drawn(width)
    out, kept = forward(block, gathered)
    rows = torch.from_numpy(block.rows) + (gathered_by_torch(block, block.at_ends) if gathered else 0)
    expected, (bias, _, _) = layer_of_torch(block, rows)
    assert_close(out, expected.detach())
    assert_close(kept, (rows + bias).detach())


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_backward_is_torchs_autograd(width, gathered):
    block = drawn(width)
    out, of_norm = backward(block, gathered)
    rows = torch.from_numpy(block.rows).requires_grad_()
    expected, parameters = layer_of_torch(block, rows)
    upstream = torch.from_numpy(block.gradient) + (gathered_by_torch(block, block.of_ends) if gathered else 0)
    of_rows, *of_parameters = torch.autograd.grad(expected, [rows, *parameters], upstream)
    assert_close(out, of_rows)
    assert_close(of_norm, torch.stack(of_parameters))


def test_backward_adds_to_the_gradients_of_the_norm():
    block = drawn(32)
    _, once = backward(block)
    _, twice = backward(block, of_norm=once.copy())
    assert_close(twice, 2 * once)


def test_backward_takes_what_forward_kept_for_the_products():
    block = drawn(48)
    _, kept = forward(block)
    with_ends = replace(block, rows=block.rows + gathered_by_torch(block, block.at_ends).numpy())
    out, of_norm = backward(with_ends)
    again, of_norm_again = backward(replace(block, norm=block.norm._replace(bias=0 * block.norm.bias)), rows=kept)
    assert_close(again, out)
    assert_close(of_norm_again, of_norm)


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
        backwards = Sums(backwards.at_ends + one.at_ends, backwards.at_pairs + one.at_pairs)
    assert (backwards.at_ends != sums.at_ends).any(), "another order would be seen"


def test_a_sum_of_rows_of_minus_zero_is_plus_zero():
    block = drawn(32)
    norm = block.norm._replace(shift=np.full((1, 32), 100.0))  # all pass the ReLU; scales of either sign
    block = replace(block, norm=norm, gradient=np.zeros_like(block.gradient))
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
    add_pairs(partials, nodes, at_ends)
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
    ends = Ends(src, dst, np.append(before[0], block.ends.pair[edges]), NUM_OWNED)
    noise = replace(block.noise, ids=np.append(before[0], block.noise.ids[edges]))
    rows, gradient = (table[chosen].copy() for table in (block.rows, block.gradient))
    return replace(block, rows=rows, gradient=gradient, ends=ends, noise=noise), chosen, first


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_keeps_its_bits_in_any_company_at_any_place(width, gathered, dtype):
    block = dropping(drawn(width, dtype))
    (out, kept), (back, _) = forward(block, gathered), backward(block, gathered)
    for seed in range(5):
        some, chosen, first = other_company(block, seed)
        some_out, some_kept = forward(some, gathered, first)
        assert_same_bits(some_out, out[chosen])
        assert_same_bits(some_kept, kept[chosen])
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
    back, of_norm = backward(block)
    assert np.isnan(back[3]).all()
    assert np.isfinite(np.delete(back, 3, axis=0)).all()
    assert np.isnan(of_norm[:2]).all()  # bias and scale


def test_a_gradient_that_is_nan_is_not_lost_unless_the_relu_is_closed():
    block = drawn(16)
    block.norm.shift[:] = 100.0  # all pass
    block.gradient[3, 7] = np.nan
    back, of_norm = backward(block)
    assert np.isnan(back[3]).all()
    assert np.isnan(of_norm[0]).all()
    assert np.isnan(of_norm[1:]).sum() == 2
    block.norm.shift[:] = -100.0  # none do
    back, of_norm = backward(block)
    assert not back.any()
    assert not of_norm.any()


def test_rows_may_be_replaced_by_what_is_kept_or_by_the_results():
    block = drawn(32, np.float32)
    out, kept = forward(block)
    rows = block.rows.copy()
    assert_same_bits(forward(block, rows=rows, kept=rows)[0], out)
    assert_same_bits(rows, kept)
    rows = block.rows.copy()
    forward(block, rows=rows, out=rows, kept=block.nothing())
    assert_same_bits(rows, out)


def test_rows_or_their_gradient_may_be_replaced_by_the_gradient_of_the_products():
    block = drawn(32, np.float32)
    back, of_norm = backward(block)
    rows, gradient = block.rows.copy(), block.gradient.copy()
    assert_same_bits(backward(block, rows=rows, out=rows)[1], of_norm)
    assert_same_bits(rows, back)
    assert_same_bits(backward(block, gradient=gradient, out=gradient)[1], of_norm)
    assert_same_bits(gradient, back)


def test_only_the_rows_of_the_block_are_read_and_written():
    block = drawn(32)
    out, _ = forward(block)
    wide_rows = np.concatenate([block.rows, np.full((9, 32), np.nan)])
    wide_out = np.full((140, 32), 7.0)
    wide_kept = np.full((109, 32), 7.0)
    forward(block, rows=wide_rows, out=wide_out, out_first=30, kept=wide_kept)
    assert_same_bits(wide_out[30:130], out)
    assert (np.delete(wide_out, slice(30, 130), axis=0) == 7).all()
    assert (wide_kept[100:] == 7).all()
    back, of_norm = backward(block)
    nan = np.full((20, 32), np.nan)
    around = np.concatenate([nan, block.gradient, nan])
    wide_back = np.full((109, 32), 7.0)
    assert_same_bits(
        backward(block, rows=wide_rows, gradient=around, gradient_first=20, out=wide_back)[1],
        of_norm,
    )
    assert_same_bits(wide_back[:100], back)
    assert (wide_back[100:] == 7).all()


def test_a_block_without_rows_writes_nothing():
    block = drawn(16, num_rows=0)
    sums, out, kept = block.new_sums(), np.full((3, 16), 7.0), np.full((3, 16), 7.0)
    forward(block, first=NUM_EDGES, sums=sums, out=out, kept=kept)
    _, of_norm = backward(block, first=NUM_EDGES, sums=sums, out=out)
    assert (out == 7).all()
    assert (kept == 7).all()
    assert not any(table.any() for table in (*sums, of_norm))
    at_ends = np.zeros((3, 32))
    add_pairs(block.nothing(), np.empty(0, np.int64), at_ends)
    assert not at_ends.any()


def dropping(block, rate=0.3, seed=5):
    """With dropout; ids are not the rows' numbers."""
    ids = np.random.default_rng(seed).permutation(10 * NUM_EDGES)[:NUM_EDGES] + 2**33
    return replace(block, noise=Noise(2**63 + 12345, rate, ids))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", WIDTHS)
def test_results_are_dropped_or_scaled_up_by_the_ids_of_their_rows_alone(width, dtype):
    block = drawn(width, dtype)
    out, kept = forward(dropping(block))
    whole_out, whole_kept = forward(block)
    assert_same_bits(kept, whole_kept)
    expected = keeps(dropping(block).noise, 1, slice(FIRST, FIRST + 100), width, torch.from_numpy(out)).numpy()
    assert_same_bits(out, whole_out * expected)
    assert 0.6 < (expected > 0).mean() < 0.8
    np.testing.assert_allclose(expected[expected > 0], 1 / 0.7, rtol=1e-6)


@pytest.mark.parametrize("gathered", [True, False])
def test_backward_drops_what_forward_dropped(gathered):
    block = dropping(drawn(48))
    out, of_norm = backward(block, gathered)
    rows = torch.from_numpy(block.rows).requires_grad_()
    expected, parameters = layer_of_torch(block, rows)
    expected = expected * keeps(block.noise, 1, slice(FIRST, FIRST + 100), 48, expected)
    upstream = torch.from_numpy(block.gradient) + (gathered_by_torch(block, block.of_ends) if gathered else 0)
    of_rows, *of_parameters = torch.autograd.grad(expected, [rows, *parameters], upstream)
    assert_close(out, of_rows)
    assert_close(of_norm, torch.stack(of_parameters))


def as_bfloat16(table):
    return torch.from_numpy(table).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def as_float32(table):
    return torch.from_numpy(table.view(np.int16)).view(torch.bfloat16).float().numpy()


@pytest.mark.parametrize("width", WIDTHS)
def test_bfloat16_rows_are_computed_as_float32_and_rounded_once(width):
    block = drawn(width, np.float32)
    narrow = replace(block, rows=as_bfloat16(block.rows), gradient=as_bfloat16(block.gradient))
    rounded = replace(block, rows=as_float32(narrow.rows), gradient=as_float32(narrow.gradient))
    out, kept = forward(narrow)
    exact_out, exact_kept = forward(rounded)
    assert_same_bits(kept, exact_kept)
    assert_same_bits(out, as_bfloat16(exact_out))
    for found, expected in zip(backward(narrow), backward(rounded)):
        assert_same_bits(found, as_bfloat16(expected) if found.dtype == np.uint16 else expected)


@pytest.mark.parametrize("kernel", [forward, backward])
def test_what_is_summed_is_what_was_stored_also_where_that_is_rounded(kernel):
    block = drawn(32, np.float32, num_rows=250)
    narrow = replace(block, rows=as_bfloat16(block.rows), gradient=as_bfloat16(block.gradient))
    sums = block.new_sums()
    out, _ = kernel(narrow, sums=sums)
    for found, expected in zip(sums, added_up_one_by_one(block, as_float32(out))):
        assert_same_bits(found, expected)
