"""Stages on a GPU: many tiles at once, in plain torch, with sums whose order is fixed.

The same formulas as in `tilewise`: a factorised first layer, only a stage's inputs kept, each batch computed again in
backward. Batches are large, for a GPU needs much work at a time. A sum at a node runs over its edges in global order,
without atomics, so that two runs give the same; equal to those on CPU to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from domainpar.nn.calls import EdgeCall, NodeCall
from domainpar.nn.gradients import TakesGradients
from domainpar.nn.mlp import MLP, gradient_at_ends, weights_at_ends
from domainpar.nn.noise import Noise, keeps
from domainpar.parallel.halo import Spread
from domainpar.parallel.local import EdgesAtNodes, EdgeTile, LocalGraph

BATCH_ROWS = 2**18  # enough to fill a GPU, and few beside the edges of an event: activations of one batch are held


def _through(mlp: MLP, product: Tensor, products: torch.dtype | None, noise: Noise | None, which: slice) -> Tensor:
    """The first layer's bias and norm, and all layers after it.

    Args:
        mlp: The perceptron.
        product: Result of the first layer's product, [rows, out].
        products: Type of the later products, but for a plain output, if not that of the parameters.
        noise: Dropout of hidden layers.
        which: Rows of the table that these are.
    """
    rows = product
    for position, (linear, norm, _) in enumerate(mlp.layers):
        if position:
            # A plain output has no norm after it, and keeps the parameters' type: losses are made of it.
            kind = products if norm is not None and products is not None else linear.weight.dtype
            rows = F.linear(rows.to(kind), linear.weight.to(kind)).to(linear.weight.dtype)
        rows = rows + linear.bias
        if norm is not None:
            rows = F.relu(norm(rows))
        if noise is not None and position < len(mlp.layers) - 1:
            rows = rows * keeps(noise, position, which, rows.shape[1], rows)
    return rows


def _back(through: Tensor, gradient: Tensor, operands: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of some operands, 0 of those that did not take part."""
    gradients = torch.autograd.grad(through, list(operands), gradient, allow_unused=True)
    return [torch.zeros_like(operand) if grad is None else grad for operand, grad in zip(operands, gradients)]


@dataclass(frozen=True)
class NodeBatches(NodeCall):
    """A perceptron on the rows of some nodes, many at once."""

    def forward(self) -> Tensor:
        out = self.tables[0].new_empty(self.nodes.count, self.mlp.out_features)
        for rows in _in_batches(self.nodes.count):
            out[rows] = self._rows([table[rows] for table in self.tables], rows)
        return out

    def backward(self, gradient: Tensor, taker: TakesGradients, needed: Sequence[bool]) -> list[Tensor | None]:
        of_tables: list[Tensor | None] = [torch.empty_like(table) for table in self.tables]
        parameters = list(self.mlp.parameters())
        for rows in _in_batches(self.nodes.count):
            # Forward kept no activations: they are computed again, batch by batch, with autograd looking on.
            operands = [table[rows].detach().requires_grad_() for table in self.tables]
            with torch.enable_grad():
                out = self._rows(operands, rows)
            gradients = _back(out, gradient[rows], [*operands, *_trainable(parameters)])
            for table, grad in zip(of_tables, gradients):
                table[rows] = grad
            taker.give(_trainable(parameters), gradients[len(operands) :])
        return of_tables

    def _rows(self, operands: Sequence[Tensor], rows: slice) -> Tensor:
        first = self.mlp.layers[0].linear
        return _through(self.mlp, F.linear(torch.cat(list(operands), dim=1), first.weight), None, self.noise, rows)


def _trainable(parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def _in_batches(stop: int, start: int = 0) -> Iterator[slice]:
    for first in range(start, stop, BATCH_ROWS):
        yield slice(first, min(first + BATCH_ROWS, stop))


@dataclass(frozen=True)
class EdgeBatches(EdgeCall):
    """A perceptron on the local edges, many tiles at once."""

    def forward(self, sums: bool) -> tuple[Tensor, Tensor]:
        first = self.mlp.layers[0].linear
        exact = first.weight.dtype
        kind = exact if self.mlp.plain else self.products or exact
        out = self.edges.new_empty(self.graph.num_edges, self.mlp.out_features, dtype=kind)
        at_nodes = _NodeProducts(self)

        def compute(rows: slice, owned: bool) -> None:
            product = at_nodes.at_edges(rows) + self._product(self.edges[rows])
            out[rows] = _through(self.mlp, product, self.products, self.noise, rows).to(kind)

        self._each(compute, self.nodes, at_nodes.take_ghosts)
        none = first.weight.new_empty(self.graph.num_owned, 0)
        return out, _sums_at_ends(out.to(exact), self.graph) if sums else none

    def backward(
        self, of_edges: Tensor, of_sums: Spread | None, taker: TakesGradients, needed: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        at_nodes, of_operand = _NodeProducts(self), torch.empty_like(self.edges)
        at_nodes.take_ghosts()
        first = self.mlp.layers[0].linear
        width = 0 if self.nodes is None else first.out_features
        of_products = first.weight.new_empty(self.graph.num_edges, width)
        parameters = _trainable(list(self.mlp.parameters()))

        def compute(rows: slice, owned: bool) -> None:
            gradient = of_edges[rows].to(first.weight.dtype)
            if of_sums is not None:
                gradient = gradient + _at_both_ends(of_sums.local, self.graph, rows)
            operand, at_edges = self.edges[rows].detach().requires_grad_(), at_nodes.at_edges(rows).requires_grad_()
            with torch.enable_grad():
                out = _through(self.mlp, at_edges + self._product(operand), self.products, self.noise, rows)
            of_operand[rows], of_at_edges, *partials = _back(out, gradient, [operand, at_edges, *parameters])
            of_products[rows] = of_at_edges[:, :width]
            if owned:  # of a foreign tile its owner gives them
                taker.give(parameters, partials)

        self._each(compute, of_sums)
        if self.nodes is None:
            return None, of_operand
        return at_nodes.back(_sums_at_ends(of_products, self.graph), taker), of_operand

    def _product(self, rows: Tensor) -> Tensor:
        """The first layer's product of edge states, without bias."""
        first = self.mlp.layers[0].linear
        weight = first.weight[:, first.in_features - rows.shape[1] :]
        return F.linear(rows, weight.to(rows.dtype)).to(weight.dtype)

    def _each(
        self,
        compute: Callable[[slice, bool], None],
        waiting: Spread | None,
        arrived: Callable[[], None] = lambda: None,
    ) -> None:
        """Do all batches, those without a ghost while ghosts are on their way."""
        tiles = self.graph.tiles.edges
        for rows, owned in _runs([tile for tile in tiles if not tile.has_ghosts]):
            compute(rows, owned)
        if waiting is not None:
            waiting.finish()
        arrived()
        for rows, owned in _runs([tile for tile in tiles if tile.has_ghosts]):
            compute(rows, owned)


def _runs(tiles: Sequence[EdgeTile]) -> Iterator[tuple[slice, bool]]:
    """Batches of the edges of some tiles, owned ones apart from foreign ones: rows, and whether they are owned."""
    position = 0
    while position < len(tiles):
        # Tiles whose edges follow each other, as far as they are alike: foreign ones give no gradients of weights.
        start, owned = tiles[position].edges.start, tiles[position].owned
        stop = start
        while position < len(tiles) and (tiles[position].edges.start, tiles[position].owned) == (stop, owned):
            stop = tiles[position].edges.stop
            position += 1
        for rows in _in_batches(stop, start):
            yield rows, owned


class _NodeProducts:
    """Products of node states with the first layer's weights for `dst` and for `src`, [num_local, 2 out]."""

    def __init__(self, call: EdgeCall) -> None:
        self._call = call
        weight = call.mlp.layers[0].linear.weight.detach()
        self._width = 0 if call.nodes is None else call.nodes.owned.shape[1]
        self._weight = torch.cat(weights_at_ends(weight, self._width))
        self._table = weight.new_empty(0 if call.nodes is None else call.graph.plan.num_local, len(self._weight))
        if call.nodes is not None:
            self._multiply(slice(0, call.graph.num_owned))

    def take_ghosts(self) -> None:
        """Multiply the ghosts' states, which have come."""
        if self._call.nodes is not None:
            self._call.nodes.finish()
            self._multiply(slice(self._call.graph.num_owned, self._call.graph.plan.num_local))

    def _multiply(self, rows: slice) -> None:
        assert self._call.nodes is not None
        self._table[rows] = self._call.nodes.local[rows] @ self._weight.t()

    def at_edges(self, rows: slice) -> Tensor:
        """Sum of the products at both ends of each of some edges, [edges, out]; 0 without node states."""
        if self._call.nodes is None:
            return self._weight.new_zeros(rows.stop - rows.start, len(self._weight) // 2)
        return _at_both_ends(self._table, self._call.graph, rows)

    def back(self, of_products: Tensor, taker: TakesGradients) -> Tensor:
        """Gradient of the owned nodes' states, given that of their products, [num_owned, 2 out]."""
        assert self._call.nodes is not None
        first = self._call.mlp.layers[0].linear
        # One partial for all owned nodes, where CPUs give one a tile: it depends on the parts, to rounding.
        at_dst, at_src = (of_products.t() @ self._call.nodes.local[: self._call.graph.num_owned]).chunk(2)
        taker.give([first.weight], [gradient_at_ends(first.weight, at_dst, at_src)])
        return of_products @ self._weight


def _at_both_ends(table: Tensor, graph: LocalGraph, rows: slice) -> Tensor:
    """Add up what a table [num_local, 2 width] holds for the two ends of each of some edges."""
    width = table.shape[1] // 2
    return table[:, :width].index_select(0, graph.dst[rows]) + table[:, width:].index_select(0, graph.src[rows])


def _sums_at_ends(rows: Tensor, graph: LocalGraph) -> Tensor:
    """Sums of edge rows at their `dst`, then at their `src`, [num_owned, 2 width]."""
    return torch.cat([_sum_at(graph.edges_at_dst, rows), _sum_at(graph.edges_at_src, rows)], dim=1)


def _sum_at(edges: EdgesAtNodes, rows: Tensor) -> Tensor:
    if len(edges.first) == 0 or len(edges.edges) == 0:
        return rows.new_zeros(len(edges.first), rows.shape[1])  # `embedding_bag` refuses to sum nothing
    # Each bag is summed in the order of its edges; `index_add` would add by atomics, in any order.
    return F.embedding_bag(edges.edges, rows, edges.first, mode="sum")
