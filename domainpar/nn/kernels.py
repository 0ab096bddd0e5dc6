"""What happens to rows between two matrix products: LayerNorm, activation, dropout, and sums at nodes.

Gathering from nodes before, the norm, and summing at nodes after are one pass over a strip of rows, which stays in the
first cache. Rows are taken in groups of eight whose totals are made together, for the additions inside a row wait for
each other; a row's numbers are the same in any group and at any place of it, and sums run in the order of rows
(`docs/same_bits.md`, rules 1 and 2).

Tables are C-contiguous with a multiple of 16 columns; uint16 stands for bfloat16 (see `lanes`). A table at the ends of
edges has two halves: rows of the edges' `dst`, then rows of their `src`, in the order in which node nets take sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from domainpar.nn.lanes import (
    ROWS_AT_ONCE,
    as_kept,
    draw,
    inverse_root,
    load,
    sigmoid,
    store,
    stream,
    tanh,
    totals,
    where_positive,
    zeros,
)
from domainpar.nn.noise import row_keys
from domainpar.nn.products import FloatTable, Table
from domainpar.parallel.integer_sums import CARRY_BITS, HI_SCALE, LARGEST_PARTIAL, LO_SCALE
from domainpar.plan import IntArray

BIAS, SCALE, SHIFT, EPS, KEPT, NUM_CONSTANTS = range(6)
"""Rows of a layer's table of constants; epsilon of its norm, and the factor of what dropout keeps, in all columns."""

NO_ACTIVATION, RELU, SILU, TANH = range(4)
"""As in `mlp.ACTIVATIONS`."""


_ROUNDS = 1.5 * 2**52


class Epilogue(NamedTuple):
    """What follows a product.

    Attributes:
        constants: See `BIAS`, [NUM_CONSTANTS, width].
        normed: Whether a LayerNorm follows the bias, 0 or 1.
        activation: What follows that.
        ids: Global ids of the rows, for dropout; empty: nothing is dropped.
        key: Of its random numbers, uint64.
        threshold: Numbers whose 32 random bits are below are dropped, uint32.
        lanes_of: Tells kernels the width, see `lanes`.
    """

    constants: FloatTable
    normed: int
    activation: int
    ids: IntArray
    key: Any
    threshold: Any
    lanes_of: tuple[int, ...]


class EndRows(NamedTuple):
    """The ends of edges: local rows of `src` and `dst`, and the (tile, `src`) pair or -1; int64 [num_edges]."""

    src: IntArray
    dst: IntArray
    pair: IntArray
    num_owned: int


class EdgeSums(NamedTuple):
    """Sums of rows of edges: [num_owned, 2 width] at nodes, and [num_pairs, width] at (tile, `src`) pairs."""

    at_ends: FloatTable
    at_pairs: FloatTable


class Workspace(NamedTuple):
    """Memory between the two ways of a layer and within one.

    Attributes:
        rows: Product of the layer, of which forward makes the normed rows, [multiple of 8, width].
        inverse: 1 / standard deviation of each row, [1, as many].
        totals: Two totals of each row of a group, [2, 8].
        gradient: Of the normed rows, [multiple of 8, width]; backward only.
    """

    rows: FloatTable
    inverse: FloatTable
    totals: FloatTable
    gradient: FloatTable


class SavedLayer(NamedTuple):
    """Normed rows [count, width] and 1 / standard deviations [count] of a layer, kept from forward to backward."""

    rows: FloatTable
    inverse: FloatTable


@njit(inline="always", error_model="numpy")
def _add_to_ends(row: Any, edge: int, ends: EndRows, sums: EdgeSums, lanes_of: tuple[int, ...]) -> None:
    """Add a row to the sums of both ends of its edge; ends that this rank does not own are left out."""
    dst, pair = ends.dst[edge], ends.pair[edge]
    # All edges into an owned node lie in one tile, in global order: their sum can be taken here and now. Those out of
    # it lie in many, computed in any order by any thread: each tile has a partial of its own, which `sum_pairs` adds.
    if dst < ends.num_owned:
        store(sums.at_ends, dst, 0, load(sums.at_ends, dst, 0, lanes_of) + row)
    if pair >= 0:
        store(sums.at_pairs, pair, 0, load(sums.at_pairs, pair, 0, lanes_of) + row)


@njit(inline="always", error_model="numpy")
def _at_ends(table: FloatTable, edge: int, ends: EndRows, lanes_of: tuple[int, ...]) -> Any:
    """Sum of what a table [num_local, 2 width] holds for both ends of an edge."""
    width = table.shape[1] // 2
    return load(table, ends.dst[edge], 0, lanes_of) + load(table, ends.src[edge], width, lanes_of)


@njit(inline="always", error_model="numpy")
def _activated(row: Any, activation: int) -> Any:
    if activation == RELU:
        row = where_positive(row, row)
    elif activation == SILU:
        row = row * sigmoid(row)
    elif activation == TANH:
        row = tanh(row)
    return row


@njit(inline="always", error_model="numpy")
def _back_through(row: Any, grad: Any, activation: int) -> Any:
    """Gradient of what came into an activation, that is the row, given that of its result."""
    if activation == RELU:
        grad = where_positive(row, grad)
    elif activation == SILU:
        share = sigmoid(row)  # s, with derivative s + x s (1 - s)
        grad = grad * (share + row * (share - share * share))
    elif activation == TANH:
        row = tanh(row)  # t, with derivative 1 - t^2
        grad = grad - grad * (row * row)
    return grad


@njit(inline="always", error_model="numpy")
def _dropped(row: Any, i: int, layer: Epilogue) -> Any:
    key = row_keys_of_one(layer.key, np.uint64(layer.ids[i]))
    return row * draw(key, layer.threshold, layer.constants[KEPT, 0], layer.lanes_of)


# The number that all random numbers of a row come from.
row_keys_of_one = njit(inline="always", error_model="numpy")(row_keys)


@njit(error_model="numpy")
def forward(
    count: int,
    layer: Epilogue,
    work: Workspace,
    ends: EndRows,
    gathered: FloatTable,
    residual: Table,
    out: Table,
    sums: EdgeSums,
    kept: SavedLayer,
    again: bool,
    streams: bool,
) -> None:
    """Bias, LayerNorm, activation and dropout of a strip of products.

    Args:
        count: Number of rows.
        layer: What is done to them.
        work: Products come in it; normed rows and 1 / standard deviations stay in it, for `backward`.
        ends: Ends of the strip's edges.
        gathered: Added to a row from both ends of its edge, [num_local, 2 width]; empty: nothing.
        residual: Added to the results, [count, width]; empty: nothing.
        out: Takes the results, [count, width]; empty: they are not needed.
        sums: Where the results are summed; empty tables: nowhere.
        kept: Takes normed rows and 1 / standard deviations for a later `backward`; empty: they are not kept.
        streams: The results are a table that is not read soon, and 64-byte aligned.
        again: Normed rows are in `work.rows` already: what follows the norm is done once more.
    """
    constants, lanes_of = layer.constants, layer.lanes_of
    one = constants.dtype.type(1)
    share, eps = one / constants.dtype.type(constants.shape[1]), constants[EPS, 0]
    bias, rows = load(constants, BIAS, 0, lanes_of), work.rows
    factor, shift = load(constants, SCALE, 0, lanes_of), load(constants, SHIFT, 0, lanes_of)
    for first in range(0, count, ROWS_AT_ONCE):
        after = min(first + ROWS_AT_ONCE, count)
        for i in range(first, after if not again else first):
            row = load(rows, i, 0, lanes_of)
            if len(gathered) > 0:
                row = row + _at_ends(gathered, i, ends, lanes_of)
            store(rows, i, 0, row + bias)
        if layer.normed and not again:
            # (x - mean) / sqrt(mean of squares + eps): 1 / sqrt first, then a product. Totals of a whole group, also
            # where it ends beyond the rows: what is there stays in this memory.
            store(work.totals, 0, 0, totals(rows, None, first, lanes_of) * share)
            for i in range(first, after):
                store(rows, i, 0, load(rows, i, 0, lanes_of) - work.totals[0, i - first])
            store(work.inverse, 0, first, inverse_root(totals(rows, rows, first, lanes_of) * share + eps))
        for i in range(first, after):
            row = load(rows, i, 0, lanes_of)
            if layer.normed and not again:
                row = row * work.inverse[0, i]
                store(rows, i, 0, row)
            if len(kept.rows) > 0:
                stream(kept.rows, i, row)
                if layer.normed:
                    kept.inverse[i] = work.inverse[0, i]
            if layer.normed:
                row = row * factor + shift
            if len(out) > 0:
                row = _activated(row, layer.activation)
                if len(layer.ids) > 0:
                    row = _dropped(row, i, layer)
                if len(residual) > 0:
                    row = load(residual, i, 0, lanes_of) + row
                if streams:
                    stream(out, i, row)
                else:
                    store(out, i, 0, row)
                if len(sums.at_ends) > 0:
                    # Sums are of states as they are kept, which may be rounded to bfloat16.
                    row = as_kept(row, out)
                    _add_to_ends(row, i, ends, sums, lanes_of)


@njit(error_model="numpy")
def backward(
    count: int,
    layer: Epilogue,
    work: Workspace,
    ends: EndRows,
    gradient: Table,
    gathered: FloatTable,
    carried: Table,
    out: Table,
    grad_constants: FloatTable,
    sums: EdgeSums,
) -> None:
    """Back through dropout, activation, LayerNorm and bias of a strip.

    With y = (x - mean) s, s = 1 / sqrt(variance + eps), g the gradient at y and means over the columns of a row,
    the gradient at x is (g - mean(g) - y mean(g y)) s.

    Args:
        count: Number of rows.
        layer: What was done to them.
        work: As `forward` left it.
        ends: Ends of the strip's edges.
        gradient: Of the results, [count, width].
        gathered: More gradient from the ends of each edge, [num_local, 2 width]; empty: nothing.
        carried: Takes the gradient of the results, which is that of the residual, [count, width]; empty: not needed.
        out: Takes the gradient of the products, [count, width]; may be `work.rows`.
        grad_constants: The gradients of bias, scale and shift are added to it, [3, width].
        sums: Where the gradients of the products are summed; empty tables: nowhere.
    """
    constants, lanes_of = layer.constants, layer.lanes_of
    share = constants.dtype.type(1) / constants.dtype.type(constants.shape[1])
    factor, shift = load(constants, SCALE, 0, lanes_of), load(constants, SHIFT, 0, lanes_of)
    # Sums over the rows of this tile stay in registers, row after row: their order is that of the tile's edges.
    grad_bias = load(grad_constants, BIAS, 0, lanes_of)
    grad_factor, grad_shift = load(grad_constants, SCALE, 0, lanes_of), load(grad_constants, SHIFT, 0, lanes_of)
    rows, gradients = work.rows, work.gradient
    for first in range(0, count, ROWS_AT_ONCE):
        after = min(first + ROWS_AT_ONCE, count)
        for i in range(first, after):
            grad = load(gradient, i, 0, lanes_of)
            if len(gathered) > 0:
                grad = grad + _at_ends(gathered, i, ends, lanes_of)
            if len(carried) > 0:
                store(carried, i, 0, grad)
            if len(layer.ids) > 0:
                grad = _dropped(grad, i, layer)
            row = load(rows, i, 0, lanes_of)
            if layer.activation != NO_ACTIVATION:
                # Of the same expression as in forward: a ReLU let through what was positive, so the same decision.
                grad = _back_through(row * factor + shift if layer.normed else row, grad, layer.activation)
            if layer.normed:
                grad_factor = grad_factor + grad * row
                grad_shift = grad_shift + grad
                grad = grad * factor  # g
            store(gradients, i, 0, grad)
        if layer.normed:
            store(work.totals, 0, 0, totals(gradients, None, first, lanes_of) * share)
            store(work.totals, 1, 0, totals(gradients, rows, first, lanes_of) * share)
        for i in range(first, after):
            grad = load(gradients, i, 0, lanes_of)
            if layer.normed:
                slope = load(rows, i, 0, lanes_of) * work.totals[1, i - first]
                grad = ((grad - work.totals[0, i - first]) - slope) * work.inverse[0, i]
            grad_bias = grad_bias + grad
            store(out, i, 0, grad)
            if len(sums.at_ends) > 0:
                grad = as_kept(grad, out)
                _add_to_ends(grad, i, ends, sums, lanes_of)
    store(grad_constants, BIAS, 0, grad_bias)
    store(grad_constants, SCALE, 0, grad_factor)
    store(grad_constants, SHIFT, 0, grad_shift)


@njit(error_model="numpy")
def sum_pairs(
    first: int,
    count: int,
    starts: IntArray,
    pairs: IntArray,
    at_pairs: FloatTable,
    at_ends: FloatTable,
    scale: FloatTable,
    lanes_of: Any,
) -> None:
    """Sum the partials of the (tile, `src`) pairs of some nodes, by ascending tile, into the second half of `at_ends`.

    Args:
        first: First node.
        count: Number of nodes.
        starts: Where the pairs of each node begin in `pairs`, [num_owned + 1].
        pairs: Pairs by node, by ascending tile within one.
        at_pairs: The partials, [num_pairs, width].
        at_ends: [num_owned, 2 width].
        scale: What both halves are multiplied by, [num_owned, 2]; empty: nothing.
        lanes_of: Tells the width.
    """
    width = at_pairs.shape[1]
    for node in range(first, first + count):
        row = zeros(at_ends, lanes_of)  # +0.0
        for i in range(starts[node], starts[node + 1]):
            row = row + load(at_pairs, pairs[i], 0, lanes_of)
        if len(scale) > 0:
            store(at_ends, node, 0, load(at_ends, node, 0, lanes_of) * scale[node, 0])
            row = row * scale[node, 1]
        store(at_ends, node, width, row)


@njit(error_model="numpy")
def split_partials(partials: Any, limbs: Any) -> None:
    """Add a tile's partials to sums of integers, as `IntegerSums` does, in the carried form that it keeps.

    Args:
        partials: Floats [size].
        limbs: int64 [2 size + 2]: high limbs, low limbs, the number of partials that were not finite or too large to
            be added, and the bits of the largest magnitude of these (those of NaN are larger than all others).
    """
    size = len(partials)
    rejected = 0
    for i in range(size):
        rejected += not abs(partials[i]) < LARGEST_PARTIAL  # so for NaN
    if rejected:
        limbs[2 * size] += rejected
        for i in range(size):
            if not abs(partials[i]) < LARGEST_PARTIAL:
                bits = np.float64(abs(partials[i])).view(np.int64)
                limbs[2 * size + 1] = max(limbs[2 * size + 1], bits)
    # Without a jump or a conversion inside, so that the compiler takes several numbers at once. A number of at most
    # 2^51 in size, with `_ROUNDS` added, is rounded, halves to even, and its bits are those of `_ROUNDS` plus it.
    zero = np.float64(_ROUNDS).view(np.int64)
    for i in range(size):
        value = np.float64(partials[i])
        value = value if abs(value) < LARGEST_PARTIAL else np.float64(0.0)
        hi = np.float64(value * HI_SCALE + _ROUNDS)
        lo = np.float64((value - (hi - _ROUNDS) / HI_SCALE) * LO_SCALE + _ROUNDS)
        low = limbs[size + i] + (lo.view(np.int64) - zero)
        limbs[i] += (hi.view(np.int64) - zero) + (low >> CARRY_BITS)
        limbs[size + i] = low & ((1 << CARRY_BITS) - 1)
