"""LayerNorm, ReLU and sums at nodes between two matrix products of a block, one row at a time.

Gathering from nodes before, the norm, and summing at nodes after are one pass over the rows, so that a row is in
registers when it is needed. A row is computed by the same instructions wherever it lies, and sums run in the order of
rows (`docs/same_bits.md`, rules 1 and 2).

Tables are C-contiguous with a multiple of 16 columns; uint16 stands for bfloat16 (see `lanes`). A table at the ends of
edges has two halves: rows of the edges' `dst`, then rows of their `src`, in the order in which node nets take sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from domainpar.nn.compiled import compiled
from domainpar.nn.lanes import draw, load, store, total, where_positive
from domainpar.nn.noise import Drop, row_keys
from domainpar.plan import IntArray

FloatTable = np.ndarray[Any, np.dtype[np.floating[Any]]]
"""float32 or float64 [rows, multiple of 16]."""

Table = np.ndarray[Any, np.dtype[Any]]
"""float32, float64, or uint16 for bfloat16, [rows, multiple of 16]."""


class Norm(NamedTuple):
    """Bias of a product, then scale, shift and epsilon of its LayerNorm; tables [1, width].

    `wide` tells kernels the width, see `lanes`.
    """

    bias: FloatTable
    scale: FloatTable
    shift: FloatTable
    eps: Any
    wide: tuple[int, ...]


class Ends(NamedTuple):
    """The ends of edges: local rows of `src` and `dst`, and the (tile, `src`) pair or -1; int64 [num_edges]."""

    src: IntArray
    dst: IntArray
    pair: IntArray
    num_owned: int


class Sums(NamedTuple):
    """Sums of rows of edges: [num_owned, 2 width] at nodes, and [num_pairs, width] at (tile, `src`) pairs."""

    at_ends: FloatTable
    at_pairs: FloatTable


@njit(inline="always", error_model="numpy")
def _add_to_ends(row: Any, edge: int, ends: Ends, sums: Sums, wide: tuple[int, ...]) -> None:
    """Add one row to the sums of its edge's ends; ends that this rank does not own are left out."""
    dst, pair = ends.dst[edge], ends.pair[edge]
    # All edges into an owned node lie in one tile, in global order: their sum can be taken here and now. Those out of
    # it lie in many, computed in any order by any thread: each tile has a partial of its own, which `add_pairs` adds.
    if dst < ends.num_owned:
        store(sums.at_ends, dst, 0, load(sums.at_ends, dst, 0, wide) + row)
    if pair >= 0:
        store(sums.at_pairs, pair, 0, load(sums.at_pairs, pair, 0, wide) + row)


# The number that all random numbers of a row come from.
_row_key = njit(inline="always", error_model="numpy")(row_keys)


@compiled
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
        count: Number of rows.
        norm: Bias, scale and shift.
        ends: Ends of the edges.
        gathered: Added to a row from both ends of its edge, [num_local, 2 width]; empty: nothing.
        kept: Takes the input of the norm, for backward, [>= count, width]; may be `rows`; empty: not kept.
        out: Where the results go, from row `out_first` on; may be `rows`, if `kept` is not.
        out_first: Its first row.
        drop: Dropout of the results.
        sums: Where the results are summed; empty tables: nowhere.
    """
    wide, width = norm.wide, norm.bias.shape[1]
    one = norm.bias.dtype.type(1)
    share = one / norm.bias.dtype.type(width)
    bias, factor, shift = load(norm.bias, 0, 0, wide), load(norm.scale, 0, 0, wide), load(norm.shift, 0, 0, wide)
    for i in range(count):
        row, edge = load(rows, i, 0, wide), first + i
        if len(gathered) > 0:
            row = row + (load(gathered, ends.dst[edge], 0, wide) + load(gathered, ends.src[edge], width, wide))
        row = row + bias
        if len(kept) > 0:
            store(kept, i, 0, row)
        # (x - mean) / sqrt(mean of squares + eps): 1 / sqrt first, then a product, in backward as well.
        row = row - total(row) * share
        row = row * (one / np.sqrt(total(row * row) * share + norm.eps)) * factor + shift
        row = where_positive(row, row)  # ReLU
        if len(drop.ids) > 0:
            row = row * draw(_row_key(drop.key, np.uint64(drop.ids[edge])), drop.threshold, drop.scale, wide)
        store(out, out_first + i, 0, row)
        if len(sums.at_ends) > 0:
            # Loaded again: sums are of states as they are kept, which may be rounded to bfloat16.
            _add_to_ends(load(out, out_first + i, 0, wide), edge, ends, sums, wide)


@compiled
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
    """Back through ReLU and LayerNorm; normalised rows are computed again from `rows`.

    With y = (x - mean) s, s = 1 / sqrt(variance + eps), g the gradient at y and means over the columns of a row,
    the gradient at x is (g - mean(g) - y mean(g y)) s.

    Args:
        rows: The products, or the inputs that `norm_forward` kept (then `norm` has no bias: zeros), [>= count, width].
        first: Edge of row 0.
        count: Number of rows.
        norm: Bias, scale and shift.
        ends: Ends of the edges.
        gradient: Gradient of the results, from row `gradient_first` on.
        gradient_first: Its first row.
        gathered: More gradient from the ends of each edge, [num_local, 2 width]; empty: nothing.
        drop: Dropout of the results.
        out: Takes the gradient of the products, [>= count, width]; may be `rows`, or `gradient` if that begins at 0.
        of_norm: The gradients of bias, scale and shift are added to it, [3, width].
        sums: Where the gradients of the products are summed; empty tables: nowhere.
    """
    wide, width = norm.wide, norm.bias.shape[1]
    one = norm.bias.dtype.type(1)
    share = one / norm.bias.dtype.type(width)
    bias, factor, shift = load(norm.bias, 0, 0, wide), load(norm.scale, 0, 0, wide), load(norm.shift, 0, 0, wide)
    # Sums over the rows of this tile stay in registers, row after row: their order is that of the tile's edges.
    of_bias, of_factor, of_shift = load(of_norm, 0, 0, wide), load(of_norm, 1, 0, wide), load(of_norm, 2, 0, wide)
    for i in range(count):
        row, edge = load(rows, i, 0, wide) + bias, first + i
        grad = load(gradient, gradient_first + i, 0, wide)
        if len(gathered) > 0:
            grad = grad + (load(gathered, ends.dst[edge], 0, wide) + load(gathered, ends.src[edge], width, wide))
        if len(drop.ids) > 0:
            grad = grad * draw(_row_key(drop.key, np.uint64(drop.ids[edge])), drop.threshold, drop.scale, wide)
        row = row - total(row) * share
        scale = one / np.sqrt(total(row * row) * share + norm.eps)
        row = row * scale  # y
        # ReLU let through what was positive: the same expression as in forward, so the same decision.
        grad = where_positive(row * factor + shift, grad)
        of_factor = of_factor + grad * row
        of_shift = of_shift + grad
        grad = grad * factor  # g
        mean, slope = total(grad) * share, total(grad * row) * share
        grad = ((grad - mean) - row * slope) * scale
        of_bias = of_bias + grad
        store(out, i, 0, grad)
        if len(sums.at_ends) > 0:
            _add_to_ends(load(out, i, 0, wide), edge, ends, sums, wide)
    store(of_norm, 0, 0, of_bias)
    store(of_norm, 1, 0, of_factor)
    store(of_norm, 2, 0, of_shift)


@compiled
def add_pairs(at_pairs: FloatTable, pair_rows: IntArray, at_ends: FloatTable) -> None:
    """Add the partials of (tile, `src`) pairs, in ascending order, to the second half of `at_ends`."""
    width = at_pairs.shape[1]
    for pair in range(len(pair_rows)):
        node = pair_rows[pair]
        for column in range(width):
            at_ends[node, width + column] += at_pairs[pair, column]
