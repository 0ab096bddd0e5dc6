"""One call of a stage on one part: what both engines, tile by tile on CPU and in batches on GPU, have to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from domainpar.nn.gradients import TakesGradients
from domainpar.nn.mlp import MLP
from domainpar.nn.noise import Noise
from domainpar.parallel.halo import Spread
from domainpar.parallel.local import LocalGraph
from domainpar.plan import IntArray

GHOST_ROWS = 4096  # in one product; no bit depends on it


def _noise(mlp: MLP, key: int | None, ids: IntArray) -> Noise | None:
    return None if key is None or mlp.dropout == 0 else Noise(key, mlp.dropout, ids)


@dataclass(frozen=True)
class NodeRows:
    """Some nodes and the pieces in which they are computed.

    Attributes:
        ids: Their global ids.
        pieces: Rows of each piece. Those of owned nodes are tiles.
    """

    ids: IntArray
    pieces: Sequence[slice]

    @classmethod
    def owned(cls, graph: LocalGraph) -> NodeRows:
        """The owned nodes of a part."""
        return cls(graph.plan.owned_ids, [tile.rows for tile in graph.tiles.nodes])

    @classmethod
    def ghosts(cls, graph: LocalGraph) -> NodeRows:
        """The ghosts of a part. No bit depends on their pieces."""
        count = graph.plan.num_ghosts
        pieces = [slice(first, min(first + GHOST_ROWS, count)) for first in range(0, count, GHOST_ROWS)]
        return cls(graph.plan.ghost_ids, pieces)

    @property
    def count(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class NodeCall(ABC):
    """A perceptron on the rows of some nodes.

    Attributes:
        mlp: Takes `[table_1, table_2, ...]`.
        nodes: The nodes.
        tables: Their states, [count, width] each.
        key: Of the random numbers of this call; None: nothing is dropped.
    """

    mlp: MLP
    nodes: NodeRows
    tables: Sequence[Tensor]
    key: int | None = None

    @property
    def noise(self) -> Noise | None:
        """Dropout of this call."""
        return _noise(self.mlp, self.key, self.nodes.ids)

    @abstractmethod
    def forward(self) -> Tensor:
        """New states, [count, out]."""

    @abstractmethod
    def backward(self, gradient: Tensor, taker: TakesGradients, needed: Sequence[bool]) -> list[Tensor | None]:
        """Gradients of the tables.

        Args:
            gradient: Gradient of the new states.
            taker: Takes gradients of parameters.
            needed: Of which tables a gradient is asked for.
        """


@dataclass(frozen=True)
class EdgeCall(ABC):
    """A perceptron on the local edges.

    Attributes:
        mlp: Takes `[x_src, x_dst, edge]`.
        graph: The part.
        nodes: States of owned nodes, with ghosts that came or are on their way; None if the perceptron takes none.
        edges: States of the local edges, [num_edges, width].
        products: Type of edge states and of their products, if not that of the parameters.
        key: Of the random numbers of this call; None: nothing is dropped.
    """

    mlp: MLP
    graph: LocalGraph
    nodes: Spread | None
    edges: Tensor
    products: torch.dtype | None = None
    key: int | None = None

    @property
    def noise(self) -> Noise | None:
        """Dropout of this call."""
        return _noise(self.mlp, self.key, self.graph.plan.edge_ids)

    @abstractmethod
    def forward(self, sums: bool) -> tuple[Tensor, Tensor]:
        """New edge states [num_edges, out] and their sums at owned nodes, [num_owned, 2 out] or, without, [.., 0]."""

    @abstractmethod
    def backward(
        self, of_edges: Tensor, of_sums: Spread | None, taker: TakesGradients, needed: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of the owned nodes' states and of `edges`.

        Args:
            of_edges: Gradient of the new edge states.
            of_sums: Gradient of the sums, on its way to the ghosts; None without sums.
            taker: Takes gradients of parameters.
            needed: Whether a gradient of `edges` is asked for.
        """
