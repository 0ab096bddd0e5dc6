"""Tiles -> parts: an event is cut into tiles once and grouped anew, in microseconds, for every number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partitioners.metis import cut_graph
from partitioners.ranges import split_evenly
from partitioners.topology import IntArray, check_assignment, check_edge_index

GROUPINGS = ("contiguous", "metis", "random")
"""Names that `group` knows."""


@dataclass(frozen=True, eq=False)
class TileGraph:
    """The tiles of one event and the edges between them.

    Attributes:
        node_counts: Nodes of each tile, int64 [K].
        edge_counts: Incoming edges of each tile, those from its own nodes included, int64 [K].
        src_tile: Tile of the `src` of joining edges, one entry per ordered pair of unequal tiles, int32 [M].
        dst_tile: Tile of their `dst`, int32 [M].
        joining: Number of edges from `src_tile` to `dst_tile`, at least 1, int64 [M].
    """

    node_counts: IntArray
    edge_counts: IntArray
    src_tile: IntArray
    dst_tile: IntArray
    joining: IntArray

    @property
    def num_tiles(self) -> int:
        """Number of tiles K."""
        return len(self.node_counts)

    def costs(self) -> IntArray:
        """Return the cost of each tile, its incoming edges + its nodes, int64 [K]."""
        return self.edge_counts + self.node_counts

    @classmethod
    def from_assignment(cls, edge_index: IntArray, assignment: IntArray, num_tiles: int) -> TileGraph:
        """Count the tiles of an assignment of nodes.

        Args:
            edge_index: `src` and `dst` id of each edge, int64 [2, E].
            assignment: Tile of each node, [N], in [0, num_tiles).
            num_tiles: Number of tiles K.

        Raises:
            ValueError: If the assignment names a tile that does not exist, or an edge a node that does not.
        """
        check_edge_index(edge_index, len(assignment))
        check_assignment(assignment, len(assignment), num_tiles)
        src_tile, dst_tile = assignment[edge_index].astype(np.int64)
        apart = src_tile != dst_tile
        pairs, joining = np.unique(src_tile[apart] * num_tiles + dst_tile[apart], return_counts=True)
        return cls(
            node_counts=np.bincount(assignment, minlength=num_tiles),
            edge_counts=np.bincount(dst_tile, minlength=num_tiles),
            src_tile=(pairs // num_tiles).astype(np.int32),
            dst_tile=(pairs % num_tiles).astype(np.int32),
            joining=joining,
        )


def group(tiles: TileGraph, num_parts: int, method: str = "contiguous", seed: int = 0) -> IntArray:
    """Group tiles into parts of about equal cost.

    `contiguous` takes ranges of tile numbers and makes the most expensive part as cheap as ranges allow: a
    function of the tiles alone. `metis` cuts few joining edges and repeats on one machine only: call it on one rank and
    broadcast. `random` is for tests.

    Args:
        tiles: The tiles and the edges between them.
        num_parts: Number of parts; parts beyond the number of tiles stay empty.
        method: One of `GROUPINGS`.
        seed: Seed of `metis` and `random`.

    Returns:
        Part of each tile, int32 [K]. A part may stay empty.

    Raises:
        ValueError: If the method is unknown or `num_parts` is below 1.
        RuntimeError: If METIS fails; no other method takes its place.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}; ask for at least one part.")
    if method == "contiguous":
        return split_evenly(tiles.costs(), num_parts)
    if method == "metis":
        return cut_graph(tiles.src_tile, tiles.dst_tile, tiles.joining, tiles.costs(), num_parts, seed)
    if method == "random":
        return np.random.default_rng(seed).integers(0, num_parts, tiles.num_tiles, dtype=np.int32)
    raise ValueError(f"grouping '{method}' is unknown; choose one of {', '.join(GROUPINGS)}.")
