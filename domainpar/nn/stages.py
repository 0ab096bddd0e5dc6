"""Stages: one step of a network over all tiles of a part, forward and backward.

A stage is one node of autograd's graph. Inside of it the order of every sum and every exchange is written out
(`docs/same_bits.md`, rules 2 to 5). The forward pass makes new states and sums. In the backward pass the gradient of
the sums first travels to the ghost nodes, so that every copy of an edge has its whole gradient. Then the states get
their gradients without another exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from domainpar.nn.flops import count_edges, count_rows
from domainpar.nn.gradients import GradSink
from domainpar.nn.memory import MOST_BYTES_OF_LAYERS, bytes_of_layers
from domainpar.nn.mlp import MLP
from domainpar.nn.options import Aggregate
from domainpar.nn.tilewise import EdgeGradients, EdgeResults, EdgeTiles, Link, NodeTiles, noise_of, pieces_of
from domainpar.parallel.halo import HaloRows
from domainpar.parallel.local import LocalGraph


class Stage(GradSink):
    """An MLP on all rows of a part.

    Attributes:
        mlp: The MLP.
        keeps_layers: Whether it keeps the results of its layers for backward, where they are few, instead of computing
            them again.
    """

    keeps_layers = True

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.mlp = mlp

    def trainable(self) -> list[nn.Parameter]:
        return self.mlp.trained()


class NodeStage(Stage):
    """An MLP on the owned nodes, `mlp([table_1, table_2, ...])`, computed tile by tile.

    Args:
        mlp: The MLP. If its last layer is a readout, the stage returns numbers such as logits instead of states.
        residual: Whether the result is added to the first of the tables, which has its width.
    """

    def __init__(self, mlp: MLP, residual: bool = False) -> None:
        super().__init__(mlp)
        self.residual = residual

    def forward(self, tables: Sequence[Tensor], graph: LocalGraph, key: int | None = None) -> Tensor:
        """Apply the MLP to the node tables, each [num_owned, width], side by side; returns [num_owned, out].

        With a `key` of random numbers dropout is applied, as the MLP's `dropout` says.

        Raises:
            ValueError: If the tables do not fit the MLP.
        """
        self._check(tables, graph)
        keeps_layers = _keeps_layers([self], graph.num_owned)
        step = _NodeStep(self, graph, key, len(tables), keeps_layers, [])
        out: Tensor = _OnNodes.apply(step, *tables, *self.trainable())  # type: ignore[no-untyped-call]
        return out

    @torch.no_grad()
    def of_ghosts(self, tables: Sequence[Tensor], graph: LocalGraph, key: int | None = None) -> Tensor:
        """The same for ghost nodes whose tables, each [num_ghosts, width], are on this rank; returns [num_ghosts, out].

        The results have the bits of their owners without an exchange. They have no gradient, because the owners compute
        it.
        """
        self._check(tables, graph)
        contiguous = [table.detach().contiguous() for table in tables]
        step = _NodeStep(self, graph, key, len(tables), False, [])
        count_rows(self.mlp, graph.plan.num_ghosts, 1)
        return step.bind(contiguous, of_ghosts=True).forward()[0]

    def _check(self, tables: Sequence[Tensor], graph: LocalGraph) -> None:
        _check_fits(self.mlp, sum(table.shape[1] for table in tables), graph)
        if self.residual:
            _check_residual(self.mlp, tables[0].shape[1])


class EdgeStage(Stage):
    """An MLP on the local edges, `mlp([x_src, x_dst, edge])`, and sums of its results at both ends of each edge.

    Args:
        mlp: The MLP.
        products: Type of edge states and of their products, if it is not the type of the parameters.
        residual: Whether the result is added to the edge states that come in, which have its width.
        aggregate: How sums at nodes are scaled: `sum`, `mean` or `root` (see `NetworkOptions`).
    """

    def __init__(
        self,
        mlp: MLP,
        products: torch.dtype | None = None,
        residual: bool = False,
        aggregate: Aggregate = "sum",
    ) -> None:
        super().__init__(mlp)
        self.products, self.residual, self.aggregate = products, residual, aggregate

    def forward(
        self,
        nodes: HaloRows | None,
        edges: Tensor | None,
        graph: LocalGraph,
        sums: bool = True,
        key: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Apply the MLP to all local edges. *Collective* in backward, if `sums` is set.

        Args:
            nodes: States of owned nodes, [num_owned, node width], on their way to the ghost nodes; None if the MLP
                takes none and there are no sums.
            edges: States of the local edges, [num_edges, edge width]; None if the MLP takes none.
            graph: The part.
            sums: Whether to sum the new edge states at `dst` and at `src` of each edge.
            key: Key of the random numbers of dropout; None: no dropout.

        Returns:
            New edge states, [num_edges, out], and the sums at owned nodes, [num_owned, 2 width]: at `dst`, then at
            `src`. Without `sums` these are [num_owned, 0].

        Raises:
            ValueError: If the states do not fit the MLP, or if sums are asked for without a halo, or of a readout.
        """
        results = run_chain([self], nodes, edges, graph, sums=sums, keys=[key], calls_hooks=False)
        new_edges = results.readout if self.mlp.readout else results.edges
        assert new_edges is not None
        return new_edges, results.sums


def run_chain(
    stages: Sequence[EdgeStage],
    nodes: HaloRows | None,
    edges: Tensor | None,
    graph: LocalGraph,
    *,
    sums: bool,
    keeps: bool = True,
    overwrites: bool = False,
    keys: Sequence[int | None],
    calls_hooks: bool = True,
) -> EdgeResults:
    """Apply several stages to the same node states in one pass over the edges. *Collective* in backward, with `sums`.

    The states that one stage makes for the next stay in the caches, and none of them is kept for backward.

    Args:
        stages: Each takes the edge states that the one before it made. Only the last may be a readout of them.
        nodes: States of owned nodes, [num_owned, node width], on their way to the ghost nodes; None if no stage takes
            any and there are no sums.
        edges: States of the local edges, [num_edges, edge width]; None if the first stage takes none.
        graph: The part.
        sums: Whether to sum the last edge states at `dst` and at `src` of each edge, scaled as the stage that made them
            says.
        keeps: Whether to return the last edge states as well.
        overwrites: Whether these may take the memory of `edges`, where no backward pass needs that.
        keys: Keys of the random numbers of dropout, one for each stage; None: no dropout.
        calls_hooks: Whether to call the stages one by one if one of them has a hook of torch.

    Raises:
        ValueError: If states do not fit a stage, or if sums are asked for without a halo, or of readouts alone.
    """
    if calls_hooks and any(stage._forward_hooks for stage in stages):
        return _one_by_one(stages, nodes, edges, graph, sums, keeps, keys)
    node_width, width = 0 if nodes is None else nodes.owned.shape[1], 0 if edges is None else edges.shape[1]
    chain: list[Link] = []
    for stage, key in zip(stages, keys, strict=True):
        mlp, takes_nodes = stage.mlp, stage.mlp.in_features != width
        _check_fits(mlp, width + 2 * node_width * takes_nodes, graph)
        if stage.residual:
            _check_residual(mlp, width)
        noise = noise_of(mlp, key, graph.plan.edge_ids)
        chain.append(Link(mlp, stage, takes_nodes, stage.residual, stage.products, noise))
        width = mlp.out_features
    summing = _summing(stages)
    if sums and (nodes is None or summing is None):
        raise ValueError("sums at both ends need node states and a stage that makes states; ask for none: sums=False.")
    if any(link.mlp.readout for link in chain[:-1]):
        raise ValueError("only the last of several stages may be a readout: the others make states for the next.")
    edges = graph.features.new_empty(graph.num_edges, 0) if edges is None else edges
    aggregate = stages[summing].aggregate if sums and summing is not None else None
    keeps = keeps and summing is not None
    overwrites = overwrites and not torch.is_grad_enabled()
    keeps_layers = _keeps_layers(stages, graph.num_edges)
    step = _EdgeStep(tuple(chain), graph, aggregate, keeps, overwrites, keeps_layers, [])
    parameters = [parameter for stage in stages for parameter in stage.trainable()]
    owned = None if nodes is None else nodes.owned
    results = _OnEdges.apply(step, nodes, owned, edges, *parameters)  # type: ignore[no-untyped-call]
    made = EdgeResults(*results)
    return made if nodes is None else made._replace(nodes=nodes.known_as(results[-1]))


def _one_by_one(
    stages: Sequence[EdgeStage],
    nodes: HaloRows | None,
    edges: Tensor | None,
    graph: LocalGraph,
    sums: bool,
    keeps: bool,
    keys: Sequence[int | None],
) -> EdgeResults:
    """`run_chain` for stages with hooks, which see what a module is called with and what it returns."""
    at_ends, readout, made_states = graph.features.new_empty(graph.num_owned, 0), None, False
    for position, (stage, key) in enumerate(zip(stages, keys, strict=True)):
        width, sums_here = 0 if edges is None else edges.shape[1], sums and position == _summing(stages)
        own_nodes = nodes if sums_here or stage.mlp.in_features != width else None
        made, own_sums = stage(own_nodes, edges, graph, sums_here, key)
        at_ends = own_sums if sums_here else at_ends
        if stage.mlp.readout:
            readout = made
        else:
            edges, made_states = made, True
    return EdgeResults(edges if keeps and made_states else None, at_ends, readout, nodes)


def _summing(stages: Sequence[EdgeStage]) -> int | None:
    """Which of several stages makes the sums: the last that makes states; None, if all are readouts."""
    return max((i for i, stage in enumerate(stages) if not stage.mlp.readout), default=None)


def _keeps_layers(stages: Sequence[Stage], rows: int) -> bool:
    """Whether backward of a call gets its layers instead of computing them again; no bit depends on it."""
    widths = [layer.linear.out_features for stage in stages for layer in stage.mlp.layers]
    item_bytes = stages[0].mlp.layers[0].linear.weight.itemsize
    keep = all(stage.keeps_layers for stage in stages)
    return keep and torch.is_grad_enabled() and bytes_of_layers(rows, widths, item_bytes) <= MOST_BYTES_OF_LAYERS


def _check_fits(mlp: MLP, columns: int, graph: LocalGraph) -> None:
    devices = mlp.layers[0].linear.weight.device, graph.features.device
    if any(device.type != "cpu" for device in devices):  # whose memory kernels would read all the same
        raise ValueError(
            f"stages compute on a CPU, but the network is on {devices[0]} and the part on {devices[1]}; anywhere else "
            "use the network's plain form, as any module: parallelize(network.plain, world)."
        )
    if columns != mlp.in_features:
        raise ValueError(f"the MLP of this stage takes {mlp.in_features} columns but got {columns}.")


def _check_residual(mlp: MLP, width: int) -> None:
    if mlp.readout or width != mlp.out_features:
        raise ValueError(
            f"a residual adds {mlp.out_features} columns to states of {width}, which must be as many, and no "
            "readout; give the MLP the width of the states, or residual=False."
        )


def _refuse_second_gradients() -> None:
    """In the backward pass: refuse `create_graph`, because gradients of parameters do not go through autograd here.

    Raises:
        RuntimeError: Under `create_graph`, on all ranks alike.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a gradient of a gradient (create_graph=True) through a network built on stages has no form here; take one "
            "in plain torch, as parallelize takes it, or leave create_graph out."
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

    def bind(self, tables: Sequence[Tensor], of_ghosts: bool = False) -> NodeTiles:
        graph = self.graph
        ids = graph.plan.ghost_ids if of_ghosts else graph.plan.owned_ids
        # No bit of a ghost depends on the pieces.
        pieces = pieces_of(0, graph.plan.num_ghosts) if of_ghosts else graph.tiles.ranges_of_nodes
        return NodeTiles(self.stage.mlp, ids, pieces, tables, self.stage.residual, self.key, self.made)


class _OnNodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: _NodeStep, *tables_and_parameters: Tensor) -> Tensor:
        tables = [table.contiguous() for table in tables_and_parameters[: step.num_tables]]
        ctx.step, ctx.num_parameters = step, len(tables_and_parameters) - step.num_tables
        count_rows(step.stage.mlp, step.graph.num_owned, 1)
        out, kept = step.bind(tables).forward(step.keeps_layers)
        ctx.save_for_backward(*tables, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_gradients()
        step: _NodeStep = ctx.step
        needed = ctx.needs_input_grad[1 : 1 + step.num_tables]
        saved = ctx.saved_tensors
        tables, kept = saved[: step.num_tables], saved[step.num_tables :]
        count_rows(step.stage.mlp, step.graph.num_owned, 2 if kept else 3)  # layers that were not kept are made again
        grad_tables = step.bind(tables).backward(kept, grads[0], step.stage, needed)
        step.stage.finished()
        return None, *grad_tables, *[None] * ctx.num_parameters


class _EdgeStep(NamedTuple):
    chain: tuple[Link, ...]
    graph: LocalGraph
    aggregate: Aggregate | None
    keeps: bool
    overwrites: bool
    keeps_layers: bool
    made: list[Any]

    def count_flops(self, edges: Tensor, times: int) -> None:
        """Count its operations, so many times."""
        width = edges.shape[1]
        for link in self.chain:
            count_edges(link.mlp, link.takes_nodes, width, self.graph, times)
            width = link.mlp.out_features

    def bind(self, nodes: HaloRows | None, edges: Tensor) -> EdgeTiles:
        how = self.aggregate, self.keeps, self.overwrites
        return EdgeTiles(self.chain, self.graph, nodes, edges, *how, self.made)


class _OnEdges(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, step: _EdgeStep, nodes: HaloRows | None, owned: Tensor | None, edges: Tensor, *parameters: Tensor
    ) -> tuple[Tensor | None, ...]:
        edges = edges.contiguous()
        step.count_flops(edges, 1)
        results, kept = step.bind(nodes, edges).forward(step.keeps_layers)
        ctx.set_materialize_grads(False)
        ctx.step, ctx.num_parameters = step, len(parameters)
        ctx.halo, ctx.shape_of_sums = None if nodes is None else nodes.halo, results.sums.shape
        ctx.save_for_backward(edges, *kept, *([] if nodes is None else [nodes.local]))
        ctx.num_kept = len(kept)
        return *results[:-1], owned

    @staticmethod
    def backward(
        ctx: Any,
        grad_edges: Tensor | None,
        grad_sums: Tensor | None,
        grad_readout: Tensor | None,
        grad_nodes: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        _refuse_second_gradients()
        step: _EdgeStep = ctx.step
        edges, *rest = ctx.saved_tensors
        kept, local = rest[: ctx.num_kept], rest[ctx.num_kept :]
        step.count_flops(edges, 2 if kept else 3)
        if step.aggregate is None:
            grad_sums = None  # there are none
        else:
            # Ghosts are sent their owners' gradient of the sums: with it each copy of an edge has its whole gradient.
            # Also where no rank has one: every rank takes part in every exchange.
            like = step.chain[0].mlp.layers[0].linear.weight
            grad_sums = like.new_zeros(ctx.shape_of_sums) if grad_sums is None else grad_sums
        nodes = HaloRows(ctx.halo, local[0][: step.graph.num_owned], local[0]) if local else None
        call = step.bind(nodes, edges)
        spread = None if grad_sums is None else ctx.halo.spread(call.scaled(grad_sums.contiguous()))
        given = EdgeGradients(grad_edges, spread, grad_readout, grad_nodes)
        grad_owned, grad_input = call.backward(kept, given, ctx.needs_input_grad[3])
        for link in step.chain:
            link.grad_sink.finished()
        # None for step and nodes, which are no tensors, and for parameters, whose gradients the stage's sink has.
        return None, None, grad_owned, grad_input, *[None] * ctx.num_parameters
