"""Stages on CPU: tile after tile, each in memory that stays in cache, by the threads of a rank's team.

Only a stage's inputs are kept for backward, where each tile is computed again. Tiles that need no ghost come first,
while ghosts are on their way: `docs/same_bits.md`, rule 2, says why their order changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from domainpar.nn import blocks
from domainpar.nn.blocks import Activations, Edges, Folded, Rows, TileGradients, WayBack, Weight, as_table, fold
from domainpar.nn.calls import GHOST_ROWS, EdgeCall, Give, NodeCall
from domainpar.nn.kernels import Ends, Sums, add_pairs
from domainpar.nn.mlp import gradient_at_ends
from domainpar.nn.noise import Noise
from domainpar.nn.products import multiply, outer
from domainpar.nn.team import Scratch, team
from domainpar.parallel.halo import Spread
from domainpar.parallel.local import EdgeTile, LocalGraph, NodeTile
from domainpar.parallel.tables import empty_table


@dataclass(frozen=True)
class NodeTiles(NodeCall):
    """A perceptron on the rows of some nodes, piece by piece."""

    def forward(self) -> Tensor:
        folded, noise = fold(self.mlp, self.tables), self.noise
        out = empty_table(self.nodes.count, self.mlp.out_features, self.tables[0])

        def compute(rows: slice, scratch: Scratch) -> None:
            inputs, edges, count = _operands(self.tables, rows), _no_edges(folded, rows.start, noise), _length(rows)
            activations = blocks.forward(folded, inputs, count, edges, scratch)
            nowhere = blocks.no_sums(folded.norms[-1])
            blocks.finish(folded, activations, count, edges, out, rows.start, nowhere)

        team().each(self.nodes.pieces, compute)
        return out

    def backward(self, gradient: Tensor, give: Give) -> list[Tensor]:
        folded, gradient = fold(self.mlp, self.tables), gradient.contiguous()
        of_tables = [empty_table(len(table), table.shape[1], table) for table in self.tables]
        parameters, noise = list(self.mlp.parameters()), self.noise

        def compute(rows: slice, scratch: Scratch) -> None:
            inputs, edges, count = _operands(self.tables, rows), _no_edges(folded, rows.start, noise), _length(rows)
            activations = blocks.forward(folded, inputs, count, edges, scratch, keep=True)
            gradients, nowhere = TileGradients(folded, scratch), blocks.no_sums(folded.norms[0])
            of_product = WayBack(folded, activations, count, edges, nowhere, gradients, scratch).run(gradient)
            for table, weight in zip(of_tables, folded.inputs):
                _hand_back(Rows(as_table(of_product), 0), weight, table, rows, scratch)
            give(parameters, gradients.partials())

        team().each(self.nodes.pieces, compute)
        return of_tables


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _operands(tables: Sequence[Tensor], rows: slice) -> list[Rows]:
    return [Rows(as_table(table), rows.start) for table in tables]


def _no_edges(folded: Folded, first: int, noise: Noise | None) -> Edges:
    return Edges(first, blocks.NO_ENDS, blocks.no_rows(folded.norms[0]), noise)


def _hand_back(gradient: Rows, weight: Weight, table: Tensor, rows: slice, scratch: Scratch) -> None:
    """Write the gradient of an operand into its table, given that of the products."""
    count, width = _length(rows), weight.back.shape[1]
    if table.shape[1] == width:
        multiply(*gradient, count, weight.back, as_table(table), rows.start, False)
        return
    # A table of a width of its own, such as raw features, has no room for the padding of the products.
    block = scratch.take("handed back", count, width, table.dtype)
    multiply(*gradient, count, weight.back, as_table(block), 0, False)
    table[rows] = block[:, : table.shape[1]]


@dataclass(frozen=True)
class EdgeTiles(EdgeCall):
    """A perceptron on the local edges, tile by tile."""

    def forward(self, sums: bool) -> tuple[Tensor, Tensor]:
        work = _Work.begin(self)
        folded, width = work.folded, self.mlp.out_features
        kind = folded.exact if self.mlp.plain else self.products or folded.exact
        out = empty_table(self.graph.num_edges, width, self.edges, kind)
        at_ends = _AtEnds(self.graph, width if sums else 0, folded.exact)

        def compute(tile: EdgeTile, scratch: Scratch) -> None:
            activations, edges = work.compute(tile, scratch, keep=False)
            blocks.finish(folded, activations, tile.num_edges, edges, out, tile.edges.start, at_ends.of(tile))

        work.each(compute, self.nodes, work.take_ghosts)
        return out, at_ends.finish()

    def backward(self, of_edges: Tensor, of_sums: Spread | None, give: Give) -> tuple[Tensor | None, Tensor]:
        work = _Work.begin(self)
        work.take_ghosts()  # they came in forward
        folded, of_edges = work.folded, of_edges.contiguous()
        of_operand = empty_table(self.graph.num_edges, self.edges.shape[1], self.edges)
        parameters = list(self.mlp.parameters())
        at_ends = _AtEnds(self.graph, folded.width if self.nodes is not None else 0, folded.exact)
        gathered = blocks.no_rows(folded.norms[-1]) if of_sums is None else as_table(of_sums.local)

        def compute(tile: EdgeTile, scratch: Scratch) -> None:
            activations, edges = work.compute(tile, scratch, keep=True)
            gradients = TileGradients(folded, scratch)
            # An edge's gradient is that of its state and of both sums it went into: complete on every rank that has a
            # copy of it, since ghosts were sent the gradient of their owners' sums.
            edges, sums = edges.with_(gathered), at_ends.of(tile)
            back = WayBack(folded, activations, tile.num_edges, edges, sums, gradients, scratch, tile.owned)
            of_product = back.run(of_edges)
            for weight in folded.inputs:
                _hand_back(Rows(as_table(of_product), 0), weight, of_operand, tile.edges, scratch)
            if tile.owned:  # parameters are given an edge's share once, by its owner
                give(parameters, gradients.partials())

        work.each(compute, of_sums)
        of_ends = at_ends.finish()
        return None if self.nodes is None else work.back_to_nodes(self.nodes.local, of_ends, give), of_operand


@dataclass(frozen=True)
class _Work:
    """The tables and weights that all tiles of one call share.

    Attributes:
        call: The call.
        folded: Its weights.
        ends: Ends of all local edges.
        at_nodes: Products of node states, [num_local, 2 padded out]; [0, ...] without nodes.
    """

    call: EdgeTiles
    folded: Folded
    ends: Ends
    at_nodes: Tensor

    @classmethod
    def begin(cls, call: EdgeTiles) -> _Work:
        """Fold the weights and multiply the owned nodes' states."""
        nodes, graph = call.nodes, call.graph
        tables = [call.edges] if call.edges.shape[1] else []
        folded = fold(call.mlp, tables, 0 if nodes is None else nodes.owned.shape[1], call.products)
        num_rows = 0 if nodes is None else graph.plan.num_local
        at_nodes = empty_table(num_rows, folded.at_ends.forward.shape[1], graph.features, folded.exact)
        work = cls(call, folded, _ends(graph), at_nodes)
        if nodes is not None:
            work._multiply([tile.rows for tile in graph.tiles.nodes])
        return work

    def take_ghosts(self) -> None:
        """Multiply the ghosts' states, which have come."""
        if self.call.nodes is not None:
            self.call.nodes.finish()
            first, stop = self.call.graph.num_owned, self.call.graph.plan.num_local
            self._multiply([slice(row, min(row + GHOST_ROWS, stop)) for row in range(first, stop, GHOST_ROWS)])

    def _multiply(self, pieces: Sequence[slice]) -> None:
        assert self.call.nodes is not None
        states, at_nodes = as_table(self.call.nodes.local), as_table(self.at_nodes)

        def compute(rows: slice, scratch: Scratch) -> None:
            multiply(states, rows.start, _length(rows), self.folded.at_ends.forward, at_nodes, rows.start, False)

        team().each(pieces, compute)

    def compute(self, tile: EdgeTile, scratch: Scratch, keep: bool) -> tuple[Activations, Edges]:
        """One tile up to its last product."""
        table = self.call.edges
        inputs = _operands([table] if table.shape[1] else [], tile.edges)
        edges = Edges(tile.edges.start, self.ends, as_table(self.at_nodes), self.call.noise)
        return blocks.forward(self.folded, inputs, tile.num_edges, edges, scratch, keep), edges

    def each(
        self,
        compute: Callable[[EdgeTile, Scratch], None],
        waiting: Spread | None,
        arrived: Callable[[], None] = lambda: None,
    ) -> None:
        """Do all tiles, those that need no ghost while ghosts are on their way."""
        tiles = self.call.graph.tiles.blocks
        if waiting is None:
            team().each(tiles, compute)
            return
        # MPI moves rows only while somebody calls it: poke it between tiles.
        team().each([tile for tile in tiles if not tile.has_ghosts], compute, between=waiting.progress)
        waiting.finish()
        arrived()
        team().each([tile for tile in tiles if tile.has_ghosts], compute)

    def back_to_nodes(self, states: Tensor, of_ends: Tensor, give: Give) -> Tensor:
        """Gradient of the owned nodes' states, given that of their products; and that of the weights between."""
        folded, weight = self.folded, self.folded.at_ends
        of_states = empty_table(self.call.graph.num_owned, states.shape[1], states)
        first = folded.mlp.layers[0][0].weight

        def compute(tile: NodeTile, scratch: Scratch) -> None:
            operand, gradient = Rows(as_table(states), tile.rows.start), Rows(as_table(of_ends), tile.rows.start)
            _hand_back(gradient, weight, of_states, tile.rows, scratch)
            # These columns of the weight multiplied nodes, so their partials are of tiles of nodes, not of edges.
            of_weight = scratch.zeros("of states", len(weight.forward), len(weight.back), folded.exact)
            outer(*operand, *gradient, tile.num_nodes, as_table(of_weight))
            at_dst, at_src = (half[: len(first)] for half in of_weight.t().chunk(2))
            give([first], [gradient_at_ends(first, at_dst, at_src)])

        team().each(self.call.graph.tiles.nodes, compute)
        return of_states


def _ends(graph: LocalGraph) -> Ends:
    return Ends(graph.src.numpy(), graph.dst.numpy(), graph.tiles.pair_of_edge.numpy(), graph.num_owned)


class _AtEnds:
    """Sums of edge rows at owned nodes, in an order that no grouping of tiles changes (`docs/same_bits.md`, rule 2).

    At `dst`: the node's edges in global order; they all lie in one tile. At `src`: first a partial per (tile, node)
    over its edges in global order, then the partials by ascending tile. Every sum starts at +0.0.
    """

    def __init__(self, graph: LocalGraph, width: int, dtype: torch.dtype) -> None:
        self._pair_rows = graph.tiles.pair_rows
        self._at_ends = empty_table(graph.num_owned, 2 * width, graph.features, dtype).zero_()
        self._at_pairs = empty_table(len(self._pair_rows) if width else 0, width, graph.features, dtype)
        self._sums = Sums(as_table(self._at_ends), as_table(self._at_pairs))
        self._none = Sums(as_table(self._at_ends[:0]), as_table(self._at_pairs[:0]))

    def of(self, tile: EdgeTile) -> Sums:
        """The sums that rows of a tile are added to; none, if this width is 0."""
        if self._at_ends.shape[1] == 0:
            return self._none
        self._at_pairs[tile.pairs] = 0  # by the thread that adds to them: no other tile has these pairs
        return self._sums

    def finish(self) -> Tensor:
        """The sums at `dst`, then at `src`, [num_owned, 2 width]."""
        if self._at_ends.shape[1]:
            add_pairs(self._sums.at_pairs, self._pair_rows.numpy(), self._sums.at_ends)
        return self._at_ends
