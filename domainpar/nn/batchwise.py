"""Stages on a GPU in plain torch: many tiles at once, and sums in a fixed order.

The formulas are those of `tilewise`: a factorised first layer, only a stage's inputs kept, each batch computed again in
backward. Batches are large, because a GPU needs much work at a time. A sum at a node runs over its edges in global
order, without atomics, so two runs give the same bits. They agree with those on CPU up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from domainpar.nn import kernels
from domainpar.nn.calls import EdgeCall, EdgeGradients, EdgeResults, Link, NodeCall
from domainpar.nn.gradients import GradSink
from domainpar.nn.memory import BATCH_ROWS
from domainpar.nn.mlp import MLP, gradient_at_ends, weights_at_ends
from domainpar.nn.noise import Noise, keeps
from domainpar.parallel.halo import HaloRows
from domainpar.parallel.local import EdgesAtNodes, EdgeTile, LocalGraph

_ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    kernels.NO_ACTIVATION: lambda rows: rows,
    kernels.RELU: F.relu,
    kernels.SILU: F.silu,
    kernels.TANH: torch.tanh,
}


def _through(mlp: MLP, product: Tensor, products: torch.dtype | None, noise: Noise | None, which: slice) -> Tensor:
    """The first layer's bias and norm, and all layers after it.

    Args:
        mlp: The MLP.
        product: Result of the first layer's product, [rows, out].
        products: Type of the later products, but for a readout, if not that of the parameters.
        noise: Dropout of hidden layers.
        which: Rows of the table that these are.
    """
    rows = product
    for position, (linear, norm, activation) in enumerate(mlp.layers):
        if position:
            # A readout keeps the parameters' type: losses are made of it.
            reads = mlp.readout and position == len(mlp.layers) - 1
            kind = products if products is not None and not reads else linear.weight.dtype
            rows = _product(rows, linear.weight, kind)
        rows = rows + linear.bias
        rows = rows if norm is None else norm(rows)
        rows = _ACTIVATIONS[activation](rows)
        if noise is not None and position < len(mlp.layers) - 1:
            rows = rows * keeps(noise, position, which, rows.shape[1], rows)
    return rows


def _product(rows: Tensor, weight: Tensor, kind: torch.dtype) -> Tensor:
    """`rows @ weight.T` of numbers rounded to `kind`, summed in the type of the weights, also in backward."""
    return F.linear(_rounded(rows, weight.dtype, kind), _rounded(weight, weight.dtype, kind))


def _rounded(table: Tensor, exact: torch.dtype, kind: torch.dtype) -> Tensor:
    """Numbers of `kind` in the type `exact`, whose gradient is not rounded."""
    if kind in (exact, table.dtype):
        return table.to(exact)
    return table + (table.detach().to(kind).to(exact) - table.detach())


def _back(results: Sequence[tuple[Tensor, Tensor]], operands: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of some operands, 0 of those that did not take part, given results and their gradients."""
    through, given = zip(*results)
    gradients = torch.autograd.grad(through, list(operands), given, allow_unused=True)
    return [torch.zeros_like(operand) if grad is None else grad for operand, grad in zip(operands, gradients)]


@dataclass(frozen=True)
class NodeBatches(NodeCall):
    """An MLP on the rows of some nodes, many at once."""

    def forward(self, keep: bool = False) -> tuple[Tensor, list[Tensor]]:
        out = self.tables[0].new_empty(self.nodes.count, self.mlp.out_features)
        for rows in _in_batches(self.nodes.count):
            out[rows] = self._rows([table[rows] for table in self.tables], rows)
        return out, []

    def backward(
        self, kept: Sequence[Tensor], gradient: Tensor, grad_sink: GradSink, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        grad_tables = [torch.empty_like(table) for table in self.tables]
        parameters = list(self.mlp.parameters())
        for rows in _in_batches(self.nodes.count):
            # Forward kept no activations: they are computed again, batch by batch, with autograd looking on.
            operands = [table[rows].detach().requires_grad_() for table in self.tables]
            with torch.enable_grad():
                out = self._rows(operands, rows)
            gradients = _back([(out, gradient[rows])], [*operands, *_trainable(parameters)])
            for table, grad in zip(grad_tables, gradients):
                table[rows] = grad
            grad_sink.add_partials(_trainable(parameters), gradients[len(operands) :])
        return list(grad_tables)

    def _rows(self, operands: Sequence[Tensor], rows: slice) -> Tensor:
        first = self.mlp.layers[0].linear
        out = _through(self.mlp, F.linear(torch.cat(list(operands), dim=1), first.weight), None, self.noise, rows)
        return out if self.residual is None else operands[self.residual] + out


def _trainable(parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def _in_batches(stop: int, start: int = 0) -> Iterator[slice]:
    for first in range(start, stop, BATCH_ROWS):
        yield slice(first, min(first + BATCH_ROWS, stop))


@dataclass(frozen=True)
class EdgeBatches(EdgeCall):
    """MLPs on the local edges, many tiles at once."""

    def forward(self, keep: bool = False) -> tuple[EdgeResults, list[Tensor]]:
        exact, num_edges = self.chain[0].exact, self.graph.num_edges
        states, readout = [], None
        if self.updates and (self.keeps or (self.aggregate and self.gates != "nodes")):
            states = [self.edges.new_empty(num_edges, of.mlp.out_features, dtype=of.kind) for of in self._last_updates]
        if self.readout is not None:
            readout = self.edges.new_empty(num_edges, self.readout.mlp.out_features, dtype=exact)
        at_nodes = [_BatchProducts(self, link) for link in self.chain]

        def compute(rows: slice, owned: bool) -> None:
            results = self._rows(self.edges[rows], [products.at_edges(rows) for products in at_nodes], rows)
            for table, made in zip((*states, readout), (*results[0][: len(states)], results[1])):
                if table is not None and made is not None:
                    table[rows] = made

        def arrived() -> None:
            for products in at_nodes:
                products.take_ghosts()

        self._each(compute, self.nodes, arrived)
        sums = self.edges.new_empty(self.graph.num_owned, 0, dtype=exact)
        gates = None if self.gates is None or readout is None else torch.sigmoid(readout)
        if self.aggregate is not None:
            if self.gates == "nodes" and gates is not None and self.nodes is not None:
                sums = _sums_of_nodes(self.nodes.local, self.nodes.local, self.graph, gates)
            else:
                at_dst, at_src = (states[at].to(exact) if states else self.edges.to(exact) for at in (0, -1))
                sums = _sums_at_ends(at_dst, at_src, self.graph, gates)
            sums = self.scaled(sums)
        return EdgeResults(states[0] if self.keeps and states else None, sums, readout), []

    def backward(
        self, kept: Sequence[Tensor], given: EdgeGradients, needed: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        grad_edges, grad_sums, grad_readout, grad_nodes = given
        at_nodes, grad_operand = [_BatchProducts(self, link) for link in self.chain], torch.empty_like(self.edges)
        for products in at_nodes:
            products.take_ghosts()
        grad_products = [products.empty(self.graph.num_edges) for products in at_nodes]
        # Of an MLP that is there twice, autograd adds up both.
        parameters = [[] if link.turned else _trainable(list(link.mlp.parameters())) for link in self.chain]
        gates = self.edges.new_empty(self.graph.num_edges, 1, dtype=self.chain[0].exact)

        def compute(rows: slice, owned: bool) -> None:
            operand = self.edges[rows].detach().requires_grad_()
            at_edges = [products.at_edges(rows).requires_grad_() for products in at_nodes]
            with torch.enable_grad():
                states, readout = self._rows(operand, at_edges, rows)
            made = [(readout, None if grad_readout is None else grad_readout[rows])]
            if grad_sums is not None and self.gates is not None and readout is not None:
                with torch.enable_grad():
                    gate = torch.sigmoid(readout)
                    made += self._messages(states[0] if states else operand, gate, grad_sums.local, rows)
                gates[rows] = gate.detach()
            for state, link in zip(states, self._last_updates):
                grad_state = None if grad_edges is None else grad_edges[rows].to(self.chain[0].exact)
                if grad_sums is not None and self.gates is None:
                    at_ends = _at_ends(grad_sums.local, self.graph, rows, link.way)
                    grad_state = at_ends if grad_state is None else grad_state + at_ends
                made.append((state, grad_state))
            pairs = [
                (one, gradient.to(one.dtype)) for one, gradient in made if one is not None and gradient is not None
            ]
            wanted = [operand, *at_edges, *(each for own in parameters for each in own)]
            grad_operand[rows], *gradients = _back(pairs, wanted)
            for table, gradient in zip(grad_products, gradients):
                table[rows] = gradient[:, : table.shape[1]]
            partials = gradients[len(at_edges) :]
            if owned:  # of a foreign tile its owner gives them
                for link, own in zip(self.chain, parameters):
                    link.grad_sink.add_partials(own, partials[: len(own)])
                    partials = partials[len(own) :]

        self._each(compute, grad_sums)
        if self.nodes is None:
            return None, grad_operand
        backs = [
            products.back(_sums_at_ends(table, table, self.graph))
            for products, table in zip(at_nodes, grad_products)
            if products
        ]
        backs += [] if grad_nodes is None else [grad_nodes]
        if self.gates == "nodes" and grad_sums is not None:
            at_dst, at_src = grad_sums.local.chunk(2, dim=1)
            # What `src` sent came to `dst`, and the other way round.
            backs += _sums_of_nodes(at_src, at_dst, self.graph, gates).chunk(2, dim=1)
        return torch.stack(backs).sum(dim=0) if backs else None, grad_operand

    def _messages(self, state: Tensor, gate: Tensor, grad_sums: Tensor, rows: slice) -> list[tuple[Tensor, Tensor]]:
        """The messages of some edges as functions of their gates, and the gradients of these."""
        if self.gates == "edges":
            return [(gate * state.to(gate.dtype), _at_ends(grad_sums, self.graph, rows))]
        assert self.nodes is not None
        src, dst = self.graph.src[rows], self.graph.dst[rows]
        at_dst, at_src = grad_sums.chunk(2, dim=1)
        return [(gate * self.nodes.local[src], at_dst[dst]), (gate * self.nodes.local[dst], at_src[src])]

    @property
    def _last_updates(self) -> tuple[Link, ...]:
        """The MLPs whose results are summed: the last one that makes states, or that of both ways."""
        return self.updates[-2:] if self.chain[-1].turned else self.updates[-1:]

    def _rows(self, operand: Tensor, at_edges: Sequence[Tensor], rows: slice) -> tuple[list[Tensor], Tensor | None]:
        """Results for some edges of the last updates, and what is read out of them."""
        state, readout = operand, None
        made: list[Tensor] = []
        for link, at_both in zip(self.chain, at_edges):
            state = operand if link.turned else state
            first = link.mlp.layers[0].linear
            weight = first.weight[:, first.in_features - state.shape[1] :]
            product = at_both + _product(state, weight, state.dtype)
            results = _through(link.mlp, product, link.products, link.noise, rows)
            results = results + state.to(results.dtype) if link.residual else results
            if link.mlp.readout:
                readout = results
            else:
                state = results.to(link.kind)
                made.append(state)
        return made[-len(self._last_updates) :], readout

    def _each(
        self,
        compute: Callable[[slice, bool], None],
        waiting: HaloRows | None,
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


class _BatchProducts:
    """Products of node states with a first layer's weights for `dst` and for `src`, [num_local, 2 out]."""

    def __init__(self, call: EdgeCall, link: Link) -> None:
        self._call, self._link = call, link
        self._nodes = call.nodes if link.takes_nodes else None
        weight = link.mlp.layers[0].linear.weight.detach()
        self._width = 0 if self._nodes is None else self._nodes.owned.shape[1]
        self._weight = torch.cat(weights_at_ends(weight, self._width, link.turned))
        self._table = weight.new_empty(0 if self._nodes is None else call.graph.plan.num_local, len(self._weight))
        if self._nodes is not None:
            self._multiply(slice(0, call.graph.num_owned))

    def __bool__(self) -> bool:
        return self._nodes is not None

    def empty(self, num_edges: int) -> Tensor:
        """For gradients of products, [num_edges, out], or without columns."""
        return self._weight.new_empty(num_edges, len(self._weight) // 2 if self else 0)

    def take_ghosts(self) -> None:
        """Multiply the ghosts' states, which have come."""
        if self._nodes is not None:
            self._nodes.finish()
            self._multiply(slice(self._call.graph.num_owned, self._call.graph.plan.num_local))

    def _multiply(self, rows: slice) -> None:
        assert self._nodes is not None
        self._table[rows] = self._nodes.local[rows] @ self._weight.t()

    def at_edges(self, rows: slice) -> Tensor:
        """Sum of the products at both ends of each of some edges, [edges, out]; 0 without node states."""
        if self._nodes is None:
            return self._weight.new_zeros(rows.stop - rows.start, len(self._weight) // 2)
        return _at_ends(self._table, self._call.graph, rows)

    def back(self, grad_products: Tensor) -> Tensor:
        """Gradient of the owned nodes' states, given that of their products, [num_owned, 2 out]."""
        assert self._nodes is not None
        first = self._link.mlp.layers[0].linear
        # One partial for all owned nodes, where CPUs give one a tile: it depends on the parts, to rounding.
        at_dst, at_src = (grad_products.t() @ self._nodes.local[: self._call.graph.num_owned]).chunk(2)
        gradient = gradient_at_ends(first.weight, at_dst, at_src, self._link.turned)
        self._link.grad_sink.add_partials([first.weight], [gradient])
        return grad_products @ self._weight


def _at_ends(table: Tensor, graph: LocalGraph, rows: slice, way: int = kernels.BOTH_ENDS) -> Tensor:
    """Add up what a table [num_local, 2 width] holds for the two ends of each of some edges, or take that for one."""
    at_dst, at_src = table.chunk(2, dim=1)
    if way == kernels.FORTH:
        return at_dst.index_select(0, graph.dst[rows])
    if way == kernels.BACK:
        return at_src.index_select(0, graph.src[rows])
    return at_dst.index_select(0, graph.dst[rows]) + at_src.index_select(0, graph.src[rows])


def _sums_at_ends(to_dst: Tensor, to_src: Tensor, graph: LocalGraph, gates: Tensor | None = None) -> Tensor:
    """Sums of edge rows at `dst`, then of these or others at `src`, [num_owned, 2 width], each times its gate."""
    at_dst, at_src = _sum_at(graph.edges_at_dst, to_dst, gates), _sum_at(graph.edges_at_src, to_src, gates)
    return torch.cat([at_dst, at_src], dim=1)


def _sums_of_nodes(from_src: Tensor, from_dst: Tensor, graph: LocalGraph, gates: Tensor) -> Tensor:
    """Sums at `dst` of what a table of nodes holds for `src`, then at `src` of that for `dst`; both times gates."""
    at_dst = _sum_at(graph.edges_at_dst, from_src, gates, graph.src)
    return torch.cat([at_dst, _sum_at(graph.edges_at_src, from_dst, gates, graph.dst)], dim=1)


def _sum_at(
    edges: EdgesAtNodes, rows: Tensor, weights: Tensor | None = None, row_of_edge: Tensor | None = None
) -> Tensor:
    if len(edges.first) == 0 or len(edges.edges) == 0:
        return rows.new_zeros(len(edges.first), rows.shape[1])  # `embedding_bag` refuses to sum nothing
    which = edges.edges if row_of_edge is None else row_of_edge[edges.edges]
    weights = None if weights is None else weights[edges.edges, 0]
    # Each bag is summed in the order of its edges; `index_add` would add by atomics, in any order.
    return F.embedding_bag(which, rows, edges.first, mode="sum", per_sample_weights=weights)
