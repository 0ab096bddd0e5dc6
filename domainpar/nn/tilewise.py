"""Stages on CPU: a program over the tiles of a part, forward and backward.

Only a stage's inputs are kept for backward, where each strip is computed again. Tiles that need no ghost come first,
while ghosts are on their way: `docs/same_bits.md`, rule 2, says why their order changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from domainpar.nn import operations
from domainpar.nn.blocks import AtEnds, Folded, Partials, Perceptron, SumsAt, fold
from domainpar.nn.calls import GHOST_ROWS, EdgeCall, NodeCall
from domainpar.nn.gradients import TakesGradients
from domainpar.nn.mlp import limbs_at_ends
from domainpar.nn.program import NOTHING, Operand, Program, Tiles, When, shared, table
from domainpar.parallel.halo import Spread
from domainpar.parallel.local import EdgeTile, LocalGraph
from domainpar.parallel.tables import empty_table

_NO_PAIRS = slice(0, 0)


def _of_nodes(pieces: Sequence[slice]) -> Tiles:
    return Tiles.of([(rows, _NO_PAIRS, True) for rows in pieces])


def _of_edges(tiles: Sequence[EdgeTile]) -> Tiles:
    return Tiles.of([(tile.edges, tile.pairs, tile.owned) for tile in tiles])


@dataclass(frozen=True)
class NodeTiles(NodeCall):
    """A perceptron on the rows of some nodes, piece by piece."""

    def forward(self) -> Tensor:
        folded, program = fold(self.mlp, self.tables), Program()
        out = empty_table(self.nodes.count, self.mlp.out_features, self.tables[0])
        perceptron = Perceptron(program, folded, noise=self.noise)
        perceptron.forward(self._inputs, out=table(out))
        program.run(_of_nodes(self.nodes.pieces))
        return out

    def backward(self, gradient: Tensor, taker: TakesGradients, needed: Sequence[bool]) -> list[Tensor | None]:
        folded, program, gradient = fold(self.mlp, self.tables), Program(), gradient.contiguous()
        of_tables = [_like(one) if is_needed else None for one, is_needed in zip(self.tables, needed)]
        perceptron, partials = Perceptron(program, folded, noise=self.noise), Partials(program, folded.exact)
        perceptron.take_partials(partials)
        partials.close()
        perceptron.forward(self._inputs)
        of_product = perceptron.backward(table(gradient))
        for position, of_table in enumerate(of_tables):
            if of_table is not None:
                perceptron.hand_back(of_product, position, table(of_table))
        partials.clear()
        program.run(_of_nodes(self.nodes.pieces))
        perceptron.give(*partials.total(), taker)
        return of_tables

    @property
    def _inputs(self) -> list[Operand]:
        return [table(one) for one in self.tables]


def _like(rows: Tensor) -> Tensor:
    return empty_table(len(rows), rows.shape[1], rows)


@dataclass(frozen=True)
class EdgeTiles(EdgeCall):
    """A perceptron on the local edges, tile by tile."""

    def forward(self, sums: bool) -> tuple[Tensor, Tensor]:
        folded, program, graph = self._folded(), Program(), self.graph
        kind = folded.exact if self.mlp.plain else self.products or folded.exact
        out = empty_table(graph.num_edges, self.mlp.out_features, self.edges, kind)
        at_nodes = _NodeProducts(self, folded)
        at_ends = _Sums(graph, self.mlp.out_features if sums else 0, folded.exact)
        perceptron = Perceptron(program, folded, _ends(graph), self.noise)
        perceptron.forward(self._inputs, at_nodes.operand, out=table(out), sums=at_ends.cleared_by(program))
        self._run(program, self.nodes, at_nodes.take_ghosts)
        return out, at_ends.finish()

    def backward(
        self, of_edges: Tensor, of_sums: Spread | None, taker: TakesGradients, needed: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        folded, program, graph, of_edges = self._folded(), Program(), self.graph, of_edges.contiguous()
        at_nodes = _NodeProducts(self, folded)
        at_nodes.take_ghosts()  # they came in forward
        of_operand = _like(self.edges) if needed else None
        at_ends = _Sums(graph, folded.width if self.nodes is not None else 0, folded.exact)
        perceptron, partials = Perceptron(program, folded, _ends(graph), self.noise), Partials(program, folded.exact)
        perceptron.take_partials(partials)
        partials.close()
        perceptron.forward(self._inputs, at_nodes.operand)
        # An edge's gradient is that of its state and of both sums it went into: complete on every rank that has a
        # copy of it, since ghosts were sent the gradient of their owners' sums.
        gathered = NOTHING if of_sums is None else shared(of_sums.local)
        of_product = perceptron.backward(table(of_edges), gathered, sums=at_ends.cleared_by(program))
        if of_operand is not None and self.edges.shape[1]:
            perceptron.hand_back(of_product, 0, table(of_operand))
        partials.clear()
        self._run(program, of_sums)
        perceptron.give(*partials.total(), taker)
        of_ends = at_ends.finish()
        return None if self.nodes is None else at_nodes.back(of_ends, taker), of_operand

    def _folded(self) -> Folded:
        tables = [self.edges] if self.edges.shape[1] else []
        return fold(self.mlp, tables, 0 if self.nodes is None else self.nodes.owned.shape[1], self.products)

    @property
    def _inputs(self) -> list[Operand]:
        return [table(self.edges)] if self.edges.shape[1] else []

    def _run(self, program: Program, waiting: Spread | None, arrived: Callable[[], None] = lambda: None) -> None:
        """Do all tiles, those that need no ghost while ghosts are on their way."""
        tiles = self.graph.tiles.blocks
        if waiting is None:
            program.run(_of_edges(tiles))
            return
        # MPI moves rows only while somebody calls it: poke it now and then.
        program.run(_of_edges([tile for tile in tiles if not tile.has_ghosts]), between=waiting.progress)
        waiting.finish()
        arrived()
        program.run(_of_edges([tile for tile in tiles if tile.has_ghosts]))


class _NodeProducts:
    """Products of node states with the first layer's weights for `dst` and for `src`, [num_local, 2 padded out]."""

    def __init__(self, call: EdgeCall, folded: Folded) -> None:
        self._call, self._weight = call, folded.at_ends
        self.operand = NOTHING
        if call.nodes is not None:
            self._table = empty_table(
                call.graph.plan.num_local, folded.at_ends.forward.shape[1], call.graph.features, folded.exact
            )
            self.operand = shared(self._table)
            self._multiply([tile.rows for tile in call.graph.tiles.nodes])

    def take_ghosts(self) -> None:
        """Multiply the ghosts' states, which have come."""
        if self._call.nodes is not None:
            self._call.nodes.finish()
            first, stop = self._call.graph.num_owned, self._call.graph.plan.num_local
            self._multiply([slice(row, min(row + GHOST_ROWS, stop)) for row in range(first, stop, GHOST_ROWS)])

    def _multiply(self, pieces: Sequence[slice]) -> None:
        assert self._call.nodes is not None
        program, states = Program(), self._call.nodes.local
        kernel = operations.multiply_rows(states.dtype, self._table.dtype)
        out, weight = table(self._table), self._weight.forward
        program.add(kernel, table(states), states.shape[1], shared(weight), out, out.width, False)
        program.run(_of_nodes(pieces))

    def back(self, of_ends: Tensor, taker: TakesGradients) -> Tensor:
        """Gradient of the owned nodes' states, given that of their products; and that of the weights between."""
        assert self._call.nodes is not None
        states, back, program = self._call.nodes.local, self._weight.back, Program()
        of_states = empty_table(self._call.graph.num_owned, states.shape[1], states)
        partials = Partials(program, of_ends.dtype)
        first = partials.take(states.shape[1], of_ends.shape[1])
        partials.close()
        gradient, out = table(of_ends), table(of_states)
        room = out if out.width == back.shape[1] else program.room(operations.STRIP, back.shape[1], out.dtype)
        kernel = operations.multiply_rows(gradient.dtype, out.dtype)
        program.add(kernel, gradient, gradient.width, shared(back), room, back.shape[1], False)
        if room is not out:
            program.add(operations.copy_columns(room.dtype, out.dtype), room, room.width, out, out.width)
        # These columns of the weight multiplied nodes, so their partials are of tiles of nodes, not of edges.
        outer = operations.add_outer(states.dtype, of_ends.dtype)
        rows = (table(states), states.shape[1], gradient, gradient.width, partials.at(first))
        program.add(outer, *rows, when=When.OWNED_STRIP)
        partials.clear()
        program.run(_of_nodes([tile.rows for tile in self._call.graph.tiles.nodes]))
        limbs, rejected, largest = partials.total()
        weight = self._call.mlp.layers[0].linear.weight
        halves = limbs.reshape(2, states.shape[1], 2, -1)[..., : len(weight)].transpose(2, 0, 3, 1)
        taker.give_limbs([weight], [limbs_at_ends(weight, *halves).reshape(2, -1)], rejected, largest)
        return of_states


def _ends(graph: LocalGraph) -> AtEnds:
    return AtEnds.of(graph.src.numpy(), graph.dst.numpy(), graph.tiles.pair_of_edge.numpy(), graph.num_owned)


class _Sums:
    """Sums of edge rows at owned nodes, in an order that no grouping of tiles changes (`docs/same_bits.md`, rule 2).

    At `dst`: the node's edges in global order; they all lie in one tile. At `src`: first a partial per (tile, node)
    over its edges in global order, then the partials by ascending tile. Every sum starts at +0.0.
    """

    def __init__(self, graph: LocalGraph, width: int, dtype: torch.dtype) -> None:
        self._graph, self._width = graph, width
        self._at_ends = empty_table(graph.num_owned, 2 * width, graph.features, dtype).zero_()
        self._at_pairs = empty_table(len(graph.tiles.pair_rows) if width else 0, width, graph.features, dtype)

    def cleared_by(self, program: Program) -> SumsAt:
        """The sums that rows are added to; none, if this width is 0. A tile's own pairs are cleared before."""
        if self._width == 0:
            return SumsAt()
        pairs = table(self._at_pairs)  # no other tile has these
        program.add(operations.clear(), pairs, -pairs.row_bytes, when=When.TILE_STARTS)
        return SumsAt(shared(self._at_ends), shared(self._at_pairs))

    def finish(self) -> Tensor:
        """The sums at `dst`, then at `src`, [num_owned, 2 width]."""
        if self._width:
            program, (starts, pairs) = Program(), self._graph.tiles.pairs_of_nodes
            kernel = operations.sum_pairs(self._width, self._at_ends.dtype)
            program.add(kernel, shared(starts), shared(pairs), shared(self._at_pairs), shared(self._at_ends))
            program.run(_of_nodes([tile.rows for tile in self._graph.tiles.nodes]))
        return self._at_ends
