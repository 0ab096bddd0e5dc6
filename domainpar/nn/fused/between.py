"""Kernels between nodes and edges: products of node states, sums at nodes, gates, and the loss of edges."""

from __future__ import annotations

import triton
import triton.language as tl

from domainpar.nn.fused.arithmetic import (
    AT_BOTH_ENDS,
    add_outer,
    back_through,
    clear,
    gather,
    give,
    limbs_of,
    sigmoid,
    times_weight,
    zeros,
)

# Kernels take many arguments, and a line for each would double this file.
# fmt: off


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
    product = times_weight(zeros(BLOCK, PADDED), nodes, at, here, NODES, weight + column, n, wide, NODES, IN, KIND)
    place = at[:, None] * (2 * WIDTH) + end * WIDTH + n[None, :]
    tl.store(out + place, product, here[:, None] & wide[None, :])


@triton.jit(do_not_specialize=["num_chunks", "num_sums"])
def node_products_back(
    chunks, num_chunks, nodes, grad_products, weight, memory, added, grad_nodes, places, limbs, num_sums,
    AT_DST_COLUMN: tl.constexpr, AT_SRC_COLUMN: tl.constexpr, NODES: tl.constexpr, IN: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PIECE: tl.constexpr, ADDS: tl.constexpr, KIND: tl.constexpr,
    BLOCK: tl.constexpr
):
    """Backward through `node_products`: gradients of node states [rows, NODES], with those `added`, and of the weight.

    Args:
        chunks: As of `rows_backward`.
        grad_products: Gradient of the products, [rows, 2 WIDTH].
        memory: [programs, WIDTH, IN].
        places: Of the weight.
    """
    partials = memory + tl.program_id(0).to(tl.int64) * (WIDTH * IN)
    n, block = tl.arange(0, PADDED), tl.arange(0, BLOCK)
    wide = n < WIDTH
    number = tl.program_id(0)
    while number < num_chunks:
        first, stop = tl.load(chunks + 3 * number), tl.load(chunks + 3 * number + 1)
        clear(partials, WIDTH * IN)
        while first < stop:
            at = first.to(tl.int64) + block
            here = at < stop
            start = first.to(tl.int64) * (2 * WIDTH)
            add_outer(
                partials + AT_DST_COLUMN, grad_products + start, 2 * WIDTH, nodes, first.to(tl.int64), NODES,
                stop - first, n, wide, NODES, IN, KIND, BLOCK, PIECE
            )
            add_outer(
                partials + AT_SRC_COLUMN, grad_products + start + WIDTH, 2 * WIDTH, nodes, first.to(tl.int64), NODES,
                stop - first, n, wide, NODES, IN, KIND, BLOCK, PIECE
            )
            for column in range(0, NODES, PIECE):
                c = column + tl.arange(0, PIECE)
                place, mask = at[:, None] * NODES + c[None, :], here[:, None] & (c < NODES)[None, :]
                total = zeros(BLOCK, PIECE)
                if ADDS:
                    total += tl.load(added + place, mask, 0.0)
                total = back_through(
                    total, grad_products, at, here, 2 * WIDTH, weight + AT_DST_COLUMN, c, NODES, WIDTH, IN, KIND
                )
                total = back_through(
                    total, grad_products + WIDTH, at, here, 2 * WIDTH, weight + AT_SRC_COLUMN, c, NODES, WIDTH, IN,
                    KIND
                )
                tl.store(grad_nodes + place, total, mask)
            tl.debug_barrier()
            first += BLOCK
        give(partials, places, limbs, num_sums, WIDTH * IN)
        tl.debug_barrier()
        number += tl.num_programs(0)


@triton.jit
def _sum_at_nodes(
    nodes, here, rows, edges, first, num_edges, num_nodes, other, gates, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    PADDED: tl.constexpr, NODES: tl.constexpr, GRAD_NODES: tl.constexpr, GATED: tl.constexpr
):
    begin = tl.load(first + nodes, here, 0)
    stop = tl.load(first + nodes + 1, nodes + 1 < num_nodes, num_edges)
    stop = tl.where(here, stop, begin)
    n = tl.arange(0, PADDED)
    wide = n < WIDTH
    total = zeros(NODES, PADDED)
    longest = tl.max(stop - begin, 0)
    i = longest * 0
    while i < longest:
        there = begin + i < stop
        edge = tl.load(edges + begin + i, there, 0)
        row = edge
        if GRAD_NODES:
            row = tl.load(other + edge, there, 0)
        value = tl.load(rows + row[:, None] * STRIDE + n[None, :], there[:, None] & wide[None, :], 0.0).to(tl.float32)
        if GATED:
            value = sigmoid(tl.load(gates + edge, there, 0.0))[:, None] * value
        total = tl.where(there[:, None], total + value, total)
        i += 1
    return total


@triton.jit(do_not_specialize=["num_nodes", "num_at_dst", "num_at_src"])
def sums_at_ends(
    to_dst, to_src, edges_at_dst, first_at_dst, num_at_dst, edges_at_src, first_at_src, num_at_src, dst, src, gates,
    scales, out, num_nodes, WIDTH: tl.constexpr, STRIDE: tl.constexpr, PADDED: tl.constexpr, NODES: tl.constexpr,
    GRAD_NODES: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr
):
    """Sums of rows at the `dst`, then at the `src` of their edges, in stored order, [num_nodes, 2 WIDTH].

    Args:
        to_dst, to_src: What is summed at either end: rows of edges; with GRAD_NODES rows of what an edge begins at, and
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
            NODES, GRAD_NODES, GATED
        )
    else:
        total = _sum_at_nodes(
            nodes, here, to_src, edges_at_src, first_at_src, num_at_src, num_nodes, dst, gates, WIDTH, STRIDE, PADDED,
            NODES, GRAD_NODES, GATED
        )
    if SCALED:
        total = total * tl.load(scales + 2 * nodes + end, here, 0.0)[:, None]
    place = nodes.to(tl.int64)[:, None] * (2 * WIDTH) + end * WIDTH + n[None, :]
    tl.store(out + place, total, here[:, None] & (n < WIDTH)[None, :])


@triton.jit(do_not_specialize=["num_edges"])
def gates_of_edges_back(
    states, grad_sums, gates, given, dst, src, num_edges, grad_states, out, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    HAS_GIVEN: tl.constexpr, BLOCK: tl.constexpr
):
    """Gradients of what gates weigh where that is states of edges: of the states, [num_edges, WIDTH], and the scores.

    Args:
        states: Of edges, [num_edges, WIDTH]; the gradient of what the sums take of them goes to `grad_states`.
        grad_sums, gates, given: As of `gates_back`.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here, n = at < num_edges, tl.arange(0, PADDED)
    wide = n < WIDTH
    of_dst, of_src = tl.load(dst + at, here, 0), tl.load(src + at, here, 0)
    at_ends = gather(grad_sums, of_dst, of_src, here, n, wide, WIDTH, AT_BOTH_ENDS)
    place, mask = at[:, None] * WIDTH + n[None, :], here[:, None] & wide[None, :]
    gate = sigmoid(tl.load(gates + at, here, 0.0))
    tl.store(grad_states + place, gate[:, None] * at_ends, mask)
    grad_gate = tl.sum(tl.load(states + place, mask, 0.0).to(tl.float32) * at_ends, 1)
    gradient = grad_gate * gate * (1.0 - gate)
    if HAS_GIVEN:
        gradient += tl.load(given + at, here, 0.0)
    tl.store(out + at, gradient, here)


@triton.jit(do_not_specialize=["num_edges"])
def gates_back(
    states, grad_sums, gates, given, dst, src, num_edges, out, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    HAS_GIVEN: tl.constexpr, BLOCK: tl.constexpr
):
    """Gradient of the scores of edges that are gates of node states, [num_edges]: see `sums_at_ends`.

    Args:
        states: Of nodes, [num_local, WIDTH].
        grad_sums: Gradient of the sums at `dst`, then at `src`, [num_local, 2 WIDTH].
        gates: The scores.
        given: With HAS_GIVEN, gradient of the scores from elsewhere.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here, n = at < num_edges, tl.arange(0, PADDED)
    wide = here[:, None] & (n < WIDTH)[None, :]
    of_dst, of_src = tl.load(dst + at, here, 0), tl.load(src + at, here, 0)
    from_src = tl.load(states + of_src[:, None] * WIDTH + n[None, :], wide, 0.0)
    from_dst = tl.load(states + of_dst[:, None] * WIDTH + n[None, :], wide, 0.0)
    at_dst = tl.load(grad_sums + of_dst[:, None] * (2 * WIDTH) + n[None, :], wide, 0.0)
    at_src = tl.load(grad_sums + of_src[:, None] * (2 * WIDTH) + WIDTH + n[None, :], wide, 0.0)
    grad_gate = tl.sum(from_src * at_dst, 1) + tl.sum(from_dst * at_src, 1)
    gate = sigmoid(tl.load(gates + at, here, 0.0))
    gradient = grad_gate * gate * (1.0 - gate)
    if HAS_GIVEN:
        gradient += tl.load(given + at, here, 0.0)
    tl.store(out + at, gradient, here)


@triton.jit(
    do_not_specialize=["num_chunks", "divisor_bits"],
    do_not_specialize_on_alignment=["logits", "weights", "label", "grad_logits"],
)
def edge_losses(chunks, num_chunks, logits, weights, label, divisor_bits, grad_logits, limbs, CHUNK: tl.constexpr):
    """Weighted cross-entropy of edges, its sum over each owned chunk as integers, and its gradient: `training.loss`.

    Args:
        chunks: As of `rows_backward`, of at most CHUNK rows.
        logits: [num_edges]; their gradient goes to `grad_logits`.
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
    positive = (tl.load(label + at, here, 0) > 0) & (weight >= 0)
    # The loss is log(1 + exp(u)), its slope 1 / (1 + exp(-u)): exp of what is not positive never overflows.
    u = tl.where(positive, -logit, logit)
    small = tl.exp(-tl.abs(u))
    slope = tl.where(u >= 0, 1.0, small) / (1.0 + small)
    gradient = tl.where(positive, -slope, slope) * size / divisor
    tl.store(grad_logits + at, gradient, here)
    if tl.load(chunks + 3 * number + 2) != 0:
        # 0 * u: an infinite logit, also on the right side, is an error and not a loss of 0.
        terms = (tl.where(u > 0, u, 0.0) + tl.log(1.0 + small) + 0.0 * u) * size
        hi, lo, accepted = limbs_of(tl.sum(tl.where(here, terms, 0.0), 0) / divisor)
        tl.atomic_add(limbs, hi, sem="relaxed")
        tl.atomic_add(limbs + 1, lo, sem="relaxed")
        tl.atomic_add(limbs + 2, tl.where(accepted, 0, 1).to(tl.int64), sem="relaxed")
