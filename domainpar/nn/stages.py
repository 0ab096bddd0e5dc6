"""Stages: one step of a model over all tiles of a part, forward and backward.

A stage is one node of autograd's graph. Inside, the order of every sum and of every exchange is written out
(`docs/same_bits.md`, rules 2 to 5): new states and sums forward; in backward first the gradient of the sums travels to
the ghosts, so that every copy of an edge has its whole gradient, then states get theirs without another exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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
        step = _NodeStep(self, graph, key, len(tables))
        out: Tensor = _OnNodes.apply(step, *tables, *self.trainable())  # type: ignore[no-untyped-call]
        return out

    def of_ghosts(self, tables: Sequence[Tensor], graph: LocalGraph, key: int | None = None) -> Tensor:
        """The same for ghosts whose tables, each [num_ghosts, width], are here anyway; returns [num_ghosts, out].

        The bits of their owners, without an exchange and without a gradient: that is their owners' to make.
        """
        _check_columns(self.mlp, sum(table.shape[1] for table in tables))
        contiguous = [table.detach().contiguous() for table in tables]
        return _NodeStep(self, graph, key, len(tables)).on(NodeRows.ghosts(graph), contiguous).forward()


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
        step = _EdgeStep(self, graph, sums, key)
        new_edges, at_ends = _OnEdges.apply(step, nodes, owned, edges, *self.trainable())  # type: ignore[no-untyped-call]
        return new_edges, at_ends


def _check_columns(mlp: MLP, columns: int) -> None:
    if columns != mlp.in_features:
        raise ValueError(f"the MLP of this stage takes {mlp.in_features} columns but got {columns}.")


# A step is all of a stage's call but its tables: those autograd keeps, on the host or computed anew if so asked.
# Parameters take part in `apply` so that `backward` is called where they alone are trained; their gradients go to the
# stage's sink.


class _NodeStep(NamedTuple):
    stage: NodeStage
    graph: LocalGraph
    key: int | None
    num_tables: int

    def on(self, nodes: NodeRows, tables: Sequence[Tensor]) -> NodeCall:
        engine = NodeBatches if tables[0].is_cuda else NodeTiles
        return engine(self.stage.mlp, nodes, tables, self.key)


class _OnNodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: _NodeStep, *tables_and_parameters: Tensor) -> Tensor:
        tables = [table.contiguous() for table in tables_and_parameters[: step.num_tables]]
        ctx.step, ctx.num_parameters = step, len(tables_and_parameters) - step.num_tables
        ctx.save_for_backward(*tables)
        return step.on(NodeRows.owned(step.graph), tables).forward()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        step: _NodeStep = ctx.step
        needed = ctx.needs_input_grad[1 : 1 + step.num_tables]
        of_tables = step.on(NodeRows.owned(step.graph), ctx.saved_tensors).backward(grads[0], step.stage, needed)
        return None, *of_tables, *[None] * ctx.num_parameters


class _EdgeStep(NamedTuple):
    stage: EdgeStage
    graph: LocalGraph
    sums: bool
    key: int | None

    def on(self, nodes: Spread | None, edges: Tensor) -> EdgeCall:
        engine = EdgeBatches if self.graph.features.is_cuda else EdgeTiles
        return engine(self.stage.mlp, self.graph, nodes, edges, self.stage.products, self.key)


class _OnEdges(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, step: _EdgeStep, nodes: Spread | None, owned: Tensor | None, edges: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        edges = edges.contiguous()
        new_edges, at_ends = step.on(nodes, edges).forward(step.sums)
        ctx.step, ctx.num_parameters = step, len(parameters)
        ctx.halo = None if nodes is None else nodes.halo
        ctx.save_for_backward(edges, *([] if nodes is None else [nodes.local]))
        return new_edges, at_ends

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        step: _EdgeStep = ctx.step
        edges, *local = ctx.saved_tensors
        # Ghosts are sent their owners' gradient of the sums: with it each copy of an edge has its whole gradient.
        of_sums = ctx.halo.spread(grads[1]) if step.sums else None
        nodes = Spread(ctx.halo, local[0][: step.graph.num_owned], local[0]) if local else None
        of_owned, of_edges = step.on(nodes, edges).backward(grads[0], of_sums, step.stage, ctx.needs_input_grad[3])
        # None for step and nodes, which are no tensors, and for parameters, whose gradients the stage's sink has.
        return None, None, of_owned, of_edges, *[None] * ctx.num_parameters
