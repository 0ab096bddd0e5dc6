"""One call of a stage on one part: what both engines, tile by tile on CPU and in batches on GPU, have to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from domainpar.nn.mlp import MLP
from domainpar.nn.noise import Noise
from domainpar.parallel.halo import Spread
from domainpar.parallel.local import LocalGraph
from domainpar.plan import IntArray

Give = Callable[[Sequence[nn.Parameter], Sequence[Tensor]], None]
"""Takes a share of the gradients of some parameters that follow each other in a perceptron."""


def _noise(mlp: MLP, key: int | None, ids: IntArray) -> Noise | None:
    return None if key is None or mlp.dropout == 0 else Noise(key, mlp.dropout, ids)


@dataclass(frozen=True)
class NodeCall(ABC):
    """A perceptron on the rows of owned nodes.

    Attributes:
        mlp: Takes `[table_1, table_2, ...]`.
        graph: The part.
        tables: States of the owned nodes, [num_owned, width] each.
        key: Of the random numbers of this call; None: nothing is dropped.
    """

    mlp: MLP
    graph: LocalGraph
    tables: Sequence[Tensor]
    key: int | None = None

    @property
    def noise(self) -> Noise | None:
        """Dropout of this call."""
        return _noise(self.mlp, self.key, self.graph.plan.owned_ids)

    @abstractmethod
    def forward(self) -> Tensor:
        """New states, [num_owned, out]."""

    @abstractmethod
    def backward(self, gradient: Tensor, give: Give) -> list[Tensor]:
        """Gradients of the tables; those of parameters go to `give`.

        Args:
            gradient: Gradient of the new states.
            give: Takes gradients of parameters.
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
    def backward(self, of_edges: Tensor, of_sums: Spread | None, give: Give) -> tuple[Tensor | None, Tensor]:
        """Gradients of the owned nodes' states and of `edges`; those of parameters go to `give`.

        Args:
            of_edges: Gradient of the new edge states.
            of_sums: Gradient of the sums, on its way to the ghosts; None without sums.
            give: Takes gradients of parameters.
        """
