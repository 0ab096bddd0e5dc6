"""Stages: one step of a model over all tiles of a part, forward and backward.

A stage gathers one tile into an aligned, zero-padded block, runs its MLP on it, puts the rows back and adds up the
sums at nodes; then the next tile. Only the stage's inputs are kept for backward, where each tile is recomputed.
The order of every sum is written out here (DESIGN section 3, rules 2 to 5): autograd only chains whole stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from domainpar.nn.gradients import TakesGradients
from domainpar.nn.mlp import COLUMNS, MLP, ROWS, padded
from domainpar.parallel.local import EdgeTile, LocalGraph, NodeTile


class NodeStage(TakesGradients):
    """A perceptron on the owned nodes: `mlp([table_1, table_2, ...])`, tile by tile."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, tables: Sequence[Tensor], graph: LocalGraph) -> Tensor:
        """Node tables, each [num_owned, width], side by side into the MLP; returns [num_owned, out]."""
        out: Tensor = _NodeTiles.apply(self, graph, len(tables), *tables, *self.trainable())  # type: ignore[no-untyped-call]
        return out


class EdgeStage(TakesGradients):
    """A perceptron on the local edges, `mlp([x_src, x_dst, edge])`, and the sums of what it makes at both ends."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(
        self, nodes: Tensor | None, edges: Tensor | None, graph: LocalGraph, sums: bool = True
    ) -> tuple[Tensor, Tensor]:
        """One step over all local edges.

        Args:
            nodes: States of owned nodes and ghosts, [num_local, node width], ghosts filled; None if the MLP takes none.
            edges: States of the local edges, [num_edges, edge width]; None if the MLP takes none.
            graph: The part.
            sums: Also sum the new edge states at their `dst` and at their `src`.

        Returns:
            New edge states [num_edges, out] and their sums, [num_local, 2 out]: at `dst`, then at `src`. Rows of ghosts
            are 0, not their sums: pass them through `hand_out` of a complete halo. [num_local, 0] without `sums`.
        """
        given = [table for table in (nodes, edges) if table is not None]
        columns = sum(table.shape[1] for table in given) + (0 if nodes is None else nodes.shape[1])
        if columns != self.mlp.in_features:
            raise ValueError(f"the MLP of this stage takes {self.mlp.in_features} columns but got {columns}.")
        nodes = given[0].new_empty(graph.plan.num_local, 0) if nodes is None else nodes
        edges = given[0].new_empty(graph.num_edges, 0) if edges is None else edges
        new_edges, at_ends = _EdgeTiles.apply(self, graph, sums, nodes, edges, *self.trainable())  # type: ignore[no-untyped-call]
        return new_edges, at_ends


class _NodeTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stage: NodeStage, graph: LocalGraph, num_tables: int, *inputs: Tensor) -> Tensor:
        tables = inputs[:num_tables]
        ctx.stage, ctx.graph, ctx.num_parameters = stage, graph, len(inputs) - num_tables
        ctx.save_for_backward(*tables)
        out = tables[0].new_empty(graph.num_owned, stage.mlp.out_features)
        for tile in graph.tiles.nodes:
            rows = stage.mlp(_node_block(tables, tile))
            out[tile.rows] = rows[: tile.num_nodes, : stage.mlp.out_features]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        stage, tables = ctx.stage, ctx.saved_tensors
        widths = [table.shape[1] for table in tables]
        grad_tables = [torch.empty_like(table) for table in tables]
        for tile in ctx.graph.tiles.nodes:
            grad_block = _block_backward(stage, _node_block(tables, tile), grads[0][tile.rows], give=True)
            columns = grad_block[: tile.num_nodes, : sum(widths)].split(widths, dim=1)
            for grad_table, grad in zip(grad_tables, columns):
                grad_table[tile.rows] = grad
        return None, None, None, *grad_tables, *[None] * ctx.num_parameters


class _EdgeTiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stage: EdgeStage, graph: LocalGraph, sums: bool, nodes: Tensor, edges: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.stage, ctx.graph, ctx.sums, ctx.num_parameters = stage, graph, sums, len(parameters)
        ctx.save_for_backward(nodes, edges)
        width = stage.mlp.out_features
        new_edges = nodes.new_empty(graph.num_edges, width)
        ends = _EndSums(graph, width if sums else 0, nodes)
        for tile in graph.tiles.edges:
            rows = stage.mlp(_edge_block(nodes, edges, graph, tile))[: tile.num_edges, :width]
            new_edges[tile.edges] = rows
            ends.add(tile, rows, rows)
        return new_edges, torch.cat(ends.finish(), dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        stage, graph, (nodes, edges) = ctx.stage, ctx.graph, ctx.saved_tensors
        width = nodes.shape[1]
        grad_edges = torch.empty_like(edges)
        ends = _EndSums(graph, width, nodes)
        for tile in graph.tiles.edges:
            grad_rows = grads[0][tile.edges]
            if ctx.sums:
                grad_rows = grad_rows + _grad_from_sums(grads[1], graph, tile)
            block = _edge_block(nodes, edges, graph, tile)
            grad_block = _block_backward(stage, block, grad_rows, give=tile.owned)[: tile.num_edges]
            ends.add(tile, at_dst=grad_block[:, width : 2 * width], at_src=grad_block[:, :width])
            grad_edges[tile.edges] = grad_block[:, 2 * width : 2 * width + edges.shape[1]]
        grad_at_dst, grad_at_src = ends.finish()
        return None, None, None, grad_at_dst + grad_at_src, grad_edges, *[None] * ctx.num_parameters


class _EndSums:
    """Sums of edge rows at owned nodes, in an order that no grouping of tiles changes (DESIGN section 3, rule 2).

    At `dst`: the node's edges in global order; they all lie in one tile. At `src`: first a partial per (tile, node)
    over its edges in global order, then the partials by ascending tile. Every sum starts at +0.0.
    """

    def __init__(self, graph: LocalGraph, width: int, like: Tensor) -> None:
        self._tiles = graph.tiles
        self._at_dst = like.new_zeros(graph.plan.num_local, width)
        self._at_src = like.new_zeros(graph.plan.num_local, width)
        self._partials = like.new_empty(len(self._tiles.pair_rows), width)

    def add(self, tile: EdgeTile, at_dst: Tensor, at_src: Tensor) -> None:
        """Take one tile's rows, [num_edges of the tile, width], to be summed at either end."""
        if self._at_dst.shape[1] == 0:
            return
        # index_add_ takes four times as long from columns of a wider block as from a copy of them.
        if tile.owned:
            self._at_dst[tile.nodes].index_add_(0, self._tiles.dst_in_tile[tile.edges], at_dst.contiguous())
        num_pairs = tile.pairs.stop - tile.pairs.start
        partials = at_src.new_zeros(num_pairs + 1, at_src.shape[1])
        partials.index_add_(0, self._tiles.pair_in_tile[tile.edges], at_src.contiguous())
        self._partials[tile.pairs] = partials[:num_pairs]

    def finish(self) -> tuple[Tensor, Tensor]:
        """The sums at `dst` and at `src`, [num_local, width] each; rows of ghosts are 0."""
        self._at_src.index_add_(0, self._tiles.pair_rows, self._partials)
        return self._at_dst, self._at_src


def _grad_from_sums(grad_sums: Tensor, graph: LocalGraph, tile: EdgeTile) -> Tensor:
    """What the sums at both ends return to one tile's edges, ghosts' rows having come from their owners."""
    width = grad_sums.shape[1] // 2
    at_dst = grad_sums[:, :width].index_select(0, graph.dst[tile.edges])
    return at_dst + grad_sums[:, width:].index_select(0, graph.src[tile.edges])


def _node_block(tables: Sequence[Tensor], tile: NodeTile) -> Tensor:
    """One tile's rows of all tables side by side, in a fresh (so 64-byte aligned) zero-padded block."""
    width = sum(table.shape[1] for table in tables)
    block = tables[0].new_zeros(padded(tile.num_nodes, ROWS), padded(width, COLUMNS))
    torch.cat([table[tile.rows] for table in tables], dim=1, out=block[: tile.num_nodes, :width])
    return block


def _edge_block(nodes: Tensor, edges: Tensor, graph: LocalGraph, tile: EdgeTile) -> Tensor:
    """[x_src, x_dst, edge] of one tile in a fresh zero-padded block."""
    width, columns = nodes.shape[1], 2 * nodes.shape[1] + edges.shape[1]
    block = nodes.new_zeros(padded(tile.num_edges, ROWS), padded(columns, COLUMNS))
    rows = block[: tile.num_edges]
    rows[:, :width] = nodes.index_select(0, graph.src[tile.edges])
    rows[:, width : 2 * width] = nodes.index_select(0, graph.dst[tile.edges])
    rows[:, 2 * width : columns] = edges[tile.edges]
    return block


def _block_backward(stage: NodeStage | EdgeStage, block: Tensor, grad_rows: Tensor, give: bool) -> Tensor:
    """Recompute one block and go back through it; returns the gradient of the block.

    Parameter gradients go to the sink if `give`: a block of a foreign tile gives none, its owner does.
    """
    block.requires_grad_()
    with torch.enable_grad():
        out = stage.mlp(block)
    grad_out = torch.zeros_like(out)
    grad_out[: len(grad_rows), : grad_rows.shape[1]] = grad_rows
    grad_block, *partials = torch.autograd.grad(out, [block, *(stage.trainable() if give else [])], grad_out)
    if give:
        stage.give(partials)
    return grad_block
