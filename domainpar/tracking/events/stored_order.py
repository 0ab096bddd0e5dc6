"""The stored order of an event: tiles as contiguous ranges of node ids, edges by (dst, src, original position).

Plain arrays in, plain arrays out: nothing here knows about files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from domainpar.tracking.events.graph import EventGraph
from partitioners import Topology, get_partitioner
from partitioners.topology import IntArray


@dataclass(frozen=True, eq=False)
class StoredOrder:
    """New numbers of the nodes and edges of an event, and the tiles that follow. Ids are stored ids.

    Attributes:
        original_row: Row that each stored node had in the user's order, int64 [N].
        original_position: Column that each stored edge had in the user's `edge_index`, int64 [E].
        src: Source of each edge, int64 [E].
        dst: Destination of each edge, int64 [E], ascending; equal ones ascend in `src`.
        node_ptr: Tile t holds the nodes [node_ptr[t], node_ptr[t + 1]), int64 [K + 1].
        edge_ptr: The edges that end in tile t are [edge_ptr[t], edge_ptr[t + 1]), int64 [K + 1].
        src_tile: Tile in which edges start, for each pair of unequal tiles that edges join, int64 [M].
        dst_tile: Tile in which they end, int64 [M]. Pairs ascend in (src_tile, dst_tile).
        joining: Number of edges of each pair, int64 [M].
        joining_edges: Ids of these edges, pair after pair and ascending in each, int64 [sum of joining].
    """

    original_row: IntArray
    original_position: IntArray
    src: IntArray
    dst: IntArray
    node_ptr: IntArray
    edge_ptr: IntArray
    src_tile: IntArray
    dst_tile: IntArray
    joining: IntArray
    joining_edges: IntArray


def stored_order(edge_index: IntArray, assignment: IntArray, num_tiles: int) -> StoredOrder:
    """Renumber nodes so that a tile is a range of ids, and order edges by (dst, src, original position).

    Inside a tile nodes keep their original order.

    Args:
        edge_index: `src` and `dst` row of each edge, int64 [2, E], each in [0, N).
        assignment: Tile of each node, [N], in [0, num_tiles). A tile may be empty.
        num_tiles: K.
    """
    num_nodes = len(assignment)
    original_row = np.argsort(assignment, kind="stable").astype(np.int64)
    node_id = np.empty(num_nodes, np.int64)
    node_id[original_row] = np.arange(num_nodes)
    node_ptr = _offsets(np.bincount(assignment, minlength=num_tiles))

    # One number for (dst, src); a stable sort leaves equal ones in the original order.
    key = node_id[edge_index[1]] * num_nodes + node_id[edge_index[0]]
    original_position = np.argsort(key, kind="stable").astype(np.int64)
    src, dst = node_id[edge_index][:, original_position]
    edge_ptr = _offsets(np.bincount(dst, minlength=num_nodes))[node_ptr]
    src_tile = np.repeat(np.arange(num_tiles), np.diff(node_ptr))[src]
    dst_tile = np.repeat(np.arange(num_tiles), np.diff(edge_ptr))
    joining_edges = np.flatnonzero(src_tile != dst_tile)
    # Edges ascend in dst, so a stable sort by src tile alone leaves them sorted by (src tile, dst tile, id).
    joining_edges = joining_edges[np.argsort(src_tile[joining_edges], kind="stable")]
    pairs, joining = np.unique(src_tile[joining_edges] * num_tiles + dst_tile[joining_edges], return_counts=True)
    return StoredOrder(
        original_row=original_row,
        original_position=original_position,
        src=src,
        dst=dst,
        node_ptr=node_ptr,
        edge_ptr=edge_ptr,
        src_tile=pairs // num_tiles,
        dst_tile=pairs % num_tiles,
        joining=joining.astype(np.int64),
        joining_edges=joining_edges,
    )


def tiles_of(
    topology: Topology, partitioner: str | None = None, num_tiles: int | None = None, seed: int = 0
) -> tuple[IntArray, int]:
    """Tile of each node, [N], and the number of tiles, as `preparation.prepare` makes them by default.

    Raises:
        ValueError, RuntimeError: If the graph cannot be cut.
    """
    number = default_num_tiles(topology) if num_tiles is None else num_tiles
    name = partitioner or ("metis" if topology.position is None else "phi-eta")
    return get_partitioner(name, seed)(topology, number), number


def default_num_tiles(graph: EventGraph | Topology) -> int:
    """Number of tiles that gives about 4,600 edges each: one tile's work then stays in cache. Never more than nodes.

    A multiple of 32, since such numbers make good grids in phi and eta. A small event is cut finer, into 32 tiles as
    long as they hold 256 edges each, else into a power of two: so several ranks can still share it.
    """
    nearest = max(32, round(graph.num_edges / 4600 / 32) * 32)
    if graph.num_edges < 32 * 256:
        nearest = 2 ** round(math.log2(max(graph.num_edges / 256, 1)))
    return max(1, min(nearest, graph.num_nodes))


def concatenated_ranges(starts: IntArray, stops: IntArray) -> IntArray:
    """All integers of the ranges [starts[i], stops[i]), range after range, int64."""
    counts = np.asarray(stops, np.int64) - starts
    before = np.cumsum(counts) - counts
    return np.asarray(np.arange(counts.sum(), dtype=np.int64) + np.repeat(starts - before, counts))


def _offsets(counts: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
