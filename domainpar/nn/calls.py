"""One call of a stage on one part: the common part of both engines, tile by tile on CPU and in batches on GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from domainpar.nn.gradients import GradSink
from domainpar.nn.kernels import BACK, BOTH_ENDS
from domainpar.nn.mlp import MLP
from domainpar.nn.noise import Noise
from domainpar.parallel.halo import HaloRows
from domainpar.parallel.local import LocalGraph
from domainpar.plan import IntArray

T = TypeVar("T")

GHOST_ROWS = 4096  # in one product; no bit depends on it

Aggregate = Literal["sum", "mean", "root"]
"""Sums at nodes as they are, divided by the number of edges, or by its square root."""


Gates = Literal["edges", "nodes"]
"""Messages that the sigmoid of an edge's score weighs: its state, both ways, or the node state at the other end."""


def pieces_of(first: int, stop: int) -> IntArray:
    """Rows cut into pieces of at most `GHOST_ROWS`, from and to, int64 [pieces, 2]."""
    starts = np.arange(first, stop, GHOST_ROWS)
    return np.stack([starts, np.minimum(starts + GHOST_ROWS, stop)], axis=1)


def noise_of(mlp: MLP, key: int | None, ids: Any) -> Noise | None:
    """Dropout of one call; none without a key."""
    return None if key is None or mlp.dropout == 0 else Noise(key, mlp.dropout, ids)


@dataclass(frozen=True)
class NodeRows:
    """Some nodes and the pieces in which they are computed.

    Attributes:
        ids: Their global ids, as `LocalGraph.ids`.
        pieces: Rows of each piece, from and to, int64 [pieces, 2]. Those of owned nodes are tiles.
        graph: The part that they are of.
        whose: `owned` or `ghosts`.
    """

    ids: Any
    pieces: IntArray
    graph: LocalGraph
    whose: str

    @classmethod
    def owned(cls, graph: LocalGraph) -> NodeRows:
        """The owned nodes of a part."""
        return cls(graph.ids("owned_ids"), graph.tiles.ranges_of_nodes, graph, "owned")

    @classmethod
    def ghosts(cls, graph: LocalGraph) -> NodeRows:
        """The ghosts of a part. No bit depends on their pieces."""
        return cls(graph.ids("ghost_ids"), pieces_of(0, graph.plan.num_ghosts), graph, "ghosts")

    def cached(self, name: str, make: Callable[[], T]) -> T:
        """What `make` gave when it was first asked for these nodes by this name."""
        return self.graph.cached((self.whose, name), make)

    @property
    def count(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class NodeCall(ABC):
    """An MLP on the rows of some nodes.

    Attributes:
        mlp: Takes `[table_1, table_2, ...]`.
        nodes: The nodes.
        tables: Their states, [count, width] each.
        residual: Number of the table to which the results are added; None: to none.
        key: Of the random numbers of this call; None: nothing is dropped.
        made: What forward made for backward to use again, such as weights as kernels take them.
    """

    mlp: MLP
    nodes: NodeRows
    tables: Sequence[Tensor]
    residual: int | None = None
    key: int | None = None
    made: list[Any] = field(default_factory=list)

    @property
    def noise(self) -> Noise | None:
        """Dropout of this call."""
        return noise_of(self.mlp, self.key, self.nodes.ids)

    @abstractmethod
    def forward(self, keep: bool = False) -> tuple[Tensor, list[Tensor]]:
        """New states, [count, out]; and what `backward` takes so as not to compute it again, if that is to be kept."""

    @abstractmethod
    def backward(
        self, kept: Sequence[Tensor], gradient: Tensor, grad_sink: GradSink, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients of the tables.

        Args:
            kept: What forward kept; may be nothing.
            gradient: Gradient of the new states.
            grad_sink: Takes gradients of parameters.
            needed: Of which tables a gradient is asked for.
        """


class Link(NamedTuple):
    """One MLP of a chain on edges.

    Attributes:
        mlp: Takes `[x_src, x_dst, edge]`, or `[edge]` alone.
        grad_sink: Takes the gradients of its parameters.
        takes_nodes: Whether node states come in.
        residual: Whether its results are added to the edge states that come in.
        products: Type of edge states and of their products, if not that of the parameters.
        noise: Dropout of its hidden layers.
        gates: What the sigmoid of its result weighs in sums; None: nothing.
        way: At which ends its results are summed, see `kernels.BOTH_ENDS`. With `BACK` it takes edges turned round, and
            no results of the MLP before it.
    """

    mlp: MLP
    grad_sink: GradSink
    takes_nodes: bool
    residual: bool
    products: torch.dtype | None
    noise: Noise | None
    way: int = BOTH_ENDS
    gates: Gates | None = None

    @property
    def turned(self) -> bool:
        """Whether it takes edges turned round, `[x_dst, x_src]`."""
        return self.way == BACK

    @property
    def exact(self) -> torch.dtype:
        """Type of the parameters."""
        return self.mlp.layers[0].linear.weight.dtype

    @property
    def kind(self) -> torch.dtype:
        """Type of its results."""
        return self.exact if self.mlp.readout else self.products or self.exact


class EdgeResults(NamedTuple):
    """What a chain makes of the edges of a part.

    Attributes:
        edges: New edge states, [num_edges, out]; None if they are not asked for.
        sums: Of them, or of gated messages, at owned nodes, [num_owned, 2 width], at `dst`, then at `src`;
            [num_owned, 0] without.
        readout: Results of the last MLP, if that is a readout, [num_edges, out].
        nodes: The nodes that came. Whoever goes on with these, and not with those that it gave, spares autograd a sum:
            backward of the chain adds the gradient of their states to its own.
    """

    edges: Tensor | None
    sums: Tensor
    readout: Tensor | None
    nodes: HaloRows | None = None


class EdgeGradients(NamedTuple):
    """Gradients of what a chain gives, if there is one; that of sums before they are scaled, on its way to ghosts."""

    edges: Tensor | None
    sums: HaloRows | None
    readout: Tensor | None
    nodes: Tensor | None = None


@dataclass(frozen=True)
class EdgeCall(ABC):
    """MLPs on the local edges, each on what the one before it made.

    Attributes:
        chain: The MLPs. Only the last one may be a readout, of the states before it. Or one MLP twice,
            for both ways of each edge: it takes node states alone.
        graph: The part.
        nodes: States of owned nodes, with ghosts that came or are on their way; None if no MLP takes any.
        edges: States of the local edges, [num_edges, width].
        aggregate: How sums at nodes are scaled; None: no sums.
        keeps: Whether new edge states are asked for.
        overwrites: Whether they may take the place of `edges`.
        made: As of `NodeCall`.
    """

    chain: tuple[Link, ...]
    graph: LocalGraph
    nodes: HaloRows | None
    edges: Tensor
    aggregate: Aggregate | None = None
    keeps: bool = True
    overwrites: bool = False
    made: list[Any] = field(default_factory=list)

    @cached_property
    def updates(self) -> tuple[Link, ...]:
        """The MLPs that make states."""
        return self.chain[:-1] if self.chain[-1].mlp.readout else self.chain

    @property
    def readout(self) -> Link | None:
        """The one that reads them out."""
        return self.chain[-1] if self.chain[-1].mlp.readout else None

    @property
    def gates(self) -> Gates | None:
        """The messages that are summed, if what is read out weighs them."""
        return None if self.readout is None or self.aggregate is None else self.readout.gates

    @property
    def width_of_sums(self) -> int:
        """Columns of what is summed at either end; 0 without sums."""
        if self.aggregate is None:
            return 0
        if self.gates == "nodes":
            assert self.nodes is not None
            return self.nodes.owned.shape[1]
        return self.updates[-1].mlp.out_features if self.updates else self.edges.shape[1]

    def scaled(self, sums: Tensor) -> Tensor:
        """Sums at owned nodes, [num_owned, 2 width], or their gradient, times the factors of `aggregate`."""
        assert self.aggregate is not None
        scale = scale_of_sums(self.graph, self.aggregate, sums)
        return sums if scale is None else self._times(sums, scale)

    def _times(self, sums: Tensor, scale: Tensor) -> Tensor:
        rows, columns = sums.shape
        # Not -1: a part may own nothing, and then any width would fit.
        return (sums.view(rows, 2, columns // 2) * scale[..., None]).view(rows, columns)

    @abstractmethod
    def forward(self, keep: bool = False) -> tuple[EdgeResults, list[Tensor]]:
        """New edge states, their sums and what is read out; and what `backward` takes to compute no layer again."""

    @abstractmethod
    def backward(
        self, kept: Sequence[Tensor], given: EdgeGradients, needed: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of the owned nodes' states and of `edges`.

        Args:
            kept: What forward kept; may be nothing.
            given: Gradients of the results.
            needed: Whether a gradient of `edges` is asked for.
        """


def scale_of_sums(graph: LocalGraph, aggregate: Aggregate, like: Tensor) -> Tensor | None:
    """Factors of sums at owned nodes, at `dst`, then at `src`, [num_owned, 2]; None if sums stay as they are."""
    if aggregate == "sum":
        return None

    def scale() -> Tensor:
        degrees = np.maximum(graph.plan.degrees, 1).astype(torch.empty(0, dtype=like.dtype).numpy().dtype)
        # Divisions and roots of numpy are rounded as IEEE 754 says: the same bits on every machine.
        return torch.from_numpy(1 / (np.sqrt(degrees) if aggregate == "root" else degrees)).to(like.device)

    return graph.cached(("scale", aggregate, like.dtype), scale)
