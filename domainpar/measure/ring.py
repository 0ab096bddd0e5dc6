"""The graph of self-tests: round layers, whose nodes are joined to their neighbours on the next layer."""

from __future__ import annotations

import numpy as np

from domainpar.plan import IntArray

NUM_LAYERS = 10
REACH = 3  # neighbours of a node on the next layer, to either side


def ring_edges(nodes_of_layer: int) -> IntArray:
    """`src` and `dst` of each edge, int64 [2, E]; a self-loop and a repeated edge are the last.

    Args:
        nodes_of_layer: Nodes of each layer: node i of layer k has the id `k * nodes_of_layer + i`.
    """
    shifts = np.tile(np.arange(-REACH, REACH + 1), (NUM_LAYERS - 1) * nodes_of_layer)
    src = np.repeat(np.arange((NUM_LAYERS - 1) * nodes_of_layer), 2 * REACH + 1)
    layer, place = np.divmod(src, nodes_of_layer)
    dst = (layer + 1) * nodes_of_layer + (place + shifts) % nodes_of_layer
    return np.stack([np.append(src, [0, src[0]]), np.append(dst, [0, dst[0]])])


def parts_of_ring(nodes_of_layer: int, num_parts: int) -> IntArray:
    """Part of each node, [N]: wedges through all layers, of equal numbers of nodes."""
    return np.tile(np.arange(nodes_of_layer) * num_parts // nodes_of_layer, NUM_LAYERS)
