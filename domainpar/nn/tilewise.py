"""Stages on CPU: a program over the tiles of a part, forward and backward.

For backward only a stage's inputs are kept, and each strip is computed again. On small parts its layers are kept as
well, which saves a third of the work; the bits are the same. Tiles that need no ghost node are computed first, while
ghost rows are on their way. `docs/same_bits.md`, rule 2, says why this order changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from domainpar.nn import operations
from domainpar.nn.blocks import (
    NOWHERE,
    AtEnds,
    Folded,
    Gate,
    KeptLayer,
    MLPProgram,
    SumsAt,
    fold,
    keep_of,
)
from domainpar.nn.calls import EdgeCall, EdgeGradients, EdgeResults, Link, NodeCall, pieces_of, scale_of_sums
from domainpar.nn.gradients import GradSink
from domainpar.nn.kernels import BOTH_ENDS
from domainpar.nn.partials import Partials, order_at_ends
from domainpar.nn.program import NOTHING, STRIP, Operand, Program, When, shared, table, tiles_of
from domainpar.parallel.halo import HaloRows
from domainpar.parallel.local import LocalGraph
from domainpar.parallel.tables import empty_table
from domainpar.plan import IntArray


def _like(rows: Tensor) -> Tensor:
    return empty_table(len(rows), rows.shape[1], rows)


@dataclass(frozen=True)
class NodeTiles(NodeCall):
    """An MLP on the rows of some nodes, piece by piece."""

    def forward(self, keep: bool = False) -> tuple[Tensor, list[Tensor]]:
        folded, program = self._folded(), Program()
        out = empty_table(self.nodes.count, self.mlp.out_features, self.tables[0])
        kept = keep_of(folded, self.nodes.count) if keep else []
        residual = NOTHING if self.residual is None else table(self.tables[self.residual])
        mlp_program = MLPProgram(program, folded, noise=self.noise, kept=kept)
        mlp_program.forward(self._inputs, residual=residual, out=table(out))
        program.run(tiles_of(self.nodes.pieces))
        return out, [rows for layer in kept for rows in layer]

    def backward(
        self, kept: Sequence[Tensor], gradient: Tensor, grad_sink: GradSink, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        folded, program, gradient = self._folded(), Program(), gradient.contiguous()
        grad_tables = [_like(rows) if is_needed else None for rows, is_needed in zip(self.tables, needed)]
        mlp_program = MLPProgram(program, folded, noise=self.noise, kept=_layers(kept), again=bool(kept))
        partials = Partials(program, folded.exact)
        mlp_program.take_partials(partials)
        partials.close()
        mlp_program.forward(self._inputs)
        grad_states = None if self.residual is None else grad_tables[self.residual]
        carried = NOTHING if grad_states is None else table(grad_states)
        grad_product = mlp_program.backward(table(gradient), carried=carried)
        for position, grad_table in enumerate(grad_tables):
            if grad_table is not None:
                mlp_program.hand_back(grad_product, position, table(grad_table), add=position == self.residual)
        partials.clear()
        program.run(tiles_of(self.nodes.pieces))
        mlp_program.add_partials(partials.total(), grad_sink)
        return grad_tables

    def _folded(self) -> Folded:
        if not self.made:
            self.made.append(fold(self.mlp, self.tables))
        folded: Folded = self.made[0]
        return folded

    @property
    def _inputs(self) -> list[Operand]:
        return [table(rows) for rows in self.tables]


def _layers(kept: Sequence[Tensor]) -> list[KeptLayer]:
    return [KeptLayer(*pair) for pair in zip(kept[::2], kept[1::2])]


class _Linked(NamedTuple):
    """An MLP of a chain, as a program has it.

    Attributes:
        link: What it is.
        folded: Its weights.
        mlp_program: Its operations.
        at_nodes: Products of node states with its first layer, [num_local, 2 padded out]; None if it takes none, or
            needs none.
        kept: Its layers, if they are kept.
    """

    link: Link
    folded: Folded
    mlp_program: MLPProgram
    at_nodes: Tensor | None
    kept: list[KeptLayer]

    @property
    def gathered(self) -> Operand:
        return NOTHING if self.at_nodes is None else shared(self.at_nodes)


@dataclass(frozen=True)
class EdgeTiles(EdgeCall):
    """MLPs on the local edges, tile by tile."""

    def forward(self, keep: bool = False) -> tuple[EdgeResults, list[Tensor]]:
        program, graph = Program(), self.graph
        chain = self._linked(program, keep)
        edges = readout = None
        width, exact = chain[-1].link.mlp.out_features, chain[0].folded.exact
        if self.readout is not None:
            readout = empty_table(graph.num_edges, width, self.edges, exact)
        if self.updates:
            width = self.updates[-1].mlp.out_features
            if self.keeps:
                like = (self.edges.shape[1], self.edges.dtype)
                # A strip's states are read before any of them is written.
                reuses = self.overwrites and like == (width, self.updates[-1].kind)
                edges = self.edges if reuses else empty_table(graph.num_edges, width, self.edges, self.updates[-1].kind)
        at_ends = _TileSums(graph, self.width_of_sums, exact)
        outs = {}
        if edges is not None:
            outs[len(self.updates) - 1] = table(edges)
        if readout is not None:
            outs[len(chain) - 1] = table(readout)
        self._forward(program, chain, outs, at_ends.cleared_by(program))
        products = _NodeProducts(self, chain)
        self._run(program, self.nodes, products.take_ghosts)
        scale = scale_of_sums(graph, self.aggregate, at_ends.at_ends) if self.aggregate else None
        kept = [table for linked in chain for layer in linked.kept for table in layer]
        return EdgeResults(edges, at_ends.finish(scale), readout), kept

    def backward(
        self, kept: Sequence[Tensor], given: EdgeGradients, needed: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        grad_edges, grad_sums, grad_readout, grad_nodes = given
        program, graph = Program(), self.graph
        chain = self._linked(program, kept=kept)
        products = _NodeProducts(self, chain)
        products.take_ghosts()  # they came in forward
        partials = Partials(program, chain[0].folded.exact)
        for linked in chain:
            linked.mlp_program.take_partials(partials)
        partials.close()
        gate = self._forward(program, chain, {len(chain) - 1: NOTHING})
        grad_messages = _TileSums(graph, self.width_of_sums if self.gates == "nodes" else 0, chain[0].folded.exact)
        grad_operand = _like(self.edges) if needed else None
        at_ends = [_TileSums(graph, one.folded.width * one.link.takes_nodes, one.folded.exact) for one in chain]
        # Of a state of the chain: what its readout and later states return, in memory of the strip; else the table
        # that came. An edge's gradient is that of its state and of both sums it went into: complete on every rank that
        # has a copy of it, since ghosts were sent the gradient of their owners' sums.
        gradient, grad_scores = (None if one is None else table(one.contiguous()) for one in (grad_edges, grad_readout))
        gathered = NOTHING if grad_sums is None else shared(grad_sums.local)
        for position in range(len(chain) - 1, -1, -1):
            linked = chain[position]
            reads, turned = linked.link.mlp.readout, linked.link.turned
            gates = gate if reads else None
            grad_results = grad_scores if reads else gradient
            if reads and grad_results is None and gates is None:
                at_ends[position].cleared_by(program)  # and stays 0
                continue
            if grad_results is None and gates is None:
                grad_results = program.room(STRIP, linked.link.mlp.out_features, linked.folded.exact)
                operations.clear_rows(program, grad_results)
            carries = linked.link.residual or (reads and (gradient is not None or self.gates == "edges"))
            if not linked.folded.widths:
                into = NOTHING
            elif position:
                into = program.room(STRIP, linked.folded.widths[0], linked.folded.exact)
            else:
                into = NOTHING if grad_operand is None else table(grad_operand)
            if reads and gradient is not None and into is not NOTHING:
                operations.copy(program, gradient, into)
            if gates is not None:
                if gradient is None and carries and into is not NOTHING:
                    operations.clear_rows(program, into)
                of_sent = into if self.gates == "edges" else NOTHING
                grad_results = gates.backward(
                    grad_results or NOTHING, gathered, of_sent, grad_messages.cleared_by(program)
                )
                gathered = NOTHING
            assert grad_results is not None
            grad_product = linked.mlp_program.backward(
                grad_results,
                NOTHING if reads else gathered,
                into if linked.link.residual else NOTHING,
                at_ends[position].cleared_by(program),
            )
            if into is not NOTHING:
                linked.mlp_program.hand_back(grad_product, 0, into, carries)
            # The one before it, of the other way, has a half of the same sums; the states that it made go nowhere else.
            gradient = into if (reads or position) and not turned else None
            gathered = gathered if reads or turned else NOTHING
        partials.clear()
        self._run(program, grad_sums)
        total = partials.total()
        for linked in chain:
            linked.mlp_program.add_partials(total, linked.link.grad_sink)
        if self.nodes is None:
            return None, grad_operand
        grad_owned = products.back([sums.finish() for sums in at_ends], grad_nodes)
        if self.gates == "nodes":
            at_dst, at_src = grad_messages.finish().chunk(2, dim=1)
            grad_owned = at_dst + at_src if grad_owned is None else grad_owned + (at_dst + at_src)
        return grad_owned, grad_operand

    def _times(self, grad_sums: Tensor, scale: Tensor) -> Tensor:
        program, out = Program(), _like(grad_sums)
        operations.copy(program, table(grad_sums), table(out), factors=table(scale))
        program.run(tiles_of(self.graph.tiles.ranges_of_nodes))
        return out

    def _linked(self, program: Program, keep: bool = False, kept: Sequence[Tensor] = ()) -> list[_Linked]:
        """The chain; its layers are to be kept, or were kept in forward and are taken from there."""
        linked, tables, ends = [], [self.edges] if self.edges.shape[1] else [], _ends(self.graph)
        layers = _layers(kept)
        for position, link in enumerate(self.chain):
            tables = [] if link.turned else tables
            width = self.nodes.owned.shape[1] if link.takes_nodes and self.nodes is not None else 0
            if position == len(self.made):
                self.made.append(fold(link.mlp, tables, width, link.products, link.turned))
            folded = self.made[position]
            own, layers = layers[: len(folded.constants)], layers[len(folded.constants) :]
            own = keep_of(folded, self.graph.num_edges) if keep else own
            at_nodes = None
            if width and not kept:
                columns = folded.at_ends.forward.shape[1]
                at_nodes = empty_table(self.graph.plan.num_local, columns, self.graph.features, folded.exact)
            mlp_program = MLPProgram(program, folded, ends._replace(way=link.way), link.noise, own, again=bool(kept))
            linked.append(_Linked(link, folded, mlp_program, at_nodes, own))
            tables = [torch.empty(0, link.mlp.out_features, dtype=link.kind)]  # what the next one takes
        return linked

    def _forward(
        self, program: Program, chain: Sequence[_Linked], outs: dict[int, Operand], sums: SumsAt = NOWHERE
    ) -> Gate | None:
        """All MLPs; results go where `outs` says, those of others stay in memory of the strip."""
        states = read = [table(self.edges)] if self.edges.shape[1] else []
        for position, (link, _, mlp_program, *_) in enumerate(chain):
            states = [] if link.turned else states
            out = outs.get(position)
            if out is None:
                out = program.room(STRIP, link.mlp.out_features, link.kind)
            is_summed = self.gates is None and (position == len(self.updates) - 1 or link.way != BOTH_ENDS)
            residual = states[0] if link.residual else NOTHING
            mlp_program.forward(states, chain[position].gathered, residual, out, sums if is_summed else NOWHERE)
            read, states = states, [out]
        if self.gates is None or self.nodes is None:
            return None
        scores, ends = chain[-1].mlp_program.readout, _ends(self.graph)
        if self.gates == "nodes":
            gate = Gate(program, scores, ends, nodes=shared(self.nodes.local))
        else:
            gate = Gate(program, scores, ends, rows=read[0])
        if sums is not NOWHERE:
            gate.forward(sums)
        return gate

    def _run(self, program: Program, waiting: HaloRows | None, arrived: Callable[[], None] = lambda: None) -> None:
        """Do all tiles, those that need no ghost while ghosts are on their way."""
        columns = self.graph.tiles.ranges_of_edges
        ranges, waits = np.ascontiguousarray(columns[:, :7]), columns[:, 7] > 0
        if waiting is None:
            program.run(ranges)
            return
        # MPI moves rows only while somebody calls it: poke it now and then.
        program.run(ranges[~waits], between=waiting.progress)
        waiting.finish()
        arrived()
        program.run(ranges[waits])


class _NodeProducts:
    """Products of node states with the first layers' weights for `dst` and for `src`, and the way back."""

    def __init__(self, call: EdgeCall, chain: Sequence[_Linked]) -> None:
        self._graph, self._nodes = call.graph, call.nodes
        self._taking = [position for position, linked in enumerate(chain) if linked.link.takes_nodes]
        self._chain = [chain[position] for position in self._taking]
        self._multiply(call.graph.tiles.ranges_of_nodes)

    def take_ghosts(self) -> None:
        """Multiply the ghosts' states, which have come."""
        if self._nodes is not None:
            self._nodes.finish()
            self._multiply(pieces_of(self._graph.num_owned, self._graph.plan.num_local))

    def _multiply(self, pieces: IntArray) -> None:
        program = Program()
        for _, folded, _, at_nodes, _ in self._chain:
            if at_nodes is None:
                return  # layers were kept: their products are in them
            assert self._nodes is not None
            operations.multiply(program, table(self._nodes.local), folded.at_ends.forward, table(at_nodes))
        program.run(tiles_of(pieces))

    def back(self, of_ends: Sequence[Tensor], added: Tensor | None) -> Tensor | None:
        """Gradient of the owned nodes' states, given that of their products, and more; and of the weights between."""
        if not self._chain:
            return added  # they came for their halo, or as messages
        assert self._nodes is not None
        states, program = self._nodes.local, Program()
        grad_states = empty_table(self._graph.num_owned, states.shape[1], states)
        out = room = table(grad_states)
        width = self._chain[0].folded.at_ends.back.shape[1]
        if out.width != width or added is not None:
            room = program.room(STRIP, width, out.dtype)
        partials = Partials(program, states.dtype)
        gradients = [table(of_ends[position]) for position in self._taking]
        weights = [linked.link.mlp.layers[0].linear.weight for linked in self._chain]
        firsts = [
            partials.take(states.shape[1], gradient.width, weight) for gradient, weight in zip(gradients, weights)
        ]
        partials.close()
        for number, (linked, gradient, first) in enumerate(zip(self._chain, gradients, firsts)):
            operations.multiply(program, gradient, linked.folded.at_ends.back, room, add=number > 0)
            # These columns of the weight multiplied nodes, so their partials are of tiles of nodes, not of edges.
            operations.add_outer(program, table(states), gradient, partials.at(first))
        if room is not out:
            operations.copy(program, room, out, NOTHING if added is None else table(added.contiguous()))
        partials.clear()
        program.run(tiles_of(self._graph.tiles.ranges_of_nodes))
        totals, node_width = partials.total(), states.shape[1]
        for linked, gradient, first, weight in zip(self._chain, gradients, firsts, weights):
            if weight.requires_grad:
                order = order_at_ends(*weight.shape, node_width, gradient.width // 2, linked.link.turned)
                linked.link.grad_sink.add_limbs([weight], totals.of(order, first), totals.rejected, totals.largest)
        return grad_states


def _ends(graph: LocalGraph) -> AtEnds:
    return AtEnds.of(graph.src.numpy(), graph.dst.numpy(), graph.tiles.pair_of_edge.numpy(), graph.num_owned)


class _TileSums:
    """Sums of edge rows at owned nodes, in an order that no grouping of tiles changes (`docs/same_bits.md`, rule 2).

    At `dst`: the node's edges in global order; they all lie in one tile. At `src`: first a partial per (tile, node)
    over its edges in global order, then the partials by ascending tile. Every sum starts at +0.0.
    """

    def __init__(self, graph: LocalGraph, width: int, dtype: torch.dtype) -> None:
        self._graph, self._width = graph, width
        self.at_ends = empty_table(graph.num_owned, 2 * width, graph.features, dtype)
        self._at_pairs = empty_table(len(graph.tiles.pair_rows) if width else 0, width, graph.features, dtype)

    def cleared_by(self, program: Program) -> SumsAt:
        """The sums that rows are added to; none, if this width is 0. Those of a tile are cleared before its rows."""
        if self._width == 0:
            return NOWHERE
        # No other tile has these pairs, nor edges into these nodes.
        operations.clear_rows(program, table(self._at_pairs), When.TILE_STARTS)
        operations.clear_rows(program, table(self.at_ends), When.NODES_START, self._width)
        return SumsAt(shared(self.at_ends), shared(self._at_pairs))

    def finish(self, scale: Tensor | None = None) -> Tensor:
        """The sums at `dst`, then at `src`, [num_owned, 2 width], times factors [num_owned, 2]."""
        if self._width:
            program, (starts, pairs) = Program(), self._graph.tiles.pairs_of_nodes
            kernel = operations.sum_pairs(self._width, self.at_ends.dtype)
            factors = NOTHING if scale is None else shared(scale)
            program.add(kernel, shared(starts), shared(pairs), shared(self._at_pairs), shared(self.at_ends), factors)
            program.run(tiles_of(self._graph.tiles.ranges_of_nodes))
        return self.at_ends
