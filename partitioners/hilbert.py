"""A partitioner along Hilbert's curve: for graphs whose nodes have places in space and change from step to step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from partitioners.ranges import split_along
from partitioners.sectors import position_of
from partitioners.topology import FloatArray, IntArray, Topology

BITS = 21  # of each coordinate: 63 together, as many as an int64 holds


@dataclass(frozen=True)
class Hilbert:
    """Ranges of equal cost along Hilbert's curve through the box of all nodes: compact blocks, of any shape of graph.

    A node that moves a little stays where it is on the curve or near it, unless it crosses a border. So a graph that
    changes slightly keeps its blocks but for some nodes at borders. No two machines differ: the curve takes integers,
    and coordinates become such by one subtraction and one product.
    """

    def __call__(self, topology: Topology, num_blocks: int) -> IntArray:
        """Return the block of each node, int32 [N]; ValueError if the graph has no positions."""
        return split_along(along_curve(position_of(topology, "hilbert")), topology.costs(), num_blocks)


def along_curve(position: FloatArray) -> IntArray:
    """Return the place of each node on Hilbert's curve through the smallest cube around all, int64 [N].

    The transposed form of J. Skilling, "Programming the Hilbert curve" (2004), for all nodes at once.
    """
    if not len(position):
        return np.zeros(0, np.int64)
    low = position.min(axis=0).astype(np.float64)
    extent = float((position.max(axis=0) - low).max()) or 1.0
    cells = ((position - low) * ((2**BITS - 1) / extent)).astype(np.int64)
    axes = list(cells.T.copy())
    for bit in range(BITS - 1, 0, -1):
        below = (1 << bit) - 1
        for axis in axes:
            here = (axis >> bit & 1).astype(bool)
            swapped = np.where(here, 0, (axes[0] ^ axis) & below)
            axes[0] ^= np.where(here, below, swapped)
            axis ^= swapped
    for before, axis in itertools.pairwise(axes):
        axis ^= before
    turned = np.zeros(len(cells), np.int64)
    for bit in range(BITS - 1, 0, -1):
        turned ^= np.where(axes[-1] >> bit & 1, (1 << bit) - 1, 0)
    place = np.zeros(len(cells), np.int64)
    for bit in range(BITS - 1, -1, -1):
        for axis in axes:
            place = place << 1 | (axis ^ turned) >> bit & 1
    return place
