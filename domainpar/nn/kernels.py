"""What happens to the rows of a block between two matrix products, one row at a time: DESIGN section 7.

LayerNorm, ReLU, what is gathered from nodes before and what is summed at nodes after, in one pass over the rows, so
that a row is in a register when it is needed. A row is computed by the same instructions wherever it lies, and sums
run in the order of rows (DESIGN section 3, rules 1 and 2).

Tables are C-contiguous with a multiple of 16 columns; uint16 stands for bfloat16 (see `lanes`). A table at the
ends of edges has two halves: what belongs to the edges' `dst`, then what belongs to their `src`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from domainpar.nn.lanes import LANES, draw, load, spread, store, total, where_positive
from domainpar.nn.noise import Drop
from domainpar.plan import IntArray

FloatTable = np.ndarray[Any, np.dtype[np.floating[Any]]]
"""float32 or float64 [rows, multiple of 16]."""

Table = np.ndarray[Any, np.dtype[Any]]
"""float32, float64, or uint16 for bfloat16, [rows, multiple of 16]."""


class Norm(NamedTuple):
    """What makes an output of a product: its bias, then scale, shift and epsilon of a LayerNorm; tables [1, width]."""

    bias: FloatTable
    scale: FloatTable
    shift: FloatTable
    eps: Any


class Ends(NamedTuple):
    """Where edges begin and end: local rows of `dst` and `src`, and the (tile, `src`) pair or -1; int64 [num_edges]."""

    dst: IntArray
    src: IntArray
    pair: IntArray
    num_owned: int


class Sums(NamedTuple):
    """Where rows of edges are summed: [num_owned, 2 width] at nodes, and [num_pairs, width] at (tile, `src`) pairs."""

    at_ends: FloatTable
    at_pairs: FloatTable


@njit(inline="always", error_model="numpy")
def _centre(row: Any, acc: Any, eps: Any) -> Any:
    """Take the mean, whose sum is in `acc`, from a row [1, width]; returns one over its standard deviation."""
    width = row.shape[1]
    share = row.dtype.type(1) / row.dtype.type(width)
    mean = spread(total(acc) * share)
    acc = spread(row.dtype.type(0))
    for column in range(0, width, LANES):
        value = load(row, 0, column) - mean
        store(row, 0, column, value)
        acc = acc + value * value
    return row.dtype.type(1) / np.sqrt(total(acc) * share + eps)


@njit(inline="always", error_model="numpy")
def _add_to_ends(table: Any, row: int, edge: int, ends: Ends, sums: Sums) -> None:
    """Add one row to the sums of its edge's ends; ends that this rank does not own are left out."""
    width = sums.at_pairs.shape[1]
    dst, pair = ends.dst[edge], ends.pair[edge]
    if dst < ends.num_owned:
        for column in range(0, width, LANES):
            store(sums.at_ends, dst, column, load(sums.at_ends, dst, column) + load(table, row, column))
    if pair >= 0:
        for column in range(0, width, LANES):
            store(sums.at_pairs, pair, column, load(sums.at_pairs, pair, column) + load(table, row, column))


@njit(inline="always", error_model="numpy")
def _row_key(drop: Drop, row: int) -> Any:
    """The number that all random numbers of a row come from, see `noise`."""
    state = drop.key + np.uint64(drop.ids[row]) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@njit(nogil=True, cache=True, error_model="numpy")
def norm_forward(
    rows: Table,
    first: int,
    count: int,
    norm: Norm,
    ends: Ends,
    gathered: FloatTable,
    kept: FloatTable,
    out: Table,
    out_first: int,
    drop: Drop,
    sums: Sums,
) -> None:
    """LayerNorm and ReLU of a block of products.

    Args:
        rows: The products, [>= count, width].
        first: Edge of row 0.
        count: How many rows.
        norm: Bias, scale and shift.
        ends: Ends of the edges.
        gathered: What to add to a row from the ends of its edge, [num_local, 2 width]; empty: nothing.
        kept: Takes what is normalised, for backward, [>= count, width]; may be `rows`; empty: not kept.
        out: Where the results go, from row `out_first` on; may be `rows`, if `kept` is not.
        out_first: Its first row.
        drop: What to drop of the results.
        sums: Where the results are summed; empty tables: nowhere.
    """
    width = norm.bias.shape[1]
    row = np.empty((1, width), norm.bias.dtype)
    for i in range(count):
        acc = spread(norm.bias.dtype.type(0))
        if len(gathered) > 0:
            dst, src = ends.dst[first + i], ends.src[first + i]
            for column in range(0, width, LANES):
                at_ends = load(gathered, dst, column) + load(gathered, src, width + column)
                value = (load(rows, i, column) + at_ends) + load(norm.bias, 0, column)
                store(row, 0, column, value)
                acc = acc + value
        else:
            for column in range(0, width, LANES):
                value = load(rows, i, column) + load(norm.bias, 0, column)
                store(row, 0, column, value)
                acc = acc + value
        if len(kept) > 0:
            for column in range(0, width, LANES):
                store(kept, i, column, load(row, 0, column))
        scale = spread(_centre(row, acc, norm.eps))
        row_key = _row_key(drop, first + i) if len(drop.ids) > 0 else np.uint64(0)
        for column in range(0, width, LANES):
            value = load(row, 0, column) * scale * load(norm.scale, 0, column) + load(norm.shift, 0, column)
            value = where_positive(value, value)
            if len(drop.ids) > 0:
                value = value * draw(row_key, column, drop.threshold, drop.scale)
            store(out, out_first + i, column, value)
        if len(sums.at_ends) > 0:
            _add_to_ends(out, out_first + i, first + i, ends, sums)


@njit(nogil=True, cache=True, error_model="numpy")
def norm_backward(
    rows: Table,
    first: int,
    count: int,
    norm: Norm,
    ends: Ends,
    gradient: Table,
    gradient_first: int,
    gathered: FloatTable,
    drop: Drop,
    out: Table,
    of_norm: FloatTable,
    sums: Sums,
) -> None:
    """Back through ReLU and LayerNorm; what was normalised is computed again from `rows`.

    Args:
        rows: The products, or what `norm_forward` kept (then `norm` has no bias: zeros), [>= count, width].
        first: Edge of row 0.
        count: How many rows.
        norm: Bias, scale and shift.
        ends: Ends of the edges.
        gradient: Gradient of the results, from row `gradient_first` on.
        gradient_first: Its first row.
        gathered: More gradient from the ends of each edge, [num_local, 2 width]; empty: nothing.
        drop: What was dropped of the results.
        out: Takes the gradient of the products, [>= count, width]; may be `rows`, or `gradient` if that begins at 0.
        of_norm: The gradients of bias, scale and shift are added to it, [3, width].
        sums: Where the gradients of the products are summed; empty tables: nowhere.
    """
    width = norm.bias.shape[1]
    row = np.empty((1, width), norm.bias.dtype)
    weighted = np.empty((1, width), norm.bias.dtype)
    share = norm.bias.dtype.type(1) / norm.bias.dtype.type(width)
    for i in range(count):
        acc = spread(norm.bias.dtype.type(0))
        for column in range(0, width, LANES):
            value = load(rows, i, column) + load(norm.bias, 0, column)
            store(row, 0, column, value)
            acc = acc + value
        scale = spread(_centre(row, acc, norm.eps))
        dst = src = 0
        if len(gathered) > 0:
            dst, src = ends.dst[first + i], ends.src[first + i]
        acc = spread(norm.bias.dtype.type(0))
        along = spread(norm.bias.dtype.type(0))
        row_key = _row_key(drop, first + i) if len(drop.ids) > 0 else np.uint64(0)
        for column in range(0, width, LANES):
            normed = load(row, 0, column) * scale
            store(row, 0, column, normed)
            grad = load(gradient, gradient_first + i, column)
            if len(gathered) > 0:
                grad = grad + (load(gathered, dst, column) + load(gathered, src, width + column))
            if len(drop.ids) > 0:
                grad = grad * draw(row_key, column, drop.threshold, drop.scale)
            passes = normed * load(norm.scale, 0, column) + load(norm.shift, 0, column)
            grad = where_positive(passes, grad)
            store(of_norm, 1, column, load(of_norm, 1, column) + grad * normed)
            store(of_norm, 2, column, load(of_norm, 2, column) + grad)
            grad = grad * load(norm.scale, 0, column)
            store(weighted, 0, column, grad)
            acc = acc + grad
            along = along + grad * normed
        mean, slope = spread(total(acc) * share), spread(total(along) * share)
        for column in range(0, width, LANES):
            grad = ((load(weighted, 0, column) - mean) - load(row, 0, column) * slope) * scale
            store(out, i, column, grad)
            store(of_norm, 0, column, load(of_norm, 0, column) + grad)
        if len(sums.at_ends) > 0:
            _add_to_ends(out, i, first + i, ends, sums)


@njit(nogil=True, cache=True, error_model="numpy")
def add_pairs(at_pairs: FloatTable, pair_rows: IntArray, at_ends: FloatTable) -> None:
    """Add the partials of (tile, `src`) pairs, in ascending order, to the second half of `at_ends`."""
    width = at_pairs.shape[1]
    for pair in range(len(pair_rows)):
        node = pair_rows[pair]
        for column in range(0, width, LANES):
            store(at_ends, node, width + column, load(at_ends, node, width + column) + load(at_pairs, pair, column))
