"""Random numbers that depend on their use, never on the rank that draws them: `docs/same_bits.md`, rule 7.

A number is a function of a key (made of seed, step, event, layer and iteration), of the global id of a row and of its
column. So both copies of a cut edge have the same number, backward has that of forward, and there is no generator
state.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from domainpar.common.compiling import compiled
from domainpar.plan import IntArray


def key_of(*parts: int | str) -> int:
    """A key of 63 bits from values that identify one use of random numbers."""
    # With their types: the number 1 and the text "1" name different uses.
    text = "\0".join(f"{type(part).__name__} {part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1  # fits a signed integer


def threshold_of(rate: float) -> int:
    """Numbers whose 32 random bits are below are dropped."""
    return min(round(rate * 2**32), 2**32 - 1)  # 32 bits hold no 2**32, to which a rate may round


@dataclass(frozen=True)
class Noise:
    """Dropout in one call of an MLP: each number of a hidden layer is 0 with probability `rate`.

    Those that stay are divided by 1 - rate, as in torch's Dropout.

    Attributes:
        key: Of this call.
        rate: In [0, 1).
        ids: Global ids of the table's rows.
    """

    key: int
    rate: float
    ids: IntArray

    def key_of_layer(self, layer: int) -> int:
        """Key of the results of one layer."""
        return key_of(self.key, layer)


def dropout_mask(ids: Tensor, key: int, width: int, rate: float, like: Tensor) -> Tensor:
    """Factors of a table under dropout, [rows, width] of the type of `like`: 0, or 1 / (1 - rate).

    Args:
        ids: Global ids of the rows, int64 [rows].
        key: Of this use of random numbers.
        width: Columns.
        rate: Probability of 0, in [0, 1).
        like: Gives type and device.
    """
    threshold = threshold_of(rate)
    if like.device.type == "cpu" and like.dtype in (torch.float32, torch.float64):
        # The numbers of the last line, without tables of 64-bit integers on the way.
        mask = torch.empty(len(ids), width, dtype=like.dtype, device=like.device)
        out = mask.numpy()
        keys = row_keys(np.uint64(key), ids.numpy().astype(np.uint64))
        _write_mask(keys, np.uint32(threshold), out.dtype.type(1 / (1 - rate)), out)
        return mask
    # Of two numbers without a sign, the larger is the larger with its first bit turned and taken for a sign.
    bits = _bits(ids.to(like.device), key, width) ^ _signed(2**31, 32)
    return (bits >= _signed(threshold ^ 2**31, 32)).to(like.dtype) / (1 - rate)


def random_bits(ids: Tensor, key: int, width: int, device: torch.device | str) -> Tensor:
    """32 random bits for each row and column, in int64 [rows, width]: a function of the key, ids and column alone."""
    return _bits(ids.to(device), key, width).long() & 2**32 - 1


def _bits(ids: Tensor, key: int, width: int) -> Tensor:
    """32 random bits for each row and column, int32 [rows, width], where the ids lie."""
    # `row_keys` and `_scrambled` once more: torch computes with no unsigned numbers. The bits are the same with a sign,
    # but a shift must not repeat that.
    state = ids * _signed(0x9E3779B97F4A7C15, 64) + _signed(key, 64)
    state = (state ^ state >> 30 & 2**34 - 1) * _signed(0xBF58476D1CE4E5B9, 64)
    state = (state ^ state >> 27 & 2**37 - 1) * _signed(0x94D049BB133111EB, 64)
    keys = state ^ state >> 31 & 2**33 - 1
    # The lower half of an int64 is what remains of it in int32.
    low, high = (half.to(torch.int32)[:, None] for half in (keys, keys >> 32))
    columns = torch.arange(width, device=ids.device, dtype=torch.int32)[None]
    # The halves enter apart, for one mixing holds 32 bits only.
    return _scramble(_scramble(columns * _signed(0x9E3779B9, 32) + low) ^ high)


def _signed(bits: int, width: int) -> int:
    """The number with a sign that has these bits."""
    bits &= 2**width - 1
    return bits - 2**width if bits >> width - 1 else bits


def row_keys(key: Any, ids: Any) -> Any:
    """64 random bits of each row: splitmix64 of its id from the key on.

    One formula for arrays in numpy and for single numbers in kernels.

    Args:
        key: uint64.
        ids: Global ids, uint64.
    """
    # uint64 wraps around in numpy and in kernels alike, as splitmix64 wants.
    state = key + ids * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _scramble(bits: Tensor) -> Tensor:
    """A one-to-one mixing of 32 bits, int32."""
    bits = (bits ^ bits >> 16 & 2**16 - 1) * _signed(0x7FEB352D, 32)
    bits = (bits ^ bits >> 15 & 2**17 - 1) * _signed(0x846CA68B, 32)
    return bits ^ bits >> 16 & 2**16 - 1


@njit(inline="always")
def _scrambled(bits: Any) -> Any:
    """A one-to-one mixing of 32 bits."""
    bits = np.uint32((bits ^ (bits >> np.uint32(16))) * np.uint32(0x7FEB352D))
    bits = np.uint32((bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(bits ^ (bits >> np.uint32(16)))


@compiled
def _write_mask(row_keys: Any, threshold: Any, scale: Any, out: Any) -> None:
    """Write `scale` where a number is kept and 0 where it is dropped.

    Args:
        row_keys: 64 random bits of each row, uint64 [rows].
        threshold: A number is dropped if its 32 bits are below, uint32.
        scale: What a number that is kept is multiplied by.
        out: [rows, width], float32 or float64.
    """
    for row in range(len(row_keys)):
        low, high = np.uint32(row_keys[row] & np.uint64(0xFFFFFFFF)), np.uint32(row_keys[row] >> np.uint64(32))
        for column in range(out.shape[1]):
            # Cut to 32 bits at every step: numba would go on in 64.
            start = np.uint32(np.uint32(column) * np.uint32(0x9E3779B9) + low)
            bits = _scrambled(np.uint32(_scrambled(start) ^ high))
            out[row, column] = scale if bits >= threshold else 0.0
