"""Kernels of sums over rows as integers, and of products of rows: what `exact` calls on tables of this rank.

Numbers are scaled by a power of two for each column, which loses no bit, and rounded to integers. Sums of integers do
not depend on the order of their terms; products of such integers are summed as float64 while they fit its 53 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from domainpar.common.compiling import compiled
from domainpar.nn.products import multiply, outer

BLOCK = 256  # rows of which products are summed as float64; their sum takes 8 bits more than a product
STRIP = 192  # rows that stay in cache while they meet all columns of a matrix


@compiled
def largest_bits(bits: Any, magnitude: Any, out: Any) -> None:
    """The largest bits of a magnitude in each column: floats, as integers, are ordered as their magnitudes are.

    Args:
        bits: Floats seen as integers, int32 or int64 [n, C].
        magnitude: All bits but that of the sign.
        out: Takes the largest, [C], of the same type; 0 before.
    """
    for i in range(bits.shape[0]):
        for c in range(bits.shape[1]):
            out[c] = max(out[c], bits[i, c] & magnitude)


@compiled
def add_integers(table: Any, scales: Any, shift: float, rows: Any, out: Any) -> None:
    """Add each row of a table, as integers, to a row of the sums.

    Args:
        table: Floats [n, C].
        scales: Powers of two, float64 [C].
        shift: What the rest is scaled by for a second integer.
        rows: Where each row goes, int64 [n].
        out: Sums of first, or of first and second integers, int64 [places, 1 or 2, C].
    """
    for i in range(table.shape[0]):
        row = rows[i]
        if out.shape[1] == 1:
            for c in range(table.shape[1]):
                out[row, 0, c] += np.int64(np.rint(np.float64(table[i, c]) * scales[c]))
        else:
            for c in range(table.shape[1]):
                value = np.float64(table[i, c]) * scales[c]
                first = np.rint(value)
                out[row, 0, c] += np.int64(first)
                out[row, 1, c] += np.int64(np.rint((value - first) * shift))


@compiled
def as_floats(sums: Any, shift: float, scales: Any, out: Any) -> None:
    """Sums [n, 1 or 2, C] of first and second integers as floats [n, C], each rounded from float64."""
    for i in range(sums.shape[0]):
        if sums.shape[1] == 1:
            for c in range(sums.shape[2]):
                out[i, c] = np.float64(sums[i, 0, c]) * scales[c]
        else:
            for c in range(sums.shape[2]):
                out[i, c] = (np.float64(sums[i, 0, c]) + np.float64(sums[i, 1, c]) / shift) * scales[c]


@compiled
def _slice_rows(table: Any, first: int, count: int, scales: Any, shift: float, out: Any) -> None:
    """Rows in slices of some bits each: integers, the next one counting what the last one left."""
    last, width = out.shape[0] - 1, table.shape[1]
    for i in range(count):
        for c in range(width):
            out[0, i, c] = np.float64(table[first + i, c]) * scales[c]
        for level in range(last):
            for c in range(width):
                whole = np.rint(out[level, i, c])
                out[level + 1, i, c] = (out[level, i, c] - whole) * shift
                out[level, i, c] = whole
        for c in range(width):
            out[last, i, c] = np.rint(out[last, i, c])


@compiled
def add_products(a: Any, b: Any, scales_a: Any, scales_b: Any, shift: float, padded: int, out: Any) -> None:
    """Add `a.T @ b` as integers.

    Args:
        a, b: Floats [n, K] and [n, M].
        scales_a, scales_b: Powers of two, float64 [K] and [M].
        shift: Two to the bits of a slice.
        padded: The next multiple of 16 of M.
        out: Sums of products of slices, int64 [L, K, padded]: those whose numbers, of L for each factor, add up to the
            first index.
    """
    levels, width = out.shape[0], a.shape[1]
    of_a = np.zeros((levels, BLOCK, width))
    of_b = np.zeros((levels, BLOCK, padded))
    sums = np.empty((width, padded))
    for first in range(0, a.shape[0], BLOCK):
        count = min(BLOCK, a.shape[0] - first)
        _slice_rows(a, first, count, scales_a, shift, of_a)
        _slice_rows(b, first, count, scales_b, shift, of_b)
        for level in range(levels):
            sums[:] = 0.0
            for one in range(level + 1):
                outer(of_a[one], of_b[level - one], count, sums)
            for k in range(width):
                for m in range(padded):
                    out[level, k, m] += np.int64(sums[k, m])


@compiled
def times(rows: Any, weight: Any, bias: Any, out: Any) -> None:
    """`out = rows @ weight + bias`, each row by itself: a chain of multiply-adds in the order of its numbers.

    Args:
        rows: float32 or float64 [n, in].
        weight, bias: [in, padded] and [padded], of the same type; a multiple of 16 columns.
        out: [n, columns], at most `padded` of them.
    """
    columns = out.shape[1]
    strip = np.empty((STRIP, weight.shape[1]), weight.dtype)
    for first in range(0, rows.shape[0], STRIP):
        count = min(STRIP, rows.shape[0] - first)
        for i in range(count):
            strip[i] = bias
        multiply(rows[first : first + count], count, weight, strip, True)
        for i in range(count):
            for c in range(columns):
                out[first + i, c] = strip[i, c]
