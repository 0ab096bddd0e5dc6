"""Stages: one step of a model over all tiles of a part, forward and backward.

A stage is one node of autograd's graph. Inside, the order of every sum and of every exchange is written out (DESIGN
section 3, rules 2 to 5): new states and sums forward; in backward first the gradient of the sums travels to the
ghosts, so that every copy of an edge has its whole gradient, then states get theirs without another exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from domainpar.nn.batchwise import EdgeBatches, NodeBatches
from domainpar.nn.calls import EdgeCall, NodeCall, NodeRows
from domainpar.nn.gradients import TakesGradients
from domainpar.nn.mlp import MLP
from domainpar.nn.tilewise import EdgeTiles, NodeTiles
from domainpar.parallel.halo import Spread
from domainpar.parallel.local import LocalGraph


class NodeStage(TakesGradients):
    """A perceptron on the owned nodes: `mlp([table_1, table_2, ...])`, tile by tile."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, tables: Sequence[Tensor], graph: LocalGraph, key: int | None = None) -> Tensor:
        """Node tables, each [num_owned, width], side by side into the MLP; returns [num_owned, out].

        With a key, numbers are dropped at random as the MLP's `dropout` says.
        """
        _check_columns(self.mlp, sum(table.shape[1] for table in tables))
        out: Tensor = _OnNodes.apply(self, graph, key, len(tables), *tables, *self.trainable())  # type: ignore[no-untyped-call]
        return out

    def of_ghosts(self, tables: Sequence[Tensor], graph: LocalGraph, key: int | None = None) -> Tensor:
        """The same for ghosts whose tables, each [num_ghosts, width], are here anyway; returns [num_ghosts, out].

        The bits of their owners, without an exchange and without a gradient: that is their owners' to make.
        """
        _check_columns(self.mlp, sum(table.shape[1] for table in tables))
        return _on_nodes(self, NodeRows.ghosts(graph), [table.detach().contiguous() for table in tables], key).forward()


class EdgeStage(TakesGradients):
    """A perceptron on the local edges, `mlp([x_src, x_dst, edge])`, and the sums of what it makes at both ends.

    Args:
        mlp: The perceptron.
        products: Type of edge states and of their products, if not that of the parameters.
    """

    def __init__(self, mlp: MLP, products: torch.dtype | None = None) -> None:
        super().__init__()
        self.mlp, self.products = mlp, products

    def forward(
        self,
        nodes: Spread | None,
        edges: Tensor | None,
        graph: LocalGraph,
        sums: bool = True,
        key: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One step over all local edges. *Collective* in backward, with `sums`.

        Args:
            nodes: States of owned nodes, [num_owned, node width], on their way to the ghosts; None if the MLP takes
                none.
            edges: States of the local edges, [num_edges, edge width]; None if the MLP takes none.
            graph: The part.
            sums: Also sum the new edge states at their `dst` and at their `src`.
            key: Drop numbers at random, as the MLP's `dropout` says; None: drop nothing.

        Returns:
            New edge states [num_edges, out] and their sums at owned nodes, [num_owned, 2 out]: at `dst`, then at `src`.
            [num_owned, 0] without `sums`.

        Raises:
            ValueError: If the states do not fit the MLP, or sums are asked of a stage that knows no halo or of a plain
                output.
        """
        node_width = 0 if nodes is None else nodes.owned.shape[1]
        _check_columns(self.mlp, 2 * node_width + (0 if edges is None else edges.shape[1]))
        if sums and (nodes is None or self.mlp.plain):
            raise ValueError("sums at both ends need node states and a normalised output; ask for none: sums=False.")
        owned = None if nodes is None else nodes.owned
        edges = graph.features.new_empty(graph.num_edges, 0) if edges is None else edges
        new_edges, at_ends = _OnEdges.apply(self, graph, sums, key, nodes, owned, edges, *self.trainable())  # type: ignore[no-untyped-call]
        return new_edges, at_ends


def _check_columns(mlp: MLP, columns: int) -> None:
    if columns != mlp.in_features:
        raise ValueError(f"the MLP of this stage takes {mlp.in_features} columns but got {columns}.")


def _on_nodes(stage: NodeStage, nodes: NodeRows, tables: Sequence[Tensor], key: int | None) -> NodeCall:
    engine = NodeBatches if tables[0].is_cuda else NodeTiles
    return engine(stage.mlp, nodes, tables, key)


def _on_edges(stage: EdgeStage, graph: LocalGraph, nodes: Spread | None, edges: Tensor, key: int | None) -> EdgeCall:
    engine = EdgeBatches if graph.features.is_cuda else EdgeTiles
    return engine(stage.mlp, graph, nodes, edges, stage.products, key)


class _OnNodes(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stage: NodeStage, graph: LocalGraph, key: int | None, num_tables: int, *inputs: Tensor
    ) -> Tensor:
        tables = [table.contiguous() for table in inputs[:num_tables]]
        ctx.stage, ctx.graph, ctx.key, ctx.num_parameters = stage, graph, key, len(inputs) - num_tables
        ctx.save_for_backward(*tables)
        return _on_nodes(stage, NodeRows.owned(graph), tables, key).forward()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call = _on_nodes(ctx.stage, NodeRows.owned(ctx.graph), ctx.saved_tensors, ctx.key)
        of_tables = call.backward(grads[0], ctx.stage.give)
        return None, None, None, None, *of_tables, *[None] * ctx.num_parameters


class _OnEdges(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        stage: EdgeStage,
        graph: LocalGraph,
        sums: bool,
        key: int | None,
        nodes: Spread | None,
        owned: Tensor | None,
        edges: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        edges = edges.contiguous()
        out = _on_edges(stage, graph, nodes, edges, key).forward(sums)
        ctx.stage, ctx.graph, ctx.sums, ctx.key, ctx.num_parameters = stage, graph, sums, key, len(parameters)
        ctx.halo = None if nodes is None else nodes.halo
        ctx.save_for_backward(edges, *([] if nodes is None else [nodes.local]))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        edges, *local = ctx.saved_tensors
        of_sums = ctx.halo.spread(grads[1]) if ctx.sums else None
        nodes = Spread(ctx.halo, local[0][: ctx.graph.num_owned], local[0]) if local else None
        call = _on_edges(ctx.stage, ctx.graph, nodes, edges, ctx.key)
        of_owned, of_edges = call.backward(grads[0], of_sums, ctx.stage.give)
        return None, None, None, None, None, of_owned, of_edges, *[None] * ctx.num_parameters
