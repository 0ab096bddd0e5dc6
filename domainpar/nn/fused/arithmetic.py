"""The kernels of the GPU engine, in Triton: a row's bits depend on that row alone, a sum's on its own terms.

- A program takes blocks of rows. Nothing but sums over rows mixes them: products run over their columns in ascending
  order, 16 at a time, norms over the columns of a row. So a row has the same bits in any block of any launch.
- A sum at a node runs over its edges in stored order. No float is added by atomics.
- Gradients of parameters are summed over the rows of a *chunk*: rows counted from the start of a tile, so that it is
  the same chunk on any number of ranks. Its sums become integers, `parallel.integer_sums`, which atomics may add.
- Activations go through memory that their program alone uses, again and again; of narrow layers it stays in caches.
  Triton has no other way to cut a table in registers into columns, and a product of all columns at once spills.
- Quotients and roots are rounded as IEEE 754 says (`div_rn`, `sqrt_rn`), and kernels are compiled without contracting
  products and sums (`enable_fp_fusion=False`): what is left to the architecture is exp and the sums of matrix units.

Tuples of numbers describe MLPs, see `calls.Shape`: they are constants of a kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Kernels take many arguments, and a line for each would double this file.
# fmt: off

COLUMNS_AT_ONCE = tl.constexpr(16)
"""Of a product: what the kernels multiply at a time, in ascending order."""

NO_ACTIVATION, RELU, SILU, TANH = (tl.constexpr(number) for number in range(4))
"""As in `mlp.ACTIVATIONS`."""

IEEE, TF32X3, BF16 = (tl.constexpr(number) for number in range(3))
"""How products are made: in float32; of three TF32 parts by matrix units; of numbers rounded to bfloat16."""

AT_NO_END, AT_BOTH_ENDS, AT_DST, AT_SRC = (tl.constexpr(number) for number in range(4))
"""Where results of an edge are summed."""

HI_SCALE, LO_SCALE, LARGEST_PARTIAL = tl.constexpr(2.0**20), tl.constexpr(2.0**72), tl.constexpr(2.0**26)
"""As in `parallel.integer_sums`."""

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether Triton interprets the kernels: then it takes the bits of bfloat16 for integers in products."""

ROUND = tl.constexpr(1.5 * 2.0**52)
"""Added to a number of at most 2^51 and taken away again: it is rounded to an integer, halves to even."""


@triton.jit
def zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A table of them; a shape of numbers that are no constants is refused elsewhere."""
    return tl.zeros((ROWS, COLUMNS), tl.float32)


@triton.jit
def dot(rows, weight, total, KIND: tl.constexpr):
    """`total + rows @ weight`, summed in float32, of operands as `KIND` says."""
    if KIND == BF16 and INTERPRETED:
        return tl.dot(rows.to(tl.bfloat16).to(tl.float32), weight.to(tl.bfloat16).to(tl.float32), total)
    if KIND == BF16:
        return tl.dot(rows.to(tl.bfloat16), weight.to(tl.bfloat16), total)
    if KIND == TF32X3:
        return tl.dot(rows.to(tl.float32), weight, total, input_precision="tf32x3")
    return tl.dot(rows.to(tl.float32), weight, total, input_precision="ieee")


@triton.jit
def times_weight(
    total, table, at, here, stride, weight, n, wide, WIDTH: tl.constexpr, STRIDE: tl.constexpr, KIND: tl.constexpr
):
    """`total + table[at] @ weight.T`: WIDTH columns of a weight [out, in] with rows of STRIDE numbers."""
    for first in range(0, WIDTH, COLUMNS_AT_ONCE):
        k = first + tl.arange(0, COLUMNS_AT_ONCE)
        rows = tl.load(table + at[:, None] * stride + k[None, :], here[:, None] & (k < WIDTH)[None, :], 0.0)
        of_weight = tl.load(weight + n[None, :] * STRIDE + k[:, None], wide[None, :] & (k < WIDTH)[:, None], 0.0)
        total = dot(rows, of_weight, total, KIND)
    return total


@triton.jit
def back_through(
    total, gradient, at, here, stride, weight, c, WIDTH: tl.constexpr, OUT: tl.constexpr, STRIDE: tl.constexpr,
    KIND: tl.constexpr
):
    """`total + gradient @ weight`: columns `c` of a weight [OUT, in] of row length STRIDE; the table has WIDTH."""
    for first in range(0, OUT, COLUMNS_AT_ONCE):
        k = first + tl.arange(0, COLUMNS_AT_ONCE)
        rows = tl.load(gradient + at[:, None] * stride + k[None, :], here[:, None] & (k < OUT)[None, :], 0.0)
        of_weight = tl.load(weight + k[:, None] * STRIDE + c[None, :], (k < OUT)[:, None] & (c < WIDTH)[None, :], 0.0)
        total = dot(rows, of_weight, total, KIND)
    return total


@triton.jit
def add_outer(
    partials, gradient, gradient_stride, table, at, stride, here, n, wide, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    KIND: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr
):
    """`partials += gradient.T @ table[at]`, [out, WIDTH] of row length STRIDE, over the rows of a block in their order.

    Args:
        gradient: Its columns `n` of each row of the block.
        at: First row of the block in the table; `here`: how many of them there are.
    """
    for first in range(0, WIDTH, PIECE):
        c = first + tl.arange(0, PIECE)
        place = partials + n[:, None] * STRIDE + c[None, :]
        mask = wide[:, None] & (c < WIDTH)[None, :]
        total = tl.load(place, mask, 0.0)
        for row in range(0, BLOCK, COLUMNS_AT_ONCE):
            k = row + tl.arange(0, COLUMNS_AT_ONCE)
            of_gradient = tl.load(
                gradient + k[None, :] * gradient_stride + n[:, None], wide[:, None] & (k < here)[None, :], 0.0
            )
            rows = tl.load(
                table + (at + k)[:, None] * stride + c[None, :], (k < here)[:, None] & (c < WIDTH)[None, :], 0.0
            )
            total = dot(of_gradient, rows.to(tl.float32), total, KIND)
        tl.debug_barrier()
        tl.store(place, total, mask)


@triton.jit
def add_rows(partials, rows, n, wide):
    """Add up the rows of a block into partials."""
    total = tl.load(partials + n, wide, 0.0) + tl.sum(rows, 0)
    tl.debug_barrier()
    tl.store(partials + n, total, wide)


@triton.jit
def normed_rows(product, wide, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """Rows of mean 0 and variance 1, and what they were multiplied by."""
    mean = tl.sum(product, 1) * (1.0 / WIDTH)
    centred = tl.where(wide[None, :], product - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, 1) * (1.0 / WIDTH)
    inverse = tl.div_rn(tl.full(variance.shape, 1.0, tl.float32), tl.sqrt_rn(variance + EPS))
    return centred * inverse[:, None], inverse


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), for any x."""
    small = tl.exp(-tl.abs(x))
    return tl.div_rn(tl.where(x >= 0, 1.0, small), 1.0 + small)


@triton.jit
def _tanh(x):
    small = tl.exp(-2.0 * tl.abs(x))
    far = tl.div_rn(1.0 - small, 1.0 + small)
    square = x * x
    # Near 0 the quotient has lost digits: five terms of the series, which are enough below 1/4.
    near = x * (
        1.0 + square * (-0.333333333 + square * (0.133333333 + square * (-0.0539682540 + square * 0.0218694885)))
    )
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x >= 0, far, -far))


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """An activation at x."""
    if ACTIVATION == RELU:
        return tl.where(x > 0, x, 0.0 * x)  # NaN stays
    if ACTIVATION == SILU:
        return x * sigmoid(x)
    if ACTIVATION == TANH:
        return _tanh(x)
    return x


@triton.jit
def slope_of(x, ACTIVATION: tl.constexpr):
    """Of an activation, at x."""
    if ACTIVATION == RELU:
        return tl.where(x > 0, 1.0, 0.0 * x)
    if ACTIVATION == SILU:
        s = sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    if ACTIVATION == TANH:
        t = _tanh(x)
        return 1.0 - t * t
    return tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _scrambled(bits):
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def factors_of_dropout(ids, n, key, threshold, scale):
    """`noise.keeps`: 0 or `scale` for each number of some rows, by their global ids."""
    state = key.to(tl.uint64) + ids.to(tl.uint64) * 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    low, high = (state & 0xFFFFFFFF).to(tl.uint32), (state >> 32).to(tl.uint32)
    start = n.to(tl.uint32)[None, :] * 0x9E3779B9 + low[:, None]
    bits = _scrambled(_scrambled(start) ^ high[:, None])
    return tl.where(bits.to(tl.int64) >= threshold, scale, 0.0)


@triton.jit
def gather(table, dst, src, here, n, wide, WIDTH: tl.constexpr, ENDS: tl.constexpr):
    """What a table [num_local, 2 WIDTH] holds for the ends of some edges, added up."""
    mask = here[:, None] & wide[None, :]
    of_dst = table + dst[:, None] * (2 * WIDTH) + n[None, :]
    of_src = table + src[:, None] * (2 * WIDTH) + WIDTH + n[None, :]
    if ENDS == AT_DST:
        return tl.load(of_dst, mask, 0.0)
    if ENDS == AT_SRC:
        return tl.load(of_src, mask, 0.0)
    return tl.load(of_dst, mask, 0.0) + tl.load(of_src, mask, 0.0)


@triton.jit
def clear(partials, COUNT: tl.constexpr):
    """Set partials to 0."""
    for first in range(0, COUNT, 1024):
        i = first + tl.arange(0, 1024)
        tl.store(partials + i, tl.zeros((1024,), tl.float32), i < COUNT)
    tl.debug_barrier()


@triton.jit
def limbs_of(value):
    """High and low limbs of float64 numbers, int64, and whether they are accepted, as `IntegerSums.add` splits them."""
    accepted = tl.abs(value) < LARGEST_PARTIAL  # False for NaN
    value = tl.where(accepted, value, 0.0)
    hi = (value * HI_SCALE + ROUND) - ROUND
    lo = ((value - hi * (1.0 / HI_SCALE)) * LO_SCALE + ROUND) - ROUND
    return hi.to(tl.int64), lo.to(tl.int64), accepted


@triton.jit
def give(partials, places, limbs, num_sums, COUNT: tl.constexpr):
    """Split the partials of a chunk into integers and add these to the sums, as `IntegerSums.add` does.

    Args:
        places: The sum that each partial belongs to, int64 [COUNT]; -1: to none.
        limbs: int64 [2 num_sums + 1]: high, low, rejected.
    """
    for first in range(0, COUNT, 1024):
        i = first + tl.arange(0, 1024)
        place = tl.load(places + i, i < COUNT, -1)
        hi, lo, accepted = limbs_of(tl.load(partials + i, i < COUNT, 0.0).to(tl.float64))
        given = place >= 0
        rejected = tl.sum((given & (accepted == 0)).to(tl.int64), 0)
        if rejected > 0:
            tl.atomic_add(limbs + 2 * num_sums, rejected, sem="relaxed")
        tl.atomic_add(limbs + place, hi, given & (hi != 0), sem="relaxed")
        tl.atomic_add(limbs + num_sums + place, lo, given & (lo != 0), sem="relaxed")
