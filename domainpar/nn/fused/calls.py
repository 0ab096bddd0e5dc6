"""Stages on a GPU in own kernels: the same bits on any number of GPUs of one architecture.

What `batchwise` does in plain torch, in one launch for each MLP, forward and backward: see `rows`. It is the
engine of networks in float32 whose layers are not too wide, see `fused.refused`; `batchwise` is that of all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from domainpar.nn.calls import EdgeCall, EdgeGradients, EdgeResults, Link, NodeCall, scale_of_sums
from domainpar.nn.fused import between, launching
from domainpar.nn.fused.fused_mlp import (
    CHUNK,
    CHUNKS_AT_ONCE,
    Dropout,
    FusedMLP,
    blocks_of,
    chunks_of,
    multiply_nodes,
    packed,
    power_of_two,
    rows_at_once,
    shape_of,
    weight_at_ends,
    with_sums,
)
from domainpar.nn.gradients import GradSink
from domainpar.nn.kernels import BOTH_ENDS
from domainpar.parallel.integer_sums import IntegerSums
from domainpar.parallel.local import LocalGraph
from domainpar.plan import IntArray

ALIGNED = 16
"""Bytes to which tables of a kernel are aligned."""

NODES_AT_ONCE = 4
"""Nodes whose sums a program makes."""


@dataclass(frozen=True)
class FusedNodes(NodeCall):
    """An MLP on the rows of some nodes."""

    def forward(self, keep: bool = False) -> tuple[Tensor, list[Tensor]]:
        device = self.tables[0].device
        out = self.tables[0].new_empty(self.nodes.count, self.mlp.out_features)
        self.made[:] = [packed(self.mlp)]
        fused_mlp, whole = self._fused_mlp(), np.array([[0, self.nodes.count]])
        rows = fused_mlp.shape.block
        fused_mlp.forward(self.nodes.cached(f"blocks of {rows}", lambda: blocks_of(whole, rows, device)), out)
        return out, []

    def backward(
        self, kept: Sequence[Tensor], gradient: Tensor, grad_sink: GradSink, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        ranges, device = self.nodes.pieces, gradient.device
        chunks = self.nodes.cached("chunks", lambda: chunks_of(ranges, np.ones(len(ranges), np.int64), device))
        fused_mlp = self._fused_mlp()
        grad_tables, _ = fused_mlp.backward(chunks, grad_sink, gradient.contiguous(), None, BOTH_ENDS, needed)
        return [table if need else None for table, need in zip(grad_tables, needed)]

    def _fused_mlp(self) -> FusedMLP:
        shape = shape_of(self.mlp, self.tables, self.residual, None)
        (parameters,) = self.made
        noise = Dropout.of(self.noise, parameters)
        tables = tuple(map(_aligned, self.tables))
        return FusedMLP(self.mlp, shape, tables, parameters, noise)


@dataclass(frozen=True)
class FusedEdges(EdgeCall):
    """MLPs on the local edges."""

    def forward(self, keep: bool = False) -> tuple[EdgeResults, list[Tensor]]:
        self.made[:] = [packed(link.mlp) for link in self.chain]
        tables = self._compute()
        states, readout = self._results(tables)
        sums = self.edges.new_empty(self.graph.num_owned, 0, dtype=self.chain[0].exact)
        if self.aggregate is not None:
            sums = self._sums(states, readout)
        # What an MLP makes for the next is computed again in backward: that costs less than its memory would.
        return EdgeResults(states[0] if self.keeps and states else None, sums, readout), []

    def backward(
        self, kept: Sequence[Tensor], given: EdgeGradients, needed: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        tables = self._compute(but_last=self.gates is None)
        grad_sums = None
        if given.sums is not None:
            given.sums.finish()
            grad_sums = given.sums.local
        grad_nodes = given.nodes
        upstream: list[Tensor | None] = [None] * len(self.chain)
        readout, grad_messages = self._results(tables)[1], None
        if self.readout is not None:
            # Of several readouts it is a piece of one table.
            upstream[-1] = grad_readout = None if given.readout is None else _aligned(given.readout.contiguous())
            if self.gates == "nodes" and grad_sums is not None:
                upstream[-1] = self._of_gates(readout, grad_sums, grad_readout)
                grad_nodes = _added(grad_nodes, self._gated_back(readout, grad_sums))
            if self.gates == "edges" and grad_sums is not None:
                upstream[-1], grad_messages = self._of_gates_of_edges(tables, grad_sums, grad_readout)
        summed = self._summed if grad_sums is not None and self.gates is None else ()
        for position in self._summed:
            upstream[position] = given.edges
        grad_edges: Tensor | None = None
        if grad_messages is not None and self._summed:
            upstream[self._summed[-1]] = _added(given.edges, grad_messages)
        elif grad_messages is not None:  # of the states that came in
            grad_edges = grad_messages
        chunks = chunks_of_edges(self.graph)
        for position in reversed(range(len(self.chain))):
            link, grad_out = self.chain[position], upstream[position]
            at_ends = grad_sums if position in summed else None
            if grad_out is None and at_ends is None:
                continue
            fused_mlp = self._fused_mlp(position, self._input(position, tables))
            before = 0 if link.turned else position
            needs = [before > 0 or needed] * len(fused_mlp.tables)
            grad_out = None if grad_out is None else grad_out.contiguous()
            grad_tables, grad_product = fused_mlp.backward(chunks, link.grad_sink, grad_out, at_ends, link.way, needs)
            if fused_mlp.products is not None:
                grad_nodes = self._products_back(link, fused_mlp, grad_product, grad_nodes)
            # No longer needed, and as large as the edges are many: what it took and made, and gradients.
            del tables[max(position - 1, 0) :], fused_mlp, grad_product
            upstream[position] = grad_out = None
            if grad_tables and before > 0:
                upstream[position - 1] = _added(upstream[position - 1], grad_tables[0])
            elif grad_tables and needed:
                grad_edges = _added(grad_edges, grad_tables[0])
        return grad_nodes, torch.zeros_like(self.edges) if grad_edges is None and needed else grad_edges

    def _compute(self, but_last: bool = False) -> list[Tensor]:
        """What each MLP makes of all edges; those without a ghost while ghosts are on their way."""
        count = len(self.chain) - but_last
        tables = [
            self.edges.new_empty(self.graph.num_edges, link.mlp.out_features, dtype=link.kind)
            for link in self.chain[:count]
        ]
        at_nodes = [self._products_of(position, slice(0, self.graph.num_owned)) for position in range(count)]

        def compute(with_ghosts: bool) -> None:
            for position in range(count):
                fused_mlp = self._fused_mlp(position, self._input(position, tables), at_nodes[position])
                fused_mlp.forward(self._blocks(with_ghosts, fused_mlp.shape.block), tables[position])

        compute(with_ghosts=False)
        if self.nodes is not None:
            self.nodes.finish()
            for position, table in enumerate(at_nodes):
                if table is not None:
                    ghosts = slice(self.graph.num_owned, self.graph.plan.num_local)
                    self._multiply(self.chain[position], position, ghosts, table)
        compute(with_ghosts=True)
        return tables

    def _input(self, position: int, tables: Sequence[Tensor]) -> Tensor:
        """The states that an MLP takes: those of the one before it."""
        return self.edges if position == 0 or self.chain[position].turned else tables[position - 1]

    @property
    def _summed(self) -> tuple[int, ...]:
        """Which MLPs make what is summed and handed on: the last update, or both ways."""
        last = len(self.updates) - 1
        if last < 0:
            return ()
        return (last - 1, last) if self.chain[-1].turned else (last,)

    def _results(self, tables: Sequence[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        states = [tables[position] for position in self._summed if position < len(tables)]
        return states, tables[-1] if self.readout is not None and len(tables) == len(self.chain) else None

    def _blocks(self, with_ghosts: bool, rows: int) -> Tensor:
        def make() -> Tensor:
            tiles = [tile.edges for tile in self.graph.tiles.edges if tile.has_ghosts == with_ghosts]
            return blocks_of(_joined([(edges.start, edges.stop) for edges in tiles]), rows, self.edges.device)

        return self.graph.cached(("blocks of edges", with_ghosts, rows), make)

    def _fused_mlp(self, position: int, states: Tensor, products: Tensor | None = None) -> FusedMLP:
        link = self.chain[position]
        tables = (states,) if states.shape[1] else ()
        shape = shape_of(link.mlp, tables, 0 if link.residual else None, link.products)
        if products is None:
            products = self._products_of(position, slice(0, self.graph.plan.num_local))
        parameters = self.made[position]
        noise = Dropout.of(link.noise, parameters)
        return FusedMLP(link.mlp, shape, tables, parameters, noise, products, (self.graph.dst, self.graph.src))

    def _products_of(self, position: int, rows: slice) -> Tensor | None:
        """Products of node states with the first weight, of which some rows are made, [num_local, 2 width]."""
        link = self.chain[position]
        if self.nodes is None or not link.takes_nodes:
            return None
        width = link.mlp.layers[0].linear.out_features
        table = self.nodes.owned.new_empty(self.graph.plan.num_local, 2 * width)
        self._multiply(link, position, rows, table)
        return table

    def _multiply(self, link: Link, position: int, rows: slice, table: Tensor) -> None:
        assert self.nodes is not None
        multiply_nodes(self.nodes.local.detach(), rows, self.made[position], link.mlp, self._columns(link), table)

    def _columns(self, link: Link) -> tuple[int, int]:
        """Where a first weight's columns for node states at `dst`, and at `src`, begin."""
        assert self.nodes is not None
        width = self.nodes.owned.shape[1]
        return (0, width) if link.turned else (width, 0)

    def _products_back(
        self, link: Link, fused_mlp: FusedMLP, grad_product: Tensor, grad_nodes: Tensor | None
    ) -> Tensor:
        """Gradient of the owned nodes' states from that of each edge's product; with what there is of it already."""
        assert self.nodes is not None
        grad_products = self._at_ends(grad_product, grad_product)
        tiles, device = self.graph.tiles.ranges_of_nodes, grad_product.device
        chunks = self.graph.cached("chunks of nodes", lambda: chunks_of(tiles, np.ones(len(tiles), np.int64), device))
        constants = weight_at_ends(link.mlp, self.nodes.owned.shape[1], self._columns(link))
        out = self.nodes.owned.new_empty(self.graph.num_owned, constants["NODES"])
        memory = out.new_empty(min(len(chunks), fused_mlp.programs), constants["WIDTH"] * constants["IN"])
        added = out if grad_nodes is None else grad_nodes.contiguous()
        for piece, sums in with_sums(chunks, link.grad_sink, link.mlp):
            launching.launch(
                between.node_products_back,
                (min(len(piece), len(memory)),),
                *(piece, len(piece), self.nodes.local.detach(), grad_products, fused_mlp.parameters, memory),
                *(added, out, *sums),
                **constants,
                **{"PIECE": min(power_of_two(constants["NODES"]), constants["BLOCK"]), "ADDS": grad_nodes is not None},
            )
        return out

    def _sums(self, states: Sequence[Tensor], readout: Tensor | None) -> Tensor:
        assert self.aggregate is not None
        if self.gates == "nodes":
            assert self.nodes is not None
            local = self.nodes.local.detach()
            return self._at_ends(local, local, readout, grad_nodes=True, scaled=True)
        own = [*states] or [self.edges]
        return self._at_ends(own[0], own[-1], readout if self.gates else None, scaled=True)

    def _at_ends(
        self,
        to_dst: Tensor,
        to_src: Tensor,
        gates: Tensor | None = None,
        grad_nodes: bool = False,
        scaled: bool = False,
    ) -> Tensor:
        """Sums at owned nodes, [num_owned, 2 width]: of rows of edges, or of those of nodes at other ends."""
        graph, width = self.graph, to_dst.shape[1]
        out = to_dst.new_empty(graph.num_owned, 2 * width, dtype=torch.float32)
        at_dst, at_src = graph.edges_at_dst, graph.edges_at_src
        scale = None
        if scaled and self.aggregate is not None:
            scale = scale_of_sums(graph, self.aggregate, out)
        launching.launch(
            between.sums_at_ends,
            (-(-graph.num_owned // NODES_AT_ONCE), 2),
            *(to_dst, to_src, at_dst.edges, at_dst.first, len(at_dst.edges)),
            *(at_src.edges, at_src.first, len(at_src.edges), graph.dst, graph.src),
            *(out if gates is None else gates, out if scale is None else scale, out, graph.num_owned),
            **{"WIDTH": width, "STRIDE": to_dst.stride(0), "PADDED": power_of_two(width), "NODES": NODES_AT_ONCE},
            **{"GRAD_NODES": grad_nodes, "GATED": gates is not None, "SCALED": scale is not None},
        )
        return out

    def _of_gates(self, readout: Tensor | None, grad_sums: Tensor, given: Tensor | None) -> Tensor:
        """Gradient of the scores that are gates of node states."""
        assert self.nodes is not None
        assert readout is not None
        graph, width = self.graph, self.nodes.owned.shape[1]
        out = readout.new_empty(graph.num_edges, 1)
        launching.launch(
            between.gates_back,
            (-(-graph.num_edges // rows_at_once(power_of_two(width))),),
            *(self.nodes.local.detach(), grad_sums, readout, out if given is None else given),
            *(graph.dst, graph.src, graph.num_edges, out),
            **{"WIDTH": width, "PADDED": power_of_two(width), "HAS_GIVEN": given is not None},
            BLOCK=rows_at_once(power_of_two(width)),
        )
        return out

    def _of_gates_of_edges(
        self, tables: Sequence[Tensor], grad_sums: Tensor, given: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Gradients of scores that are gates of edge states, and of these states as the sums take them."""
        states, readout = self._input(len(self.chain) - 1, tables), tables[-1]
        graph, width = self.graph, states.shape[1]
        out, grad_states = readout.new_empty(graph.num_edges, 1), torch.empty_like(states)
        block = rows_at_once(power_of_two(width))
        launching.launch(
            between.gates_of_edges_back,
            (-(-graph.num_edges // block),),
            *(states, grad_sums, readout, out if given is None else given),
            *(graph.dst, graph.src, graph.num_edges, grad_states, out),
            **{"WIDTH": width, "PADDED": power_of_two(width), "HAS_GIVEN": given is not None, "BLOCK": block},
        )
        return out, grad_states

    def _gated_back(self, readout: Tensor | None, grad_sums: Tensor) -> Tensor:
        """Gradient of the node states that gates weigh: what `src` sent came to `dst`, and the other way round."""
        at_dst, at_src = grad_sums.chunk(2, dim=1)
        back = self._at_ends(at_src, at_dst, readout, grad_nodes=True)
        of_dst, of_src = back.chunk(2, dim=1)
        return of_dst + of_src


def edge_losses(
    logits: Tensor, weights: Tensor, graph: LocalGraph, divisor: float, sums: IntegerSums, grad_logits: Tensor
) -> None:
    """Cross-entropy of the logits of all local edges, whose sums over chunks of owned tiles are added to `sums`.

    Args:
        logits, weights: Of the local edges, [num_edges]; see `training.loss.edge_loss`.
        graph: The part, with labels.
        divisor: Of the loss.
        sums: Of length 1.
        grad_logits: Takes the gradient of the logits.
    """
    assert graph.label is not None
    bits = int(np.float64(divisor).view(np.int64))
    for piece in chunks_of_edges(graph).split(CHUNKS_AT_ONCE):
        with sums.room_for(len(piece)) as limbs:
            arguments = (logits.contiguous(), weights.contiguous(), graph.label.contiguous(), bits, grad_logits, limbs)
            launching.launch(between.edge_losses, (len(piece),), piece, len(piece), *arguments, CHUNK=CHUNK)


def chunks_of_edges(graph: LocalGraph) -> Tensor:
    """The chunks of all local edges."""

    def make() -> Tensor:
        tiles = graph.tiles.edges
        ranges = np.array([(tile.edges.start, tile.edges.stop) for tile in tiles], np.int64).reshape(-1, 2)
        owned = np.array([tile.owned for tile in tiles], np.int64)
        return chunks_of(ranges, owned, graph.features.device)

    return graph.cached("chunks of edges", make)


def _aligned(table: Tensor) -> Tensor:
    """A table as kernels take it, wherever it begins: for what is aligned less another kernel would be compiled."""
    return table if table.data_ptr() % ALIGNED == 0 else table.clone()


def _added(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one + other


def _joined(ranges: Sequence[tuple[int, int]]) -> IntArray:
    """Ascending ranges, those that follow each other as one."""
    joined: list[list[int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1][1] = stop
        else:
            joined.append([start, stop])
    return np.array(joined, np.int64).reshape(-1, 2)
