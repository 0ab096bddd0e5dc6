"""The kernels of the GPU engine, in Triton: a row's bits depend on that row alone, a sum's on its own terms.

- A program takes blocks of rows. Nothing but sums over rows mixes them: products run over their columns in ascending
  order, 16 at a time, norms over the columns of a row. So a row has the same bits in any block of any launch.
- A sum at a node runs over its edges in stored order. No float is added by atomics.
- Gradients of parameters are summed over the rows of a *chunk*: rows counted from the start of a tile, so that it is
  the same chunk on any number of ranks. Its sums become integers, `parallel.integer_sums`, which atomics may add.
- Activations go through memory that their program alone uses and uses again and again, so that it stays in the caches.
  Triton has no other way to cut a table in registers into columns, and a product of all columns at once spills.
- Quotients and roots are rounded as IEEE 754 says (`div_rn`, `sqrt_rn`), and kernels are compiled without contracting
  products and sums (`enable_fp_fusion=False`): what is left to the architecture is exp and the sums of matrix units.

Tuples of numbers describe perceptrons, see `calls.Shape`: they are constants of a kernel.
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
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.zeros((ROWS, COLUMNS), tl.float32)


@triton.jit
def _dot(rows, weight, total, KIND: tl.constexpr):
    """`total + rows @ weight`, summed in float32, of operands as `KIND` says."""
    if KIND == BF16 and INTERPRETED:
        return tl.dot(rows.to(tl.bfloat16).to(tl.float32), weight.to(tl.bfloat16).to(tl.float32), total)
    if KIND == BF16:
        return tl.dot(rows.to(tl.bfloat16), weight.to(tl.bfloat16), total)
    if KIND == TF32X3:
        return tl.dot(rows.to(tl.float32), weight, total, input_precision="tf32x3")
    return tl.dot(rows.to(tl.float32), weight, total, input_precision="ieee")


@triton.jit
def _times_weight(
    total, table, at, here, stride, weight, n, wide, WIDTH: tl.constexpr, STRIDE: tl.constexpr, KIND: tl.constexpr
):
    """`total + table[at] @ weight.T`: WIDTH columns of a weight [out, in] with rows of STRIDE numbers."""
    for first in range(0, WIDTH, COLUMNS_AT_ONCE):
        k = first + tl.arange(0, COLUMNS_AT_ONCE)
        rows = tl.load(table + at[:, None] * stride + k[None, :], here[:, None] & (k < WIDTH)[None, :], 0.0)
        of_weight = tl.load(weight + n[None, :] * STRIDE + k[:, None], wide[None, :] & (k < WIDTH)[:, None], 0.0)
        total = _dot(rows, of_weight, total, KIND)
    return total


@triton.jit
def _normed(product, wide, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """Rows of mean 0 and variance 1, and what they were multiplied by."""
    mean = tl.sum(product, 1) * (1.0 / WIDTH)
    centred = tl.where(wide[None, :], product - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, 1) * (1.0 / WIDTH)
    inverse = tl.div_rn(tl.full(variance.shape, 1.0, tl.float32), tl.sqrt_rn(variance + EPS))
    return centred * inverse[:, None], inverse


@triton.jit
def _sigmoid(x):
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
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == RELU:
        return tl.where(x > 0, x, 0.0 * x)  # NaN stays
    if ACTIVATION == SILU:
        return x * _sigmoid(x)
    if ACTIVATION == TANH:
        return _tanh(x)
    return x


@triton.jit
def _slope(x, ACTIVATION: tl.constexpr):
    """Of an activation, at x."""
    if ACTIVATION == RELU:
        return tl.where(x > 0, 1.0, 0.0 * x)
    if ACTIVATION == SILU:
        s = _sigmoid(x)
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
def _factors_of_dropout(ids, n, key, threshold, scale):
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
def _at_ends(table, dst, src, here, n, wide, WIDTH: tl.constexpr, ENDS: tl.constexpr):
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
def _first_product(
    at, here, tables, parameters, at_nodes, dst, src, n, wide, SHAPE: tl.constexpr, GATHERS: tl.constexpr
):
    """The first layer's product: of row tables, 16 columns at a time, and of node states, which is made already."""
    product = _zeros(here.shape[0], SHAPE.padded[0])
    for i in tl.static_range(len(SHAPE.tables)):
        product = _times_weight(
            product, tables[i], at, here, SHAPE.tables[i], parameters + SHAPE.weights[0] + SHAPE.firsts[i], n, wide,
            SHAPE.tables[i], SHAPE.ins[0], SHAPE.kinds[0]
        )
    if GATHERS:
        product += _at_ends(at_nodes, dst, src, here, n, wide, SHAPE.widths[0], AT_BOTH_ENDS)
    return product


@triton.jit
def _layer(product, layer: tl.constexpr, parameters, n, wide, SHAPE: tl.constexpr):
    """What a layer's activation takes: its product, normed, scaled and shifted; what the norm gave; 1 / deviation."""
    normed, inverse = product, tl.zeros((product.shape[0],), tl.float32)
    if SHAPE.norms[layer]:
        normed, inverse = _normed(product, wide, SHAPE.widths[layer], SHAPE.eps[layer])
    x = normed
    if SHAPE.scales[layer] >= 0:
        x = x * tl.load(parameters + SHAPE.scales[layer] + n, wide, 0.0)[None, :]
        x = x + tl.load(parameters + SHAPE.shifts[layer] + n, wide, 0.0)[None, :]
    return x, normed, inverse


@triton.jit
def _through(
    at, here, tables, parameters, at_nodes, dst, src, ids, keys, threshold, scale, memory, SHAPE: tl.constexpr,
    GATHERS: tl.constexpr, DROPS: tl.constexpr, KEEPS: tl.constexpr, BLOCK: tl.constexpr
):
    """A perceptron on a block of rows, but for its residual.

    Args:
        at, here: Rows of the tables, int64 [BLOCK], and which of them there are.
        memory: Of this program. With KEEPS it gets what backward takes: the inputs of all layers but the first,
            [depth - 1, BLOCK, PAD], then the products of all, [depth, BLOCK, PAD].
    """
    block, activations = tl.arange(0, BLOCK), memory
    for layer in tl.static_range(len(SHAPE.widths)):
        n = tl.arange(0, SHAPE.padded[layer])
        wide = n < SHAPE.widths[layer]
        if layer == 0:
            product = _first_product(at, here, tables, parameters, at_nodes, dst, src, n, wide, SHAPE, GATHERS)
        else:
            product = _times_weight(
                _zeros(BLOCK, SHAPE.padded[layer]), activations, block, here, SHAPE.pad,
                parameters + SHAPE.weights[layer], n, wide, SHAPE.ins[layer], SHAPE.ins[layer], SHAPE.kinds[layer]
            )
            if not KEEPS:
                tl.debug_barrier()  # all have read: the next layer writes there
        product += tl.load(parameters + SHAPE.biases[layer] + n, wide, 0.0)[None, :]
        if KEEPS:
            place = memory + (SHAPE.depth - 1 + layer) * BLOCK * SHAPE.pad
            tl.store(place + block[:, None] * SHAPE.pad + n[None, :], product)
        x, _, _ = _layer(product, layer, parameters, n, wide, SHAPE)
        x = _activated(x, SHAPE.activations[layer])
        if layer < SHAPE.depth - 1:
            if DROPS:
                x = x * _factors_of_dropout(ids, n, keys[layer], threshold, scale)
            activations = memory + (layer * BLOCK * SHAPE.pad if KEEPS else 0)
            tl.store(activations + block[:, None] * SHAPE.pad + n[None, :], x)
            tl.debug_barrier()
    return x


@triton.jit(do_not_specialize=["num_blocks", "key_0", "key_1", "key_2", "key_3", "threshold"])
def rows_forward(
    blocks, num_blocks, tables, parameters, at_nodes, dst, src, ids, key_0, key_1, key_2, key_3, threshold, scale,
    memory, out, SHAPE: tl.constexpr, GATHERS: tl.constexpr, DROPS: tl.constexpr, BLOCK: tl.constexpr
):
    """A perceptron on rows: `out = mlp(tables and node states) [+ a table]`.

    Args:
        blocks: Rows, from and to, of each block, int32 [num_blocks, 2].
        tables: Row tables that come in, float32 or bfloat16, their widths in SHAPE.
        parameters: All of the perceptron, float32, as SHAPE says.
        at_nodes: Products of node states with the weight for `dst`, then for `src`, [num_local, 2 width].
        dst, src: Ends of each row, int64.
        ids: Global ids of the rows, for dropout.
        key_0, key_1, key_2, key_3: Of the layers that drop: no tuple, of whose numbers Triton would ask whether 16
            divides them, and compile anew.
        threshold, scale: Of dropout.
        memory: [programs, BLOCK, pad].
        out: [rows, width].
    """
    keys = (key_0, key_1, key_2, key_3)
    memory += tl.program_id(0).to(tl.int64) * BLOCK * SHAPE.pad
    number = tl.program_id(0)
    while number < num_blocks:
        first, stop = tl.load(blocks + 2 * number), tl.load(blocks + 2 * number + 1)
        at = first.to(tl.int64) + tl.arange(0, BLOCK)
        here = at < stop
        of_dst, of_src, of_ids = at, at, at
        if GATHERS:
            of_dst, of_src = tl.load(dst + at, here, 0), tl.load(src + at, here, 0)
        if DROPS:
            of_ids = tl.load(ids + at, here, 0)
        x = _through(
            at, here, tables, parameters, at_nodes, of_dst, of_src, of_ids, keys, threshold, scale, memory, SHAPE,
            GATHERS, DROPS, False, BLOCK
        )
        n = tl.arange(0, SHAPE.padded[SHAPE.depth - 1])
        mask = here[:, None] & (n < SHAPE.widths[SHAPE.depth - 1])[None, :]
        place = at[:, None] * SHAPE.widths[SHAPE.depth - 1] + n[None, :]
        if SHAPE.residual >= 0:
            x = tl.load(tables[SHAPE.residual] + place, mask, 0.0).to(tl.float32) + x
        tl.store(out + place, x, mask)
        tl.debug_barrier()
        number += tl.num_programs(0)


@triton.jit
def _add_rows(partials, rows, n, wide):
    """Add up the rows of a block into partials."""
    total = tl.load(partials + n, wide, 0.0) + tl.sum(rows, 0)
    tl.debug_barrier()
    tl.store(partials + n, total, wide)


@triton.jit
def _add_outer(
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
            total = _dot(of_gradient, rows.to(tl.float32), total, KIND)
        tl.debug_barrier()
        tl.store(place, total, mask)


@triton.jit
def _back_through(
    total, gradient, at, here, stride, weight, c, WIDTH: tl.constexpr, OUT: tl.constexpr, STRIDE: tl.constexpr,
    KIND: tl.constexpr
):
    """`total + gradient @ weight`: columns `c` of a weight [OUT, in] of row length STRIDE; the table has WIDTH."""
    for first in range(0, OUT, COLUMNS_AT_ONCE):
        k = first + tl.arange(0, COLUMNS_AT_ONCE)
        rows = tl.load(gradient + at[:, None] * stride + k[None, :], here[:, None] & (k < OUT)[None, :], 0.0)
        of_weight = tl.load(weight + k[:, None] * STRIDE + c[None, :], (k < OUT)[:, None] & (c < WIDTH)[None, :], 0.0)
        total = _dot(rows, of_weight, total, KIND)
    return total


@triton.jit
def _layer_back(
    gradient, layer: tl.constexpr, parameters, partials, ids, keys, threshold, scale, memory, owned,
    SHAPE: tl.constexpr, DROPS: tl.constexpr, BLOCK: tl.constexpr
):
    """Gradient of a layer's product, given that of its result; and partials of bias, scale and shift."""
    block, n = tl.arange(0, BLOCK), tl.arange(0, SHAPE.padded[layer])
    wide = n < SHAPE.widths[layer]
    place = memory + (SHAPE.depth - 1 + layer) * BLOCK * SHAPE.pad
    product = tl.load(place + block[:, None] * SHAPE.pad + n[None, :])
    x, normed, inverse = _layer(product, layer, parameters, n, wide, SHAPE)
    if DROPS and layer < SHAPE.depth - 1:
        gradient = gradient * _factors_of_dropout(ids, n, keys[layer], threshold, scale)
    gradient = gradient * _slope(x, SHAPE.activations[layer])
    if SHAPE.scales[layer] >= 0:
        if owned != 0:
            _add_rows(partials + SHAPE.scales[layer], gradient * normed, n, wide)
            _add_rows(partials + SHAPE.shifts[layer], gradient, n, wide)
        gradient = gradient * tl.load(parameters + SHAPE.scales[layer] + n, wide, 0.0)[None, :]
    if SHAPE.norms[layer]:
        mean = tl.sum(gradient, 1) * (1.0 / SHAPE.widths[layer])
        along = tl.sum(gradient * normed, 1) * (1.0 / SHAPE.widths[layer])
        gradient = (gradient - mean[:, None] - normed * along[:, None]) * inverse[:, None]
        gradient = tl.where(wide[None, :], gradient, 0.0)
    if owned != 0:
        _add_rows(partials + SHAPE.biases[layer], gradient, n, wide)
    return gradient


@triton.jit
def _limbs_of(value):
    """High and low limbs of float64 numbers, int64, and whether they are accepted, as `IntegerSums.add` splits them."""
    accepted = tl.abs(value) < LARGEST_PARTIAL  # False for NaN
    value = tl.where(accepted, value, 0.0)
    hi = (value * HI_SCALE + ROUND) - ROUND
    lo = ((value - hi * (1.0 / HI_SCALE)) * LO_SCALE + ROUND) - ROUND
    return hi.to(tl.int64), lo.to(tl.int64), accepted


@triton.jit
def _give(partials, places, limbs, num_sums, COUNT: tl.constexpr):
    """Split the partials of a chunk into integers and add these to the sums, as `IntegerSums.add` does.

    Args:
        places: The sum that each partial belongs to, int64 [COUNT]; -1: to none.
        limbs: int64 [2 num_sums + 1]: high, low, rejected.
    """
    for first in range(0, COUNT, 1024):
        i = first + tl.arange(0, 1024)
        place = tl.load(places + i, i < COUNT, -1)
        hi, lo, accepted = _limbs_of(tl.load(partials + i, i < COUNT, 0.0).to(tl.float64))
        given = place >= 0
        rejected = tl.sum((given & (accepted == 0)).to(tl.int64), 0)
        if rejected > 0:
            tl.atomic_add(limbs + 2 * num_sums, rejected, sem="relaxed")
        tl.atomic_add(limbs + place, hi, given & (hi != 0), sem="relaxed")
        tl.atomic_add(limbs + num_sums + place, lo, given & (lo != 0), sem="relaxed")


@triton.jit
def _clear(partials, COUNT: tl.constexpr):
    for first in range(0, COUNT, 1024):
        i = first + tl.arange(0, 1024)
        tl.store(partials + i, tl.zeros((1024,), tl.float32), i < COUNT)
    tl.debug_barrier()


@triton.jit
def _hidden_back(
    gradient, layer: tl.constexpr, here, count, parameters, partials, memory, own, owned, SHAPE: tl.constexpr,
    BLOCK: tl.constexpr
):
    """Gradients of the weight of a layer but the first and of what it takes, given that of its product."""
    block, n, c = tl.arange(0, BLOCK), tl.arange(0, SHAPE.padded[layer]), tl.arange(0, SHAPE.padded[layer - 1])
    wide = n < SHAPE.widths[layer]
    tl.store(own + block[:, None] * SHAPE.pad + n[None, :], gradient)
    tl.debug_barrier()
    inputs = memory + (layer - 1) * BLOCK * SHAPE.pad
    if owned != 0:
        _add_outer(
            partials + SHAPE.weights[layer], own, SHAPE.pad, inputs, count * 0, SHAPE.pad, count, n, wide,
            SHAPE.ins[layer], SHAPE.ins[layer], SHAPE.kinds[layer], BLOCK, SHAPE.piece
        )
    before = _back_through(
        _zeros(BLOCK, SHAPE.padded[layer - 1]), own, block, here, SHAPE.pad, parameters + SHAPE.weights[layer], c,
        SHAPE.ins[layer], SHAPE.widths[layer], SHAPE.ins[layer], SHAPE.kinds[layer]
    )
    tl.debug_barrier()
    return before


@triton.jit
def _first_back(
    gradient, at, here, start, count, tables, parameters, partials, own, of_product, of_tables, owned,
    SHAPE: tl.constexpr, GATHERS: tl.constexpr, NEEDED: tl.constexpr, CARRIES: tl.constexpr, BLOCK: tl.constexpr
):
    """Gradients of the first weight, of tables and of products of nodes, given that of the first product."""
    block, n = tl.arange(0, BLOCK), tl.arange(0, SHAPE.padded[0])
    wide = n < SHAPE.widths[0]
    tl.store(own + block[:, None] * SHAPE.pad + n[None, :], gradient)
    tl.debug_barrier()
    if GATHERS:
        tl.store(of_product + at[:, None] * SHAPE.widths[0] + n[None, :], gradient, here[:, None] & wide[None, :])
    for i in tl.static_range(len(SHAPE.tables)):
        if owned != 0:
            _add_outer(
                partials + SHAPE.weights[0] + SHAPE.firsts[i], own, SHAPE.pad, tables[i], start, SHAPE.tables[i],
                count, n, wide, SHAPE.tables[i], SHAPE.ins[0], SHAPE.kinds[0], BLOCK, SHAPE.piece
            )
        if NEEDED[i]:
            for first in range(0, SHAPE.tables[i], SHAPE.piece):
                c = first + tl.arange(0, SHAPE.piece)
                place = at[:, None] * SHAPE.tables[i] + c[None, :]
                mask = here[:, None] & (c < SHAPE.tables[i])[None, :]
                total = _back_through(
                    _zeros(BLOCK, SHAPE.piece), own, block, here, SHAPE.pad,
                    parameters + SHAPE.weights[0] + SHAPE.firsts[i], c, SHAPE.tables[i], SHAPE.widths[0],
                    SHAPE.ins[0], SHAPE.kinds[0]
                )
                if i == CARRIES:
                    total = tl.load(of_tables[i] + place, mask, 0.0).to(tl.float32) + total
                tl.store(of_tables[i] + place, total, mask)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["num_chunks", "key_0", "key_1", "key_2", "key_3", "threshold", "num_sums"])
def rows_backward(
    chunks, num_chunks, tables, parameters, at_nodes, dst, src, ids, key_0, key_1, key_2, key_3, threshold, scale,
    memory, of_out, of_sums, of_product, of_tables, places, limbs, num_sums, SHAPE: tl.constexpr,
    GATHERS: tl.constexpr, DROPS: tl.constexpr, HAS_OUT: tl.constexpr, ENDS: tl.constexpr, NEEDED: tl.constexpr,
    CARRIES: tl.constexpr, BLOCK: tl.constexpr
):
    """Backward through `rows_forward`, which is computed again: gradients of tables, products of nodes and parameters.

    Args:
        chunks: Rows, from and to, and whether their parameters' gradients count here, int32 [num_chunks, 3].
        of_out: Gradient of what comes out, [rows, width], with HAS_OUT.
        of_sums: That of its sums at nodes, [num_local, 2 width], at which ENDS.
        of_product: Takes the gradient of the first layer's product, [rows, width], with GATHERS.
        of_tables: Take those of the tables, of their types, where NEEDED; that of number CARRIES also gets what the
            residual hands on.
        places, limbs, num_sums: Of the sums of the parameters' gradients.
        memory: [programs, SHAPE.memory of backward].
    """
    keys = (key_0, key_1, key_2, key_3)
    memory += tl.program_id(0).to(tl.int64) * (2 * SHAPE.depth * BLOCK * SHAPE.pad + SHAPE.size)
    own = memory + (2 * SHAPE.depth - 1) * BLOCK * SHAPE.pad
    partials = own + BLOCK * SHAPE.pad
    last_n = tl.arange(0, SHAPE.padded[SHAPE.depth - 1])
    last_wide = last_n < SHAPE.widths[SHAPE.depth - 1]
    block = tl.arange(0, BLOCK)
    number = tl.program_id(0)
    while number < num_chunks:
        first, stop = tl.load(chunks + 3 * number), tl.load(chunks + 3 * number + 1)
        owned = tl.load(chunks + 3 * number + 2)
        if owned != 0:
            _clear(partials, SHAPE.size)
        while first < stop:
            at = first.to(tl.int64) + block
            here = at < stop
            of_dst, of_src, of_ids = at, at, at
            if GATHERS or ENDS != AT_NO_END:
                of_dst, of_src = tl.load(dst + at, here, 0), tl.load(src + at, here, 0)
            if DROPS:
                of_ids = tl.load(ids + at, here, 0)
            _through(
                at, here, tables, parameters, at_nodes, of_dst, of_src, of_ids, keys, threshold, scale, memory, SHAPE,
                GATHERS, DROPS, True, BLOCK
            )
            tl.debug_barrier()
            place = at[:, None] * SHAPE.widths[SHAPE.depth - 1] + last_n[None, :]
            mask = here[:, None] & last_wide[None, :]
            gradient = _zeros(BLOCK, SHAPE.padded[SHAPE.depth - 1])
            if HAS_OUT:
                gradient += tl.load(of_out + place, mask, 0.0).to(tl.float32)
            if ENDS != AT_NO_END:
                gradient += _at_ends(
                    of_sums, of_dst, of_src, here, last_n, last_wide, SHAPE.widths[SHAPE.depth - 1], ENDS
                )
            if CARRIES >= 0:
                tl.store(of_tables[CARRIES] + place, gradient, mask)
            for back in tl.static_range(len(SHAPE.widths)):
                gradient = _layer_back(
                    gradient, SHAPE.depth - 1 - back, parameters, partials, of_ids, keys, threshold, scale, memory,
                    owned, SHAPE, DROPS, BLOCK
                )
                if back < len(SHAPE.widths) - 1:
                    gradient = _hidden_back(
                        gradient, SHAPE.depth - 1 - back, here, stop - first, parameters, partials, memory, own,
                        owned, SHAPE, BLOCK
                    )
            _first_back(
                gradient, at, here, first.to(tl.int64), stop - first, tables, parameters, partials, own, of_product,
                of_tables, owned, SHAPE, GATHERS, NEEDED, CARRIES, BLOCK
            )
            first += BLOCK
        if owned != 0:
            _give(partials, places, limbs, num_sums, SHAPE.size)
            tl.debug_barrier()
        number += tl.num_programs(0)


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def node_products(
    nodes, first_row, num_rows, weight, out, AT_DST_COLUMN: tl.constexpr, AT_SRC_COLUMN: tl.constexpr,
    NODES: tl.constexpr, IN: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, KIND: tl.constexpr,
    BLOCK: tl.constexpr
):
    """Products of node states with a first layer's weight for `dst`, then for `src`, [rows, 2 WIDTH].

    Args:
        nodes: States, [num_local, NODES].
        first_row, num_rows: Which of them.
        weight: Of the layer, [WIDTH, IN], which has them from AT_DST_COLUMN and AT_SRC_COLUMN on.
    """
    at = first_row.to(tl.int64) + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here, n = at < first_row + num_rows, tl.arange(0, PADDED)
    wide = n < WIDTH
    end = tl.program_id(1)
    column = tl.where(end == 0, AT_DST_COLUMN, AT_SRC_COLUMN)
    product = _times_weight(_zeros(BLOCK, PADDED), nodes, at, here, NODES, weight + column, n, wide, NODES, IN, KIND)
    place = at[:, None] * (2 * WIDTH) + end * WIDTH + n[None, :]
    tl.store(out + place, product, here[:, None] & wide[None, :])


@triton.jit(do_not_specialize=["num_chunks", "num_sums"])
def node_products_back(
    chunks, num_chunks, nodes, of_products, weight, memory, added, of_nodes, places, limbs, num_sums,
    AT_DST_COLUMN: tl.constexpr, AT_SRC_COLUMN: tl.constexpr, NODES: tl.constexpr, IN: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PIECE: tl.constexpr, ADDS: tl.constexpr, KIND: tl.constexpr,
    BLOCK: tl.constexpr
):
    """Backward through `node_products`: gradients of node states [rows, NODES], with those `added`, and of the weight.

    Args:
        chunks: As of `rows_backward`.
        of_products: Gradient of the products, [rows, 2 WIDTH].
        memory: [programs, WIDTH, IN].
        places: Of the weight.
    """
    partials = memory + tl.program_id(0).to(tl.int64) * (WIDTH * IN)
    n, block = tl.arange(0, PADDED), tl.arange(0, BLOCK)
    wide = n < WIDTH
    number = tl.program_id(0)
    while number < num_chunks:
        first, stop = tl.load(chunks + 3 * number), tl.load(chunks + 3 * number + 1)
        _clear(partials, WIDTH * IN)
        while first < stop:
            at = first.to(tl.int64) + block
            here = at < stop
            start = first.to(tl.int64) * (2 * WIDTH)
            _add_outer(
                partials + AT_DST_COLUMN, of_products + start, 2 * WIDTH, nodes, first.to(tl.int64), NODES,
                stop - first, n, wide, NODES, IN, KIND, BLOCK, PIECE
            )
            _add_outer(
                partials + AT_SRC_COLUMN, of_products + start + WIDTH, 2 * WIDTH, nodes, first.to(tl.int64), NODES,
                stop - first, n, wide, NODES, IN, KIND, BLOCK, PIECE
            )
            for column in range(0, NODES, PIECE):
                c = column + tl.arange(0, PIECE)
                place, mask = at[:, None] * NODES + c[None, :], here[:, None] & (c < NODES)[None, :]
                total = _zeros(BLOCK, PIECE)
                if ADDS:
                    total += tl.load(added + place, mask, 0.0)
                total = _back_through(
                    total, of_products, at, here, 2 * WIDTH, weight + AT_DST_COLUMN, c, NODES, WIDTH, IN, KIND
                )
                total = _back_through(
                    total, of_products + WIDTH, at, here, 2 * WIDTH, weight + AT_SRC_COLUMN, c, NODES, WIDTH, IN,
                    KIND
                )
                tl.store(of_nodes + place, total, mask)
            tl.debug_barrier()
            first += BLOCK
        _give(partials, places, limbs, num_sums, WIDTH * IN)
        tl.debug_barrier()
        number += tl.num_programs(0)


@triton.jit
def _sum_at_nodes(
    nodes, here, rows, edges, first, num_edges, num_nodes, other, gates, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    PADDED: tl.constexpr, NODES: tl.constexpr, OF_NODES: tl.constexpr, GATED: tl.constexpr
):
    begin = tl.load(first + nodes, here, 0)
    stop = tl.load(first + nodes + 1, nodes + 1 < num_nodes, num_edges)
    stop = tl.where(here, stop, begin)
    n = tl.arange(0, PADDED)
    wide = n < WIDTH
    total = _zeros(NODES, PADDED)
    longest = tl.max(stop - begin, 0)
    i = longest * 0
    while i < longest:
        there = begin + i < stop
        edge = tl.load(edges + begin + i, there, 0)
        row = edge
        if OF_NODES:
            row = tl.load(other + edge, there, 0)
        value = tl.load(rows + row[:, None] * STRIDE + n[None, :], there[:, None] & wide[None, :], 0.0).to(tl.float32)
        if GATED:
            value = _sigmoid(tl.load(gates + edge, there, 0.0))[:, None] * value
        total = tl.where(there[:, None], total + value, total)
        i += 1
    return total


@triton.jit(do_not_specialize=["num_nodes", "num_at_dst", "num_at_src"])
def sums_at_ends(
    to_dst, to_src, edges_at_dst, first_at_dst, num_at_dst, edges_at_src, first_at_src, num_at_src, dst, src, gates,
    scales, out, num_nodes, WIDTH: tl.constexpr, STRIDE: tl.constexpr, PADDED: tl.constexpr, NODES: tl.constexpr,
    OF_NODES: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr
):
    """Sums of rows at the `dst`, then at the `src` of their edges, in stored order, [num_nodes, 2 WIDTH].

    Args:
        to_dst, to_src: What is summed at either end: rows of edges; with OF_NODES rows of what an edge begins at, and
            ends at.
        edges_at_dst, first_at_dst, num_at_dst: As `EdgesAtNodes`, and how many edges; the same at `src`.
        gates: With GATED, scores of edges, whose sigmoids weigh rows.
        scales: With SCALED, factors at either end, [num_nodes, 2].
    """
    nodes = tl.program_id(0) * NODES + tl.arange(0, NODES)
    here = nodes < num_nodes
    n, end = tl.arange(0, PADDED), tl.program_id(1)
    if end == 0:
        total = _sum_at_nodes(
            nodes, here, to_dst, edges_at_dst, first_at_dst, num_at_dst, num_nodes, src, gates, WIDTH, STRIDE, PADDED,
            NODES, OF_NODES, GATED
        )
    else:
        total = _sum_at_nodes(
            nodes, here, to_src, edges_at_src, first_at_src, num_at_src, num_nodes, dst, gates, WIDTH, STRIDE, PADDED,
            NODES, OF_NODES, GATED
        )
    if SCALED:
        total = total * tl.load(scales + 2 * nodes + end, here, 0.0)[:, None]
    place = nodes.to(tl.int64)[:, None] * (2 * WIDTH) + end * WIDTH + n[None, :]
    tl.store(out + place, total, here[:, None] & (n < WIDTH)[None, :])


@triton.jit
def gates_back(
    states, of_sums, gates, given, dst, src, num_edges, out, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    HAS_GIVEN: tl.constexpr, BLOCK: tl.constexpr
):
    """Gradient of the scores of edges that are gates of node states, [num_edges]: see `sums_at_ends`.

    Args:
        states: Of nodes, [num_local, WIDTH].
        of_sums: Gradient of the sums at `dst`, then at `src`, [num_local, 2 WIDTH].
        gates: The scores.
        given: With HAS_GIVEN, gradient of the scores from elsewhere.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here, n = at < num_edges, tl.arange(0, PADDED)
    wide = here[:, None] & (n < WIDTH)[None, :]
    of_dst, of_src = tl.load(dst + at, here, 0), tl.load(src + at, here, 0)
    from_src = tl.load(states + of_src[:, None] * WIDTH + n[None, :], wide, 0.0)
    from_dst = tl.load(states + of_dst[:, None] * WIDTH + n[None, :], wide, 0.0)
    at_dst = tl.load(of_sums + of_dst[:, None] * (2 * WIDTH) + n[None, :], wide, 0.0)
    at_src = tl.load(of_sums + of_src[:, None] * (2 * WIDTH) + WIDTH + n[None, :], wide, 0.0)
    of_gate = tl.sum(from_src * at_dst, 1) + tl.sum(from_dst * at_src, 1)
    gate = _sigmoid(tl.load(gates + at, here, 0.0))
    gradient = of_gate * gate * (1.0 - gate)
    if HAS_GIVEN:
        gradient += tl.load(given + at, here, 0.0)
    tl.store(out + at, gradient, here)


@triton.jit(do_not_specialize=["num_chunks", "divisor_bits"])
def edge_losses(chunks, num_chunks, logits, weights, label, divisor_bits, of_logits, limbs, CHUNK: tl.constexpr):
    """Weighted cross-entropy of edges, its sum over each owned chunk as integers, and its gradient: `training.loss`.

    Args:
        chunks: As of `rows_backward`, of at most CHUNK rows.
        logits: [num_edges]; their gradient goes to `of_logits`.
        weights: Of the edges, of any type; one below 0 teaches the edge as false, with its size.
        label: [num_edges].
        divisor_bits: The bits of what all is divided by, a float64: numbers that kernels are given are float32.
        limbs: Of one sum, int64 [3].
    """
    number = tl.program_id(0)
    first, stop = tl.load(chunks + 3 * number), tl.load(chunks + 3 * number + 1)
    at = first.to(tl.int64) + tl.arange(0, CHUNK)
    here = at < stop
    divisor = divisor_bits.to(tl.int64).to(tl.float64, bitcast=True)
    weight = tl.load(weights + at, here, 0).to(tl.float64)
    size, logit = tl.abs(weight), tl.load(logits + at, here, 0.0).to(tl.float64)
    taught = (tl.load(label + at, here, 0) > 0) & (weight >= 0)
    # The loss is log(1 + exp(u)), its slope 1 / (1 + exp(-u)): exp of what is not positive never overflows.
    u = tl.where(taught, -logit, logit)
    small = tl.exp(-tl.abs(u))
    slope = tl.where(u >= 0, 1.0, small) / (1.0 + small)
    gradient = tl.where(taught, -slope, slope) * size / divisor
    tl.store(of_logits + at, gradient, here)
    if tl.load(chunks + 3 * number + 2) != 0:
        # 0 * u: an infinite logit, also on the right side, is an error and not a loss of 0.
        terms = (tl.where(u > 0, u, 0.0) + tl.log(1.0 + small) + 0.0 * u) * size
        hi, lo, accepted = _limbs_of(tl.sum(tl.where(here, terms, 0.0), 0) / divisor)
        tl.atomic_add(limbs, hi, sem="relaxed")
        tl.atomic_add(limbs + 1, lo, sem="relaxed")
        tl.atomic_add(limbs + 2, tl.where(accepted, 0, 1).to(tl.int64), sem="relaxed")
