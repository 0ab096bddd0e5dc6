"""Tiles -> parts: an event is cut into tiles once and grouped anew, in microseconds, for every number of ranks.

Sectors, the independent pieces of naive mode, are made of whole tiles too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from partitioners.metis import cut_graph
from partitioners.ranges import split_evenly
from partitioners.sectors import circular_mean, cut_in_both, eta_of, phi_of
from partitioners.topology import FloatArray, IntArray, check_assignment, check_edge_index

GROUPINGS = ("contiguous", "metis", "random")
"""Names that `group` knows."""


FAR_OUT = 10.0
"""Pseudorapidity beyond which a hit lies no farther out: 0.1 mm off the beam axis a metre away."""

Sectors = int | str
"""Sectors of an event: `8`, ranges of tiles in their order, or `8x2`, wedges in phi times slices in eta."""


@dataclass(frozen=True, eq=False)
class TileGraph:
    """The tiles of one event and the edges between them."""

    node_counts: IntArray  # nodes of each tile, int64 [K]
    edge_counts: IntArray  # incoming edges of each tile, those from its own nodes included, int64 [K]
    src_tile: IntArray  # tile of the `src` of joining edges, one entry per ordered pair of unequal tiles, int32 [M]
    dst_tile: IntArray  # tile of their `dst`, int32 [M]
    joining: IntArray  # number of edges from `src_tile` to `dst_tile`, at least 1, int64 [M]

    @property
    def num_tiles(self) -> int:
        """Number of tiles K."""
        return len(self.node_counts)

    def costs(self) -> IntArray:
        """Return the cost of each tile, its incoming edges + its nodes, int64 [K]."""
        return self.edge_counts + self.node_counts

    @classmethod
    def from_assignment(cls, edge_index: IntArray, assignment: IntArray, num_tiles: int) -> TileGraph:
        """Count the tiles of an assignment of nodes, [N], in [0, num_tiles), with the edges, int64 [2, E].

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
        tiles, num_parts: They; parts beyond the number of tiles stay empty.
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


def number_of_sectors(sectors: Sectors) -> int:
    """Return how many sectors these are: 16 of `8x2`; ValueError if there are none, or the text is no grid."""
    wedges, slices = (sectors, 1) if isinstance(sectors, int) else _wedges_and_slices(sectors)
    if wedges < 1:
        raise ValueError(f"{sectors} sectors: ask for at least one.")
    return wedges * slices


def sectors_of_tiles(
    tiles: TileGraph, sectors: Sectors, tile_of_node: IntArray, position: FloatArray | None
) -> IntArray:
    """Cut an event into sectors of about equal cost, made of whole tiles: a function of the event alone.

    A tile of a grid lies where its nodes lie on average, so that its sectors have borders as ragged as its tiles.

    Args:
        tiles, sectors: Those of the event, and how many of these, or which grid.
        tile_of_node, position: Tile of each node, [N], and its x, y, z, [N, 3], for a grid.

    Returns:
        Sector of each tile, int32 [K]; `wedge * slices + slice` of a grid. A sector may stay empty.

    Raises:
        ValueError: If a grid is asked for without positions.
    """
    number = number_of_sectors(sectors)
    if isinstance(sectors, int):
        return group(tiles, number, "contiguous")
    if position is None:
        raise ValueError(f"sectors of {sectors} follow phi and eta, and there are no positions; ask for {number}.")
    # A hit on the beam axis has an infinite eta: it counts as far out.
    eta = np.clip(eta_of(position), -FAR_OUT, FAR_OUT)
    counts = np.bincount(tile_of_node, minlength=tiles.num_tiles)
    mean_eta = np.bincount(tile_of_node, eta, tiles.num_tiles) / np.maximum(counts, 1)
    mean_phi = circular_mean(phi_of(position), tile_of_node, tiles.num_tiles)
    return cut_in_both(mean_phi, mean_eta, tiles.costs(), *_wedges_and_slices(sectors))


def _wedges_and_slices(grid: str) -> tuple[int, int]:
    """The two numbers of a grid of sectors, written `8x2`."""
    if not re.fullmatch("[1-9][0-9]{0,5}x[1-9][0-9]{0,5}", grid):
        raise ValueError(f"'{grid}' is no grid of sectors; write wedges in phi x slices in eta, such as 8x2.")
    wedges, slices = grid.split("x")
    return int(wedges), int(slices)
