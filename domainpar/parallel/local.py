"""One part of an event as tensors: what a rank computes on, for networks on stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from domainpar.plan import IntArray, PartitionPlan

T = TypeVar("T")

FOREIGN_ROWS = 4096  # of foreign tiles that are computed at a time; no bit depends on it


EDGES, PAIRS, NODES, OWNED, HAS_GHOSTS = slice(0, 2), slice(2, 4), slice(4, 6), 6, 7
"""Columns of `Tiles.edges`."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of one part in ascending order, as ranges of rows, and where their edges are summed.

    A foreign tile has edges whose `src` is an owned node; it holds all edges of these nodes, and no others.

    Attributes:
        ranges_of_nodes: Rows of the nodes of each owned tile that has some, from and to, int64 [n, 2].
        edges: Of each tile, owned or foreign, that has a local edge, int64 [t, 8]: its edges from and to, its (tile,
            owned `src` node) pairs from and to, its owned nodes from and to, whether this part owns it, and so counts
            its edges, and whether one of its edges begins or ends at a ghost.
        pair_of_edge: Pair of each local edge, int64 [num_edges]; -1: `src` is a ghost, summed by its owner.
        pair_rows: Owned row of the `src` of each pair, int64 [num_pairs], ascending within a tile.
    """

    ranges_of_nodes: IntArray
    edges: IntArray
    pair_of_edge: Tensor
    pair_rows: Tensor

    @cached_property
    def ranges_of_edges(self) -> IntArray:
        """Columns as of `edges`, of each piece that is computed at a time, then of each owned tile without an edge.

        Successive foreign tiles are joined: they are many and small, and each piece costs time. This changes no bit:
        foreign tiles make no gradients of weights, and sums at nodes run row by row.
        """
        pieces: list[list[int]] = []
        for tile in self.edges.tolist():
            last = pieces[-1] if pieces else tile
            if not pieces or tile[OWNED] or last[OWNED] or tile[EDGES][1] - last[EDGES][0] > FOREIGN_ROWS:
                pieces.append(tile)
            else:
                ends = last[EDGES][0], tile[EDGES][1], last[PAIRS][0], tile[PAIRS][1]
                pieces[-1] = [*ends, *last[NODES], 0, last[HAS_GHOSTS] | tile[HAS_GHOSTS]]
        has_edges = np.isin(self.ranges_of_nodes[:, 1], self.edges[:, NODES][:, 1])
        pieces += [[0, 0, 0, 0, *rows, 1, 0] for rows in self.ranges_of_nodes[~has_edges].tolist()]
        return np.array(pieces, np.int64).reshape(-1, 8)

    @cached_property
    def pairs_of_nodes(self) -> tuple[IntArray, IntArray]:
        """(tile, `src`) pairs by owned node, by ascending tile within one: where each node's begin, and the pairs."""
        rows, num_owned = self.pair_rows.numpy(), self.ranges_of_nodes.max(initial=0)
        pairs = np.argsort(rows, kind="stable")
        return np.searchsorted(rows[pairs], np.arange(num_owned + 1)), pairs

    @cached_property
    def edge_ptr(self) -> Tensor:
        """First row of the edges of each of `edges`, and the end of the last, int64 [len(edges) + 1]."""
        return torch.from_numpy(np.append(0, self.edges[:, EDGES][:, 1])).to(self.pair_rows.device)

    @cached_property
    def owned(self) -> Tensor:
        """Whether this part owns each of `edges`, bool [len(edges)]."""
        return torch.from_numpy(self.edges[:, OWNED] > 0).to(self.pair_rows.device)


@dataclass(frozen=True, eq=False)
class LocalGraph:
    """One part of an event with its data: owned nodes, ghost nodes and local edges. `localise` makes one.

    Attributes:
        plan: Who owns what.
        tiles: The tiles of this part.
        src, dst: Local rows of the two ends of each edge, int64 [num_edges].
        features: Features of owned nodes, then of ghost nodes, [num_local, F].
        edge_features: Features of the local edges, [num_edges, G].
        label: 1 for true segments, 0 for others, -1 where it is not known, int8 [num_edges]; None without truth.
        event_id: Name of the event that this is a part of.
        made: Values that were computed from its nodes and edges, kept for later calls. Copies with other features share
            it.
    """

    plan: PartitionPlan
    tiles: Tiles
    src: Tensor
    dst: Tensor
    features: Tensor
    edge_features: Tensor
    label: Tensor | None
    event_id: str
    made: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def num_owned(self) -> int:
        return self.plan.num_owned

    @property
    def num_edges(self) -> int:
        return self.plan.num_edges

    def cached(self, name: Any, make: Callable[[], T]) -> T:
        """The value that `make` returned at the first call with this name."""
        if name not in self.made:
            self.made[name] = make()
        value: T = self.made[name]
        return value


@dataclass(frozen=True, eq=False)
class TileRanges:
    """The tiles of a stored event as ranges of its nodes and edges, and their parts."""

    node_ptr: IntArray  # first node id of each tile, int64 [K + 1]
    edge_ptr: IntArray  # first id of the edges ending in each tile, int64 [K + 1]
    part_of_tile: IntArray  # [K]

    def node_owner(self) -> IntArray:
        """Part of every node, [N]."""
        return np.repeat(self.part_of_tile, np.diff(self.node_ptr))


def localise(
    plan: PartitionPlan,
    tiles: TileRanges,
    features: npt.NDArray[np.floating],
    edge_features: npt.NDArray[np.floating],
    label: IntArray | None,
    *,
    event_id: str = "",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LocalGraph:
    """Put one part of an event on a device.

    Args:
        plan: The plan of the part.
        tiles: Tile ranges of the stored event, with the grouping that the plan was built from.
        features: Features of the local nodes in the order of the plan, [num_local, F].
        edge_features, label: Features and labels (or None) of the local edges, [num_edges, G] and [num_edges].
        event_id: Name of the event, for messages.
        device, dtype: Where to put it; type of the features, float32 or float64.

    Raises:
        ValueError: If an array does not have one row per local node or edge, or holds a value that is not finite.
    """
    given = {"features": features, "edge features": edge_features, **({} if label is None else {"label": label})}
    for name, values in given.items():
        expected = plan.num_local if name == "features" else plan.num_edges
        if len(values) != expected:
            raise ValueError(f"event {event_id}: {name} has {len(values)} rows where the plan has {expected}.")
        if np.issubdtype(values.dtype, np.floating) and not np.isfinite(values).all():
            row = int(np.argwhere(~np.isfinite(values))[0][0])
            raise ValueError(f"event {event_id}: {name} of local row {row} is not finite: {values[row]}.")
    return LocalGraph(
        plan=plan,
        tiles=find_tiles(plan, tiles, device),
        src=torch.from_numpy(plan.edge_rows[0]).to(device),
        dst=torch.from_numpy(plan.edge_rows[1]).to(device),
        features=torch.from_numpy(np.ascontiguousarray(features)).to(device, dtype),
        edge_features=torch.from_numpy(np.ascontiguousarray(edge_features)).to(device, dtype),
        label=None if label is None else torch.from_numpy(np.ascontiguousarray(label)).to(device),
        event_id=event_id,
    )


def find_tiles(plan: PartitionPlan, tiles: TileRanges, device: torch.device | str = "cpu") -> Tiles:
    """List the tiles of one part and where their edges are summed."""
    is_owned = tiles.part_of_tile == plan.part
    sizes = np.diff(tiles.node_ptr) * is_owned
    stops = np.cumsum(sizes)
    rows = np.stack([stops - sizes, stops], axis=1) * is_owned[:, None]  # of a foreign tile none
    # Local edges are in global order, and so by the tile where they end: a tile's are one block.
    tile_of_edge = np.searchsorted(tiles.edge_ptr, plan.edge_ids, side="right") - 1
    ptr = np.append(np.flatnonzero(np.diff(tile_of_edge, prepend=-1)), plan.num_edges)
    there = tile_of_edge[ptr[:-1]]
    pair_rows, pair_of_edge, pair_ptr = _pairs(plan, ptr[:-1], ptr[1:])
    at_ghost = np.logical_or.reduceat(np.logical_or(*(plan.edge_rows >= plan.num_owned)), ptr[:-1])
    ranges = (ptr[:-1], ptr[1:], pair_ptr[:-1], pair_ptr[1:], *rows[there].T)
    return Tiles(
        ranges_of_nodes=rows[rows[:, 1] > rows[:, 0]],
        edges=np.stack([*ranges, is_owned[there], at_ghost], axis=1).astype(np.int64),
        pair_of_edge=torch.from_numpy(pair_of_edge).to(device),
        pair_rows=torch.from_numpy(pair_rows).to(device),
    )


def _pairs(plan: PartitionPlan, starts: IntArray, stops: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The (tile, owned `src`) pairs: owned row of each, pair of each edge or -1, first pair of each tile."""
    block = np.repeat(np.arange(len(starts)), stops - starts)
    src = plan.edge_rows[0]
    with_owned_src = src < plan.num_owned
    # One number a pair, ascending by tile, then by node. At least 1 to divide by: a part may own nothing.
    keys, inverse = np.unique(block[with_owned_src] * max(plan.num_owned, 1) + src[with_owned_src], return_inverse=True)
    pair_block, pair_rows = np.divmod(keys, max(plan.num_owned, 1))
    pair_of_edge = np.full(plan.num_edges, -1, dtype=np.int64)
    pair_of_edge[with_owned_src] = inverse
    return pair_rows.astype(np.int64), pair_of_edge, np.searchsorted(pair_block, np.arange(len(starts) + 1))
