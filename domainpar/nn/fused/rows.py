"""Kernels of MLPs on rows of edges or nodes: all layers forward, and back with all gradients, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from domainpar.nn.fused.arithmetic import (
    AT_BOTH_ENDS,
    AT_NO_END,
    activated,
    add_outer,
    add_rows,
    back_through,
    clear,
    factors_of_dropout,
    gather,
    give,
    normed_rows,
    slope_of,
    times_weight,
    zeros,
)

# Kernels take many arguments, and a line for each would double this file.
# fmt: off


@triton.jit
def _first_product(
    at, here, tables, parameters, at_nodes, dst, src, n, wide, SHAPE: tl.constexpr, GATHERS: tl.constexpr
):
    """The first layer's product: of row tables, 16 columns at a time, and of node states, which is made already."""
    product = zeros(here.shape[0], SHAPE.padded[0])
    for i in tl.static_range(len(SHAPE.tables)):
        product = times_weight(
            product, tables[i], at, here, SHAPE.tables[i], parameters + SHAPE.weights[0] + SHAPE.firsts[i], n, wide,
            SHAPE.tables[i], SHAPE.ins[0], SHAPE.kinds[0]
        )
    if GATHERS:
        product += gather(at_nodes, dst, src, here, n, wide, SHAPE.widths[0], AT_BOTH_ENDS)
    return product


@triton.jit
def _layer(product, layer: tl.constexpr, parameters, n, wide, SHAPE: tl.constexpr):
    """What a layer's activation takes: its product, normed, scaled and shifted; what the norm gave; 1 / deviation."""
    normed, inverse = product, tl.zeros((product.shape[0],), tl.float32)
    if SHAPE.norms[layer]:
        normed, inverse = normed_rows(product, wide, SHAPE.widths[layer], SHAPE.eps[layer])
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
    """An MLP on a block of rows, but for its residual.

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
            product = times_weight(
                zeros(BLOCK, SHAPE.padded[layer]), activations, block, here, SHAPE.pad,
                parameters + SHAPE.weights[layer], n, wide, SHAPE.ins[layer], SHAPE.ins[layer], SHAPE.kinds[layer]
            )
            if not KEEPS:
                tl.debug_barrier()  # all have read: the next layer writes there
        product += tl.load(parameters + SHAPE.biases[layer] + n, wide, 0.0)[None, :]
        if KEEPS:
            place = memory + (SHAPE.depth - 1 + layer) * BLOCK * SHAPE.pad
            tl.store(place + block[:, None] * SHAPE.pad + n[None, :], product)
        x, _, _ = _layer(product, layer, parameters, n, wide, SHAPE)
        x = activated(x, SHAPE.activations[layer])
        if layer < SHAPE.depth - 1:
            if DROPS:
                x = x * factors_of_dropout(ids, n, keys[layer], threshold, scale)
            activations = memory + (layer * BLOCK * SHAPE.pad if KEEPS else 0)
            tl.store(activations + block[:, None] * SHAPE.pad + n[None, :], x)
            tl.debug_barrier()
    return x


@triton.jit(do_not_specialize=["num_blocks", "key_0", "key_1", "key_2", "key_3", "threshold"])
def rows_forward(
    blocks, num_blocks, tables, parameters, at_nodes, dst, src, ids, key_0, key_1, key_2, key_3, threshold, scale,
    memory, out, SHAPE: tl.constexpr, GATHERS: tl.constexpr, DROPS: tl.constexpr, BLOCK: tl.constexpr
):
    """An MLP on rows: `out = mlp(tables and node states) [+ a table]`.

    Args:
        blocks: Rows, from and to, of each block, int32 [num_blocks, 2].
        tables: Row tables that come in, float32 or bfloat16, their widths in SHAPE.
        parameters: All of the MLP, float32, as SHAPE says.
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
        gradient = gradient * factors_of_dropout(ids, n, keys[layer], threshold, scale)
    gradient = gradient * slope_of(x, SHAPE.activations[layer])
    if SHAPE.scales[layer] >= 0:
        if owned != 0:
            add_rows(partials + SHAPE.scales[layer], gradient * normed, n, wide)
            add_rows(partials + SHAPE.shifts[layer], gradient, n, wide)
        gradient = gradient * tl.load(parameters + SHAPE.scales[layer] + n, wide, 0.0)[None, :]
    if SHAPE.norms[layer]:
        mean = tl.sum(gradient, 1) * (1.0 / SHAPE.widths[layer])
        along = tl.sum(gradient * normed, 1) * (1.0 / SHAPE.widths[layer])
        gradient = (gradient - mean[:, None] - normed * along[:, None]) * inverse[:, None]
        gradient = tl.where(wide[None, :], gradient, 0.0)
    if owned != 0:
        add_rows(partials + SHAPE.biases[layer], gradient, n, wide)
    return gradient


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
        add_outer(
            partials + SHAPE.weights[layer], own, SHAPE.pad, inputs, count * 0, SHAPE.pad, count, n, wide,
            SHAPE.ins[layer], SHAPE.ins[layer], SHAPE.kinds[layer], BLOCK, SHAPE.piece
        )
    before = back_through(
        zeros(BLOCK, SHAPE.padded[layer - 1]), own, block, here, SHAPE.pad, parameters + SHAPE.weights[layer], c,
        SHAPE.ins[layer], SHAPE.widths[layer], SHAPE.ins[layer], SHAPE.kinds[layer]
    )
    tl.debug_barrier()
    return before


@triton.jit
def _first_back(
    gradient, at, here, start, count, tables, parameters, partials, own, grad_product, grad_tables, owned,
    SHAPE: tl.constexpr, GATHERS: tl.constexpr, NEEDED: tl.constexpr, CARRIES: tl.constexpr, BLOCK: tl.constexpr
):
    """Gradients of the first weight, of tables and of products of nodes, given that of the first product."""
    block, n = tl.arange(0, BLOCK), tl.arange(0, SHAPE.padded[0])
    wide = n < SHAPE.widths[0]
    tl.store(own + block[:, None] * SHAPE.pad + n[None, :], gradient)
    tl.debug_barrier()
    if GATHERS:
        tl.store(grad_product + at[:, None] * SHAPE.widths[0] + n[None, :], gradient, here[:, None] & wide[None, :])
    for i in tl.static_range(len(SHAPE.tables)):
        if owned != 0:
            add_outer(
                partials + SHAPE.weights[0] + SHAPE.firsts[i], own, SHAPE.pad, tables[i], start, SHAPE.tables[i],
                count, n, wide, SHAPE.tables[i], SHAPE.ins[0], SHAPE.kinds[0], BLOCK, SHAPE.piece
            )
        if NEEDED[i]:
            for first in range(0, SHAPE.tables[i], SHAPE.piece):
                c = first + tl.arange(0, SHAPE.piece)
                place = at[:, None] * SHAPE.tables[i] + c[None, :]
                mask = here[:, None] & (c < SHAPE.tables[i])[None, :]
                total = back_through(
                    zeros(BLOCK, SHAPE.piece), own, block, here, SHAPE.pad,
                    parameters + SHAPE.weights[0] + SHAPE.firsts[i], c, SHAPE.tables[i], SHAPE.widths[0],
                    SHAPE.ins[0], SHAPE.kinds[0]
                )
                if i == CARRIES:
                    total = tl.load(grad_tables[i] + place, mask, 0.0).to(tl.float32) + total
                tl.store(grad_tables[i] + place, total, mask)
    tl.debug_barrier()


@triton.jit
def _given(
    at, here, dst, src, grad_out, grad_sums, grad_tables, SHAPE: tl.constexpr, HAS_OUT: tl.constexpr,
    ENDS: tl.constexpr, CARRIES: tl.constexpr, BLOCK: tl.constexpr
):
    """Gradient of what comes out, of all that it is used for; a residual hands it on to a table as it is."""
    n = tl.arange(0, SHAPE.padded[SHAPE.depth - 1])
    wide = n < SHAPE.widths[SHAPE.depth - 1]
    place, mask = at[:, None] * SHAPE.widths[SHAPE.depth - 1] + n[None, :], here[:, None] & wide[None, :]
    gradient = zeros(BLOCK, SHAPE.padded[SHAPE.depth - 1])
    if HAS_OUT:
        gradient += tl.load(grad_out + place, mask, 0.0).to(tl.float32)
    if ENDS != AT_NO_END:
        gradient += gather(grad_sums, dst, src, here, n, wide, SHAPE.widths[SHAPE.depth - 1], ENDS)
    if CARRIES >= 0:
        tl.store(grad_tables[CARRIES] + place, gradient, mask)
    return gradient


@triton.jit(do_not_specialize=["num_chunks", "key_0", "key_1", "key_2", "key_3", "threshold", "num_sums"])
def rows_backward(
    chunks, num_chunks, tables, parameters, at_nodes, dst, src, ids, key_0, key_1, key_2, key_3, threshold, scale,
    memory, grad_out, grad_sums, grad_product, grad_tables, places, limbs, num_sums, SHAPE: tl.constexpr,
    GATHERS: tl.constexpr, DROPS: tl.constexpr, HAS_OUT: tl.constexpr, ENDS: tl.constexpr, NEEDED: tl.constexpr,
    CARRIES: tl.constexpr, BLOCK: tl.constexpr
):
    """Backward through `rows_forward`, which is computed again: gradients of tables, products of nodes and parameters.

    Args:
        chunks: Rows, from and to, and whether their parameters' gradients count here, int32 [num_chunks, 3].
        grad_out: Gradient of what comes out, [rows, width], with HAS_OUT.
        grad_sums: That of its sums at nodes, [num_local, 2 width], at which ENDS.
        grad_product: Takes the gradient of the first layer's product, [rows, width], with GATHERS.
        grad_tables: Take those of the tables, of their types, where NEEDED; that of number CARRIES also gets what the
            residual hands on.
        places, limbs, num_sums: Of the sums of the parameters' gradients.
        memory: [programs, SHAPE.memory of backward].
    """
    keys = (key_0, key_1, key_2, key_3)
    memory += tl.program_id(0).to(tl.int64) * (2 * SHAPE.depth * BLOCK * SHAPE.pad + SHAPE.size)
    own = memory + (2 * SHAPE.depth - 1) * BLOCK * SHAPE.pad
    partials = own + BLOCK * SHAPE.pad
    block = tl.arange(0, BLOCK)
    number = tl.program_id(0)
    while number < num_chunks:
        first, stop = tl.load(chunks + 3 * number), tl.load(chunks + 3 * number + 1)
        owned = tl.load(chunks + 3 * number + 2)
        if owned != 0:
            clear(partials, SHAPE.size)
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
            gradient = _given(
                at, here, of_dst, of_src, grad_out, grad_sums, grad_tables, SHAPE, HAS_OUT, ENDS, CARRIES, BLOCK
            )
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
                gradient, at, here, first.to(tl.int64), stop - first, tables, parameters, partials, own, grad_product,
                grad_tables, owned, SHAPE, GATHERS, NEEDED, CARRIES, BLOCK
            )
            first += BLOCK
        if owned != 0:
            give(partials, places, limbs, num_sums, SHAPE.size)
            tl.debug_barrier()
        number += tl.num_programs(0)
