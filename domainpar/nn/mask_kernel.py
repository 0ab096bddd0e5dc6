"""Which numbers of a table dropout keeps, on CPU: the formula of `noise`, one pass over the table."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

_LOW = np.uint64(0xFFFFFFFF)


@njit(cache=True, nogil=True)
def scramble(bits: Any) -> Any:
    """A one-to-one mixing of 32 bits."""
    bits = np.uint32((bits ^ (bits >> np.uint32(16))) * np.uint32(0x7FEB352D))
    bits = np.uint32((bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(bits ^ (bits >> np.uint32(16)))


@njit(cache=True, nogil=True)
def write_mask(row_keys: Any, threshold: Any, scale: Any, out: Any) -> None:
    """Write `scale` where a number is kept and 0 where it is dropped.

    Args:
        row_keys: 64 random bits of each row, uint64 [rows].
        threshold: A number is dropped if its 32 bits are below, uint32.
        scale: What a number that is kept is multiplied by.
        out: [rows, width], float32 or float64.
    """
    for row in range(len(row_keys)):
        low, high = np.uint32(row_keys[row] & _LOW), np.uint32(row_keys[row] >> np.uint64(32))
        for column in range(out.shape[1]):
            start = np.uint32(np.uint32(column) * np.uint32(0x9E3779B9) + low)
            bits = scramble(np.uint32(scramble(start) ^ high))
            out[row, column] = scale if bits >= threshold else 0.0
