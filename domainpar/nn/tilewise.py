"""Stages on CPU: a program over the tiles of a part, forward and backward.

`NodeTiles` and `EdgeTiles` hold everything of a stage's call except its tables, which autograd keeps, on the host or by
recomputation if so chosen.

For backward only a stage's inputs are kept, and each strip is computed again. On small parts its layers are kept as
well, which saves a third of the work; the bits are the same. Tiles that need no ghost node are computed first, while
ghost rows are on their way. `docs/same_bits.md`, rule 2, says why this order changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from domainpar.nn import operations
from domainpar.nn.blocks import NOWHERE, AtEnds, Folded, KeptLayer, MLPProgram, SumsAt, fold, keep_of
from domainpar.nn.flops import count_flops
from domainpar.nn.gradients import GradSink
from domainpar.nn.mlp import MLP
from domainpar.nn.noise import Noise
from domainpar.nn.partials import Partials, order_at_ends
from domainpar.nn.program import NOTHING, STRIP, Operand, Program, When, shared, table, tiles_of
from domainpar.parallel.halo import HaloRows
from domainpar.parallel.local import LocalGraph
from domainpar.parallel.tables import empty_table
from domainpar.plan import IntArray

GHOST_ROWS = 4096  # in one product; no bit depends on it


def pieces_of(first: int, stop: int) -> IntArray:
    """Rows cut into pieces of at most `GHOST_ROWS`, from and to, int64 [pieces, 2]."""
    starts = np.arange(first, stop, GHOST_ROWS)
    return np.stack([starts, np.minimum(starts + GHOST_ROWS, stop)], axis=1)


def noise_of(mlp: MLP, key: int | None, ids: IntArray) -> Noise | None:
    """Dropout of one call; none without a key."""
    return None if key is None or mlp.dropout == 0 else Noise(key, mlp.dropout, ids)


class Link(NamedTuple):
    """One MLP of a chain on edges.

    Attributes:
        mlp: Takes `[x_src, x_dst, edge]`, or `[edge]` alone.
        grad_sink: Takes the gradients of its parameters.
        takes_nodes: Whether node states come in.
        residual: Whether its results are added to the edge states that come in.
        products: Type of edge states and of their products, if not that of the parameters.
        noise: Dropout of its hidden layers.
    """

    mlp: MLP
    grad_sink: GradSink
    takes_nodes: bool
    residual: bool
    products: torch.dtype | None
    noise: Noise | None

    @property
    def kind(self) -> torch.dtype:
        """Type of its results."""
        exact = self.mlp.layers[0].linear.weight.dtype
        return exact if self.mlp.readout else self.products or exact


class EdgeResults(NamedTuple):
    """What a chain makes of the edges of a part.

    Attributes:
        edges: New edge states, [num_edges, out]; None without `keeps`.
        sums: Of them, at owned nodes, [num_owned, 2 width], at `dst`, then at `src`; [num_owned, 0] without.
        readout: Results of the last MLP, if that is a readout, [num_edges, out].
        nodes: The given nodes. A caller that goes on with these spares autograd a sum: backward of the chain adds the
            gradient of their states to its own.
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


def _like(rows: Tensor) -> Tensor:
    return empty_table(len(rows), rows.shape[1], rows)


@dataclass(frozen=True)
class NodeTiles:
    """An MLP on the rows of some nodes, piece by piece.

    Attributes:
        mlp: Takes `[table_1, table_2, ...]`, states of the nodes, [count, width] each.
        grad_sink: Takes the gradients of its parameters.
        pieces: Rows that are computed together, from and to, int64 [pieces, 2]. Those of owned nodes are tiles.
        residual: Whether the results are added to the first table.
        noise: Dropout of its hidden layers.
        keeps_layers: Whether forward keeps its layers for backward, which else computes them again.
        made: The weights as kernels take them, which forward makes and backward uses again.
    """

    mlp: MLP
    grad_sink: GradSink
    pieces: IntArray
    residual: bool = False
    noise: Noise | None = None
    keeps_layers: bool = False
    made: list[Folded] = field(default_factory=list)

    def forward(self, tables: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """New states, [count, out]; and what `backward` takes so as not to compute it again."""
        count, program, folded = len(tables[0]), Program(), fold(self.mlp, tables)
        count_flops(self.mlp, count, 1)
        self.made.append(folded)
        out = empty_table(count, self.mlp.out_features, tables[0])
        kept = keep_of(folded, count) if self.keeps_layers else []
        residual = table(tables[0]) if self.residual else NOTHING
        mlp_program = MLPProgram(program, folded, noise=self.noise, kept=kept)
        mlp_program.forward([table(rows) for rows in tables], residual=residual, out=table(out))
        program.run(tiles_of(self.pieces))
        return out, [rows for layer in kept for rows in layer]

    def backward(
        self, tables: Sequence[Tensor], kept: Sequence[Tensor], gradient: Tensor, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients of the tables.

        Args:
            tables: Those of forward.
            kept: What forward kept; may be nothing.
            gradient: Gradient of the new states.
            needed: Which tables need a gradient.
        """
        count_flops(self.mlp, len(tables[0]), 2 if kept else 3)  # layers that were not kept are made again
        (folded,), program, gradient = self.made, Program(), gradient.contiguous()
        grad_tables = [_like(rows) if is_needed else None for rows, is_needed in zip(tables, needed)]
        mlp_program = MLPProgram(program, folded, noise=self.noise, kept=_layers(kept), again=bool(kept))
        partials = Partials(program, folded.exact)
        mlp_program.take_partials(partials)
        partials.close()
        mlp_program.forward([table(rows) for rows in tables])
        grad_states = grad_tables[0] if self.residual else None
        carried = NOTHING if grad_states is None else table(grad_states)
        grad_product = mlp_program.backward(table(gradient), carried=carried)
        for position, grad_table in enumerate(grad_tables):
            if grad_table is not None:
                mlp_program.input_grad(grad_product, position, table(grad_table), add=position == 0 and self.residual)
        partials.clear()
        program.run(tiles_of(self.pieces))
        mlp_program.add_partials(partials.total(), self.grad_sink)
        return grad_tables


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


@dataclass(frozen=True)
class EdgeTiles:
    """MLPs on the local edges, each on what the one before it made, tile by tile.

    Attributes:
        chain: The MLPs. Only the last one may be a readout, of the states before it.
        graph: The part.
        sums: Whether new edge states are summed at nodes.
        scale: Factors of these sums, [num_owned, 2]: at `dst`, then at `src`; None: none.
        keeps: Whether to return new edge states.
        overwrites: Whether they may take the place of those that came.
        keeps_layers, made: As in `NodeTiles`.
    """

    chain: tuple[Link, ...]
    graph: LocalGraph
    sums: bool = False
    scale: Tensor | None = None
    keeps: bool = True
    overwrites: bool = False
    keeps_layers: bool = False
    made: list[Folded] = field(default_factory=list)

    @cached_property
    def updates(self) -> tuple[Link, ...]:
        """The MLPs that make states."""
        return self.chain[:-1] if self.chain[-1].mlp.readout else self.chain

    @property
    def readout(self) -> Link | None:
        """The one that reads them out."""
        return self.chain[-1] if self.chain[-1].mlp.readout else None

    def scaled(self, sums: Tensor) -> Tensor:
        """Sums at owned nodes, [num_owned, 2 width], or their gradient, times `scale`."""
        if self.scale is None:
            return sums
        program, out = Program(), _like(sums)
        operations.copy(program, table(sums), table(out), factors=table(self.scale))
        program.run(tiles_of(self.graph.tiles.ranges_of_nodes))
        return out

    def forward(self, nodes: HaloRows | None, edges: Tensor) -> tuple[EdgeResults, list[Tensor]]:
        """New edge states, their sums and what is read out; and what `backward` takes to compute no layer again.

        Args:
            nodes: States of owned nodes, with ghosts that came or are on their way; None if no MLP takes any.
            edges: States of the local edges, [num_edges, width].
        """
        program, graph = Program(), self.graph
        chain = self._linked(program, nodes, edges, None)
        new_edges = readout = None
        exact = chain[0].folded.exact
        outs = {}
        if self.readout is not None:
            readout = empty_table(graph.num_edges, self.readout.mlp.out_features, edges, exact)
            outs[len(chain) - 1] = table(readout)
        if self.updates and self.keeps:
            width, kind = self.updates[-1].mlp.out_features, self.updates[-1].kind
            # A strip's states are read before any of them is written.
            reuses = self.overwrites and (edges.shape[1], edges.dtype) == (width, kind)
            new_edges = edges if reuses else empty_table(graph.num_edges, width, edges, kind)
            outs[len(self.updates) - 1] = table(new_edges)
        at_ends = _TileSums(graph, self.updates[-1].mlp.out_features if self.sums else 0, exact)
        self._forward(program, chain, edges, outs, at_ends.cleared_by(program))
        products = _NodeProducts(graph, nodes, chain)
        self._run(program, nodes, products.take_ghosts)
        kept = [table for linked in chain for layer in linked.kept for table in layer]
        return EdgeResults(new_edges, at_ends.finish(self.scale), readout), kept

    def backward(
        self, nodes: HaloRows | None, edges: Tensor, kept: Sequence[Tensor], given: EdgeGradients, needed: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of the owned nodes' states and of `edges`.

        Args:
            nodes, edges: Those of forward; ghosts have come.
            kept: What forward kept; may be nothing.
            given: Gradients of the results.
            needed: Whether `edges` needs a gradient.
        """
        grad_edges, grad_sums, grad_readout, grad_nodes = given
        program, graph = Program(), self.graph
        chain = self._linked(program, nodes, edges, kept)
        products = _NodeProducts(graph, nodes, chain)
        products.take_ghosts()  # they came in forward
        partials = Partials(program, chain[0].folded.exact)
        for linked in chain:
            linked.mlp_program.take_partials(partials)
        partials.close()
        self._forward(program, chain, edges, {len(chain) - 1: NOTHING})
        grad_operand = _like(edges) if needed else None
        at_ends = [_TileSums(graph, one.folded.width * one.link.takes_nodes, one.folded.exact) for one in chain]
        # Of a state of the chain: what its readout and later states return, in memory of the strip; else the table
        # that came. An edge's gradient is that of its state and of both sums it went into: complete on every rank that
        # has a copy of it, since ghosts were sent the gradient of their owners' sums.
        gradient, grad_scores = (None if one is None else table(one.contiguous()) for one in (grad_edges, grad_readout))
        gathered = NOTHING if grad_sums is None else shared(grad_sums.local)
        for position in range(len(chain) - 1, -1, -1):
            linked = chain[position]
            reads = linked.link.mlp.readout
            grad_results = grad_scores if reads else gradient
            if grad_results is None and reads:
                at_ends[position].cleared_by(program)  # and stays 0
                continue
            if grad_results is None:
                grad_results = program.room(STRIP, linked.link.mlp.out_features, linked.folded.exact)
                operations.clear_rows(program, grad_results)
            carries = linked.link.residual or (reads and gradient is not None)
            if not linked.folded.widths:
                into = NOTHING
            elif position:
                into = program.room(STRIP, linked.folded.widths[0], linked.folded.exact)
            else:
                into = NOTHING if grad_operand is None else table(grad_operand)
            if reads and gradient is not None and into is not NOTHING:
                operations.copy(program, gradient, into)
            grad_product = linked.mlp_program.backward(
                grad_results,
                NOTHING if reads else gathered,
                into if linked.link.residual else NOTHING,
                at_ends[position].cleared_by(program),
            )
            if into is not NOTHING:
                linked.mlp_program.input_grad(grad_product, 0, into, carries)
            gradient, gathered = into, gathered if reads else NOTHING
        partials.clear()
        self._run(program, grad_sums)
        total = partials.total()
        for linked in chain:
            linked.mlp_program.add_partials(total, linked.link.grad_sink)
        if nodes is None:
            return None, grad_operand
        return products.back([sums.finish() for sums in at_ends], grad_nodes), grad_operand

    def _linked(
        self, program: Program, nodes: HaloRows | None, edges: Tensor, kept: Sequence[Tensor] | None
    ) -> list[_Linked]:
        """The chain, and its operations counted; `kept`: in backward, the layers that forward has kept, if any."""
        linked, tables, ends = [], [edges] if edges.shape[1] else [], _ends(self.graph)
        columns, num_edges, num_local = edges.shape[1], self.graph.num_edges, self.graph.plan.num_local
        layers, times = _layers(kept or ()), 1 if kept is None else 2 if kept else 3
        for position, link in enumerate(self.chain):
            count_flops(link.mlp, num_edges, times, columns, num_local)
            width = nodes.owned.shape[1] if link.takes_nodes and nodes is not None else 0
            if kept is None:
                self.made.append(fold(link.mlp, tables, width, link.products))
            folded = self.made[position]
            own, layers = layers[: len(folded.constants)], layers[len(folded.constants) :]
            own = keep_of(folded, num_edges) if kept is None and self.keeps_layers else own
            at_nodes = None
            if width and not kept:
                at_nodes = empty_table(num_local, folded.at_ends.forward.shape[1], self.graph.features, folded.exact)
            mlp_program = MLPProgram(program, folded, ends, link.noise, own, again=bool(kept))
            linked.append(_Linked(link, folded, mlp_program, at_nodes, own))
            columns = link.mlp.out_features
            tables = [torch.empty(0, columns, dtype=link.kind)]  # what the next one takes
        return linked

    def _forward(
        self,
        program: Program,
        chain: Sequence[_Linked],
        edges: Tensor,
        outs: dict[int, Operand],
        sums: SumsAt = NOWHERE,
    ) -> None:
        """All MLPs; results go where `outs` says, those of others stay in memory of the strip."""
        states = [table(edges)] if edges.shape[1] else []
        for position, (link, _, mlp_program, at_nodes, _) in enumerate(chain):
            out = outs.get(position)
            if out is None:
                out = program.room(STRIP, link.mlp.out_features, link.kind)
            is_summed = position == len(self.updates) - 1
            gathered = NOTHING if at_nodes is None else shared(at_nodes)
            residual = states[0] if link.residual else NOTHING
            mlp_program.forward(states, gathered, residual, out, sums if is_summed else NOWHERE)
            states = [out]

    def _run(self, program: Program, waiting: HaloRows | None, arrived: Callable[[], None] = lambda: None) -> None:
        """Do all tiles, those that need no ghost while ghosts are on their way."""
        columns = self.graph.tiles.ranges_of_edges
        ranges, waits = np.ascontiguousarray(columns[:, :7]), columns[:, 7] > 0
        if waiting is None:
            program.run(ranges)
            return
        # MPI moves rows only while it is called: call it now and then.
        program.run(ranges[~waits], between=waiting.progress)
        waiting.finish()
        arrived()
        program.run(ranges[waits])


class _NodeProducts:
    """Products of node states with the first layers' weights for `dst` and for `src`, and the way back."""

    def __init__(self, graph: LocalGraph, nodes: HaloRows | None, chain: Sequence[_Linked]) -> None:
        self._graph, self._nodes = graph, nodes
        self._taking = [position for position, linked in enumerate(chain) if linked.link.takes_nodes]
        self._chain = [chain[position] for position in self._taking]
        self._multiply(graph.tiles.ranges_of_nodes)

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
            return added  # they came for their halo
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
                order = order_at_ends(*weight.shape, node_width, gradient.width // 2)
                linked.link.grad_sink.add_limbs([weight], totals.take(order, first), totals.rejected, totals.largest)
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
