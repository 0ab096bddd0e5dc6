"""Input of a partitioner: the edges of an event, the number of its nodes and, in a geometry, their positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer]
FloatArray = npt.NDArray[np.floating]
BoolArray = npt.NDArray[np.bool_]

EdgePolicy = Literal["incoming", "incident"]
"""Edges that a part computes on: those into its nodes, or all that touch them."""


@dataclass(frozen=True, eq=False)
class Topology:
    """The graph of one event, as far as cutting it is concerned.

    Attributes:
        edge_index: `src` and `dst` id of each edge, int64 [2, E].
        num_nodes: Number of nodes N; nodes without edges count.
        position: x, y, z in any one unit of length, float [N, 3]; None for a graph without a geometry.
        edge_policy: Which edges a part computes on, and so what a node costs it.

    Raises:
        ValueError: If an edge names a node that does not exist, a shape does not fit, or a position is not finite.
    """

    edge_index: IntArray
    num_nodes: int
    position: FloatArray | None = None
    edge_policy: EdgePolicy = "incident"

    def __post_init__(self) -> None:
        check_edge_index(self.edge_index, self.num_nodes)
        if self.position is None:
            return
        if self.position.shape != (self.num_nodes, 3):
            raise ValueError(f"position has shape {self.position.shape}; expected x, y, z of {self.num_nodes} nodes.")
        bad = np.flatnonzero(~np.isfinite(self.position).all(axis=1))
        if len(bad):
            raise ValueError(
                f"position of node {bad[0]} is {self.position[bad[0]].tolist()} ({len(bad)} of {self.num_nodes} nodes "
                "are not finite); remove these hits or cut by a partitioner that needs no positions."
            )

    @property
    def num_edges(self) -> int:
        """Number of edges E."""
        return int(self.edge_index.shape[1])

    def costs(self) -> IntArray:
        """Return the cost of each node, in-degree + out-degree + 1, int64 [N]; for `incoming` without out-degree.

        Time and memory follow the edges; the 1 gives nodes without edges a share too.
        """
        ends = self.edge_index[1] if self.edge_policy == "incoming" else self.edge_index.ravel()
        return np.bincount(ends, minlength=self.num_nodes) + 1


Partitioner = Callable[[Topology, int], IntArray]
"""Maps (topology, num_blocks) to the block of each node, int32 [N]. A block may stay empty."""


def check_edge_index(edge_index: IntArray, num_nodes: int) -> None:
    """Refuse, by a ValueError, edges that are not int [2, E] or name a node outside [0, num_nodes)."""
    if edge_index.ndim != 2 or edge_index.shape[0] != 2 or not np.issubdtype(edge_index.dtype, np.integer):
        raise ValueError(
            f"edge_index has shape {edge_index.shape} and dtype {edge_index.dtype}; pass integers of shape [2, E]."
        )
    if edge_index.shape[1] == 0:
        return
    if edge_index.min() < 0 or edge_index.max() >= num_nodes:
        bad = int(np.argmax(((edge_index < 0) | (edge_index >= num_nodes)).any(axis=0)))
        raise ValueError(
            f"edge {bad} joins nodes {edge_index[0, bad]} and {edge_index[1, bad]} "
            f"but the event has {num_nodes} nodes; node ids run from 0 to {num_nodes - 1}."
        )


def check_num_blocks(num_blocks: int) -> None:
    """Refuse, by a ValueError, to cut into fewer than one block."""
    if num_blocks < 1:
        raise ValueError(f"num_blocks is {num_blocks}; ask for at least one block.")


def check_assignment(assignment: IntArray, num_items: int, num_blocks: int) -> None:
    """Refuse, by a ValueError, an assignment of the wrong length, or with a block outside [0, num_blocks)."""
    if assignment.shape != (num_items,):
        raise ValueError(f"assignment has shape {assignment.shape}; expected one block for each of {num_items} nodes.")
    if not np.issubdtype(assignment.dtype, np.integer):
        raise ValueError(f"assignment has dtype {assignment.dtype}; pass the block of each node, integers.")
    if num_items and (assignment.min() < 0 or assignment.max() >= num_blocks):
        raise ValueError(
            f"assignment uses blocks {assignment.min()} to {assignment.max()} but there are {num_blocks}; "
            f"blocks run from 0 to {num_blocks - 1}."
        )
