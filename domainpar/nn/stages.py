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
from domainpar.nn.calls import (
    Aggregate,
    EdgeCall,
    EdgeResults,
    Link,
    NodeCall,
    NodeRows,
    noise_of,
    scale_of_sums,
)
from domainpar.nn.gradients import TakesGradients
from domainpar.nn.memory import MOST_BYTES_OF_LAYERS, bytes_of_layers
from domainpar.nn.mlp import MLP
from domainpar.nn.tilewise import EdgeTiles, NodeTiles
from domainpar.parallel.halo import Spread
from domainpar.parallel.local import LocalGraph
from domainpar.parallel.tables import empty_table


class NodeStage(TakesGradients):
    """A perceptron on the owned nodes: `mlp([table_1, table_2, ...])`, tile by tile.

    Args:
        mlp: The perceptron.
        residual: Add its results to the first table, which is as wide: an update of states.

    Attributes:
        keeps_layers: Keep its layers for backward, where they are few, instead of computing them again.
    """

    keeps_layers = True

    def __init__(self, mlp: MLP, residual: bool = False) -> None:
        super().__init__()
        self.mlp, self.residual = mlp, residual

    def forward(self, tables: Sequence[Tensor], graph: LocalGraph, key: int | None = None) -> Tensor:
        """Node tables, each [num_owned, width], side by side into the MLP; returns [num_owned, out].

        With a key, numbers are dropped at random as the MLP's `dropout` says.

        Raises:
            ValueError: If the tables do not fit the MLP.
        """
        self._check(tables)
        step = _NodeStep(self, graph, key, len(tables), _keeps_layers([self], graph.num_owned), [])
        out: Tensor = _OnNodes.apply(step, *tables, *self.trainable())  # type: ignore[no-untyped-call]
        return out

    def of_ghosts(self, tables: Sequence[Tensor], graph: LocalGraph, key: int | None = None) -> Tensor:
        """The same for ghosts whose tables, each [num_ghosts, width], are here anyway; returns [num_ghosts, out].

        The bits of their owners, without an exchange and without a gradient: that is their owners' to make.
        """
        self._check(tables)
        contiguous = [table.detach().contiguous() for table in tables]
        step = _NodeStep(self, graph, key, len(tables), False, [])
        return step.on(NodeRows.ghosts(graph), contiguous).forward()[0]

    def _check(self, tables: Sequence[Tensor]) -> None:
        _check_columns(self.mlp, sum(table.shape[1] for table in tables))
        if self.residual:
            _check_residual(self.mlp, tables[0].shape[1])


class EdgeStage(TakesGradients):
    """A perceptron on the local edges, `mlp([x_src, x_dst, edge])`, and the sums of what it makes at both ends.

    Args:
        mlp: The perceptron.
        products: Type of edge states and of their products, if not that of the parameters.
        residual: Add its results to the edge states that come in, which are as wide.
        aggregate: How sums at nodes are scaled.

    Attributes:
        keeps_layers: Keep its layers for backward, where they are few, instead of computing them again.
    """

    keeps_layers = True

    def __init__(
        self, mlp: MLP, products: torch.dtype | None = None, residual: bool = False, aggregate: Aggregate = "sum"
    ) -> None:
        super().__init__()
        self.mlp, self.products, self.residual, self.aggregate = mlp, products, residual, aggregate

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
        width = 0 if edges is None else edges.shape[1]
        _check_columns(self.mlp, width + (0 if nodes is None else 2 * nodes.owned.shape[1]))
        results = through([self], nodes, edges, graph, sums=sums, keys=[key], calls_hooks=False)
        new_edges = results.readout if self.mlp.plain else results.edges
        assert new_edges is not None
        return new_edges, results.sums


def through(
    stages: Sequence[EdgeStage],
    nodes: Spread | None,
    edges: Tensor | None,
    graph: LocalGraph,
    *,
    sums: bool,
    keeps: bool = True,
    overwrites: bool = False,
    keys: Sequence[int | None],
    calls_hooks: bool = True,
) -> EdgeResults:
    """Several stages on the same node states in one pass over the edges. *Collective* in backward, with `sums`.

    What one stage makes for the next never leaves the caches, and nothing of it is kept for backward.

    Args:
        stages: Each takes the edge states that the one before it made. Only the last may be a plain output: it reads
            them out.
        nodes: States of owned nodes, [num_owned, node width], on their way to the ghosts; None if no stage takes any.
        edges: States of the local edges, [num_edges, edge width]; None if the first stage takes none.
        graph: The part.
        sums: Also sum the last edge states at their `dst` and at their `src`, scaled as the stage that made them says.
        keeps: Also give back these states.
        overwrites: They may take the place of `edges`, where no backward pass needs those.
        keys: Of random numbers for dropout, one for each stage; None: drop nothing.
        calls_hooks: Call the stages one by one where one of them is watched by a hook of torch.

    Raises:
        ValueError: If states do not fit a stage, or sums are asked of what knows no halo or makes no states.
    """
    if calls_hooks and any(stage._forward_hooks for stage in stages):
        return _one_by_one(stages, nodes, edges, graph, sums, keeps, keys)
    node_width, width = 0 if nodes is None else nodes.owned.shape[1], 0 if edges is None else edges.shape[1]
    chain: list[Link] = []
    for stage, key in zip(stages, keys, strict=True):
        mlp, takes_nodes = stage.mlp, stage.mlp.in_features != width
        _check_columns(mlp, width + 2 * node_width * takes_nodes)
        if stage.residual:
            _check_residual(mlp, width)
        noise = noise_of(mlp, key, graph.plan.edge_ids)
        chain.append(Link(mlp, stage, takes_nodes, stage.residual, stage.products, noise))
        width = mlp.out_features
    states = [stage for stage in stages if not stage.mlp.plain]
    if sums and (nodes is None or not states):
        raise ValueError("sums at both ends need node states and a normalised output; ask for none: sums=False.")
    if any(link.mlp.plain for link in chain[:-1]):
        raise ValueError("only the last of several stages may be a plain output: the others make states for the next.")
    edges = graph.features.new_empty(graph.num_edges, 0) if edges is None else edges
    aggregate, keeps = states[-1].aggregate if sums else None, keeps and bool(states)
    overwrites = overwrites and not torch.is_grad_enabled()
    step = _EdgeStep(tuple(chain), graph, aggregate, keeps, overwrites, _keeps_layers(stages, graph.num_edges), [])
    parameters = [parameter for stage in stages for parameter in stage.trainable()]
    owned = None if nodes is None else nodes.owned
    results = _OnEdges.apply(step, nodes, owned, edges, *parameters)  # type: ignore[no-untyped-call]
    return EdgeResults(*results)


def _one_by_one(
    stages: Sequence[EdgeStage],
    nodes: Spread | None,
    edges: Tensor | None,
    graph: LocalGraph,
    sums: bool,
    keeps: bool,
    keys: Sequence[int | None],
) -> EdgeResults:
    """`through`, for who watches each stage: hooks of a module see what it is called with and what it makes."""
    last = max((i for i, stage in enumerate(stages) if not stage.mlp.plain), default=-1)
    at_ends, readout = graph.features.new_empty(graph.num_owned, 0), None
    for position, (stage, key) in enumerate(zip(stages, keys, strict=True)):
        width = 0 if edges is None else edges.shape[1]
        own_nodes = nodes if stage.mlp.in_features != width else None
        made, own_sums = stage(own_nodes, edges, graph, sums and position == last, key)
        if stage.mlp.plain:
            readout = made
        else:
            edges, at_ends = made, own_sums if position == last else at_ends
    return EdgeResults(edges if keeps and last >= 0 else None, at_ends, readout)


def _keeps_layers(stages: Sequence[NodeStage | EdgeStage], rows: int) -> bool:
    """Whether backward of a call gets its layers instead of computing them again; no bit depends on it."""
    widths = [layer.linear.out_features for stage in stages for layer in stage.mlp.layers]
    item_bytes = stages[0].mlp.layers[0].linear.weight.itemsize
    keep = all(stage.keeps_layers for stage in stages)
    return keep and torch.is_grad_enabled() and bytes_of_layers(rows, widths, item_bytes) <= MOST_BYTES_OF_LAYERS


def _check_columns(mlp: MLP, columns: int) -> None:
    if columns != mlp.in_features:
        raise ValueError(f"the MLP of this stage takes {mlp.in_features} columns but got {columns}.")


def _check_residual(mlp: MLP, width: int) -> None:
    if mlp.plain or width != mlp.out_features:
        raise ValueError(
            f"a residual adds {mlp.out_features} columns to states of {width}, which must be as many, of a layer with "
            "a norm; give the perceptron the width of the states, or residual=False."
        )


# A step is all of a stage's call but its tables: those autograd keeps, on the host or computed anew if so asked.
# Parameters take part in `apply` so that `backward` is called where they alone are trained; their gradients go to the
# stage's sink.


class _NodeStep(NamedTuple):
    stage: NodeStage
    graph: LocalGraph
    key: int | None
    num_tables: int
    keeps_layers: bool
    made: list[Any]

    def on(self, nodes: NodeRows, tables: Sequence[Tensor]) -> NodeCall:
        engine = NodeBatches if tables[0].is_cuda else NodeTiles
        return engine(self.stage.mlp, nodes, tables, self.stage.residual, self.key, self.made)


class _OnNodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: _NodeStep, *tables_and_parameters: Tensor) -> Tensor:
        tables = [table.contiguous() for table in tables_and_parameters[: step.num_tables]]
        ctx.step, ctx.num_parameters = step, len(tables_and_parameters) - step.num_tables
        out, kept = step.on(NodeRows.owned(step.graph), tables).forward(step.keeps_layers)
        ctx.save_for_backward(*tables, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        step: _NodeStep = ctx.step
        needed = ctx.needs_input_grad[1 : 1 + step.num_tables]
        saved = ctx.saved_tensors
        tables, kept = saved[: step.num_tables], saved[step.num_tables :]
        of_tables = step.on(NodeRows.owned(step.graph), tables).backward(kept, grads[0], step.stage, needed)
        return None, *of_tables, *[None] * ctx.num_parameters


class _EdgeStep(NamedTuple):
    chain: tuple[Link, ...]
    graph: LocalGraph
    aggregate: Aggregate | None
    keeps: bool
    overwrites: bool
    keeps_layers: bool
    made: list[Any]

    def on(self, nodes: Spread | None, edges: Tensor) -> EdgeCall:
        engine = EdgeBatches if self.graph.features.is_cuda else EdgeTiles
        return engine(self.chain, self.graph, nodes, edges, self.aggregate, self.keeps, self.overwrites, self.made)


class _OnEdges(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, step: _EdgeStep, nodes: Spread | None, owned: Tensor | None, edges: Tensor, *parameters: Tensor
    ) -> EdgeResults:
        edges = edges.contiguous()
        results, kept = step.on(nodes, edges).forward(step.keeps_layers)
        ctx.set_materialize_grads(False)
        ctx.step, ctx.num_parameters = step, len(parameters)
        ctx.halo, ctx.shape_of_sums = None if nodes is None else nodes.halo, results.sums.shape
        ctx.save_for_backward(edges, *kept, *([] if nodes is None else [nodes.local]))
        ctx.num_kept = len(kept)
        return results

    @staticmethod
    def backward(
        ctx: Any, of_edges: Tensor | None, of_sums: Tensor | None, of_readout: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        step: _EdgeStep = ctx.step
        edges, *rest = ctx.saved_tensors
        kept, local = rest[: ctx.num_kept], rest[ctx.num_kept :]
        spread = None
        if step.aggregate is not None:
            # Ghosts are sent their owners' gradient of the sums: with it each copy of an edge has its whole gradient.
            # Also where no rank has one: every rank takes part in every exchange.
            like = step.chain[0].mlp.layers[0].linear.weight
            of_sums = like.new_zeros(ctx.shape_of_sums) if of_sums is None else of_sums
            scale = scale_of_sums(step.graph, step.aggregate, of_sums)
            if scale is not None:
                rows, columns = of_sums.shape
                scaled = empty_table(rows, columns, like)
                # Not -1: a part may own nothing, and then any width would fit.
                halves = (table.view(rows, 2, columns // 2) for table in (of_sums.contiguous(), scaled))
                torch.mul(next(halves), scale[..., None], out=next(halves))
                of_sums = scaled
            spread = ctx.halo.spread(of_sums)
        nodes = Spread(ctx.halo, local[0][: step.graph.num_owned], local[0]) if local else None
        needed = ctx.needs_input_grad[3]
        of_owned, of_input = step.on(nodes, edges).backward(kept, of_edges, spread, of_readout, needed)
        # None for step and nodes, which are no tensors, and for parameters, whose gradients the stage's sink has.
        return None, None, of_owned, of_input, *[None] * ctx.num_parameters
