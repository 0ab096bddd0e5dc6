"""Stages: one step of a network over all tiles of a part, forward and backward.

A stage is one node of autograd's graph. Inside of it the order of every sum and every exchange is written out
(`docs/same_bits.md`, rules 2 to 5). The forward pass makes new states and sums. In the backward pass the gradient of
the sums first travels to the ghost nodes, so that every copy of an edge has its whole gradient. Then the states get
their gradients without another exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from domainpar.nn import COLUMN_BLOCK
from domainpar.nn.flops import count_layers
from domainpar.nn.gradients import GradSink
from domainpar.nn.mlp import MLP
from domainpar.nn.options import Aggregate
from domainpar.nn.tilewise import EdgeGradients, EdgeResults, EdgeTiles, Link, NodeTiles, noise_of, pieces_of
from domainpar.parallel.halo import HaloRows
from domainpar.parallel.local import LocalGraph

MOST_BYTES_OF_LAYERS = 2**27
"""Bytes of the layers that one stage may keep for backward on a rank."""


class Stage(GradSink):
    """An MLP on all rows of a part.

    Attributes:
        mlp: The MLP.
        residual: Whether its results are added to states that come in.
        keeps_layers: Whether it keeps the results of its layers for backward, where they are few, instead of computing
            them again.
    """

    keeps_layers = True

    def __init__(self, mlp: MLP, residual: bool) -> None:
        super().__init__()
        self.mlp, self.residual = mlp, residual

    def trainable(self) -> list[nn.Parameter]:
        return self.mlp.trained()


class NodeStage(Stage):
    """An MLP on the owned nodes, `mlp([table_1, table_2, ...])`, computed tile by tile.

    Args:
        mlp: The MLP. If its last layer is a readout, the stage returns numbers such as logits instead of states.
        residual: Whether the result is added to the first of the tables, which has its width.
    """

    def __init__(self, mlp: MLP, residual: bool = False) -> None:
        super().__init__(mlp, residual)

    def forward(self, tables: Sequence[Tensor], graph: LocalGraph, key: int | None = None) -> Tensor:
        """Apply the MLP to the node tables, each [num_owned, width], side by side; returns [num_owned, out].

        With a `key` of random numbers dropout is applied, as the MLP's `dropout` says.

        Raises:
            ValueError: If the tables do not fit the MLP.
        """
        _check_fits(self, sum(table.shape[1] for table in tables), tables[0].shape[1], graph)
        noise, keeps_layers = noise_of(self.mlp, key, graph.plan.owned_ids), _keeps_layers([self], graph.num_owned)
        call = NodeTiles(self.mlp, self, graph.tiles.ranges_of_nodes, self.residual, noise, keeps_layers)
        out: Tensor = _OnNodes.apply(call, len(tables), *tables, *self.trainable())  # type: ignore[no-untyped-call]
        return out

    @torch.no_grad()
    def run_on_ghosts(self, tables: Sequence[Tensor], graph: LocalGraph, key: int | None = None) -> Tensor:
        """The same for ghost nodes whose tables, each [num_ghosts, width], are on this rank; returns [num_ghosts, out].

        The results have the bits of their owners without an exchange. They have no gradient, because the owners compute
        it.
        """
        _check_fits(self, sum(table.shape[1] for table in tables), tables[0].shape[1], graph)
        pieces = pieces_of(0, graph.plan.num_ghosts)  # no bit depends on them
        call = NodeTiles(self.mlp, self, pieces, self.residual, noise_of(self.mlp, key, graph.plan.ghost_ids))
        return call.forward([table.detach().contiguous() for table in tables])[0]


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
        super().__init__(mlp, residual)
        self.products, self.aggregate = products, aggregate

    def scale_of_sums(self, graph: LocalGraph) -> Tensor | None:
        """Factors of sums at owned nodes, at `dst`, then at `src`, [num_owned, 2]; None if sums stay as they are."""
        aggregate, dtype = self.aggregate, self.mlp.layers[0].linear.weight.dtype
        if aggregate == "sum":
            return None

        def scale() -> Tensor:
            degrees = np.maximum(graph.plan.degrees, 1).astype(torch.empty(0, dtype=dtype).numpy().dtype)
            # Divisions and roots of numpy are rounded as IEEE 754 says: the same bits on every machine.
            return torch.from_numpy(1 / (np.sqrt(degrees) if aggregate == "root" else degrees))

        return graph.cached(("scale", aggregate, dtype), scale)

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
            ValueError: If the states do not fit the MLP, or if `sums` is set without a halo, or for a readout.
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
        ValueError: If states do not fit a stage, or if `sums` is set without a halo, or for readouts alone.
    """
    if calls_hooks and any(stage._forward_hooks for stage in stages):
        return _one_by_one(stages, nodes, edges, graph, sums, keeps, keys)
    node_width, width = 0 if nodes is None else nodes.owned.shape[1], 0 if edges is None else edges.shape[1]
    chain: list[Link] = []
    for stage, key in zip(stages, keys, strict=True):
        mlp, takes_nodes = stage.mlp, stage.mlp.in_features != width
        _check_fits(stage, width + 2 * node_width * takes_nodes, width, graph)
        noise = noise_of(mlp, key, graph.plan.edge_ids)
        chain.append(Link(mlp, stage, takes_nodes, stage.residual, stage.products, noise))
        width = mlp.out_features
    summing = _summing(stages)
    if sums and (nodes is None or summing is None):
        raise ValueError("sums at both ends need node states and a stage that makes states; ask for none: sums=False.")
    if any(link.mlp.readout for link in chain[:-1]):
        raise ValueError("only the last of several stages may be a readout: the others make states for the next.")
    edges = graph.features.new_empty(graph.num_edges, 0) if edges is None else edges
    scale = None if not sums or summing is None else stages[summing].scale_of_sums(graph)
    overwrites = overwrites and not torch.is_grad_enabled()
    keeps_layers = _keeps_layers(stages, graph.num_edges)
    call = EdgeTiles(tuple(chain), graph, sums, scale, keeps, overwrites, keeps_layers)
    parameters = [parameter for stage in stages for parameter in stage.trainable()]
    owned = None if nodes is None else nodes.owned
    results = _OnEdges.apply(call, nodes, owned, edges, *parameters)  # type: ignore[no-untyped-call]
    made = EdgeResults(*results)
    return made if nodes is None else made._replace(nodes=nodes.with_owned(results[-1]))


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
    """The stage that makes the sums: the last that makes states; None if all are readouts."""
    return max((i for i, stage in enumerate(stages) if not stage.mlp.readout), default=None)


def _keeps_layers(stages: Sequence[Stage], rows: int) -> bool:
    """Whether a call keeps its layers for backward instead of computing them again; no bit depends on it."""
    widths = [layer.linear.out_features for stage in stages for layer in stage.mlp.layers]
    # Of layers before activations, padded, and with each row the inverse of its standard deviation.
    padded = sum(-(-width // COLUMN_BLOCK) * COLUMN_BLOCK + 1 for width in widths)
    of_row = padded * stages[0].mlp.layers[0].linear.weight.itemsize
    count_layers(rows, of_row)
    keep = all(stage.keeps_layers for stage in stages)
    return keep and torch.is_grad_enabled() and rows * of_row <= MOST_BYTES_OF_LAYERS


def _check_fits(stage: Stage, columns: int, width: int, graph: LocalGraph) -> None:
    """Raise a ValueError if a stage cannot take so many columns, `width` of them of states that it updates."""
    mlp = stage.mlp
    if columns != mlp.in_features:
        raise ValueError(f"the MLP of this stage takes {mlp.in_features} columns but got {columns}.")
    if stage.residual and (mlp.readout or width != mlp.out_features):
        raise ValueError(
            f"a residual adds {mlp.out_features} columns to states of {width}, which must be as many, and no "
            "readout; give the MLP the width of the states, or residual=False."
        )
    devices = mlp.layers[0].linear.weight.device, graph.features.device
    if any(device.type != "cpu" for device in devices):  # whose memory kernels would read all the same
        raise ValueError(
            f"stages compute on a CPU, but the network is on {devices[0]} and the part on {devices[1]}; anywhere else "
            "use the network's plain form, as any module: parallelize(network.plain, world)."
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


# Parameters take part in `apply` so that `backward` is called where they alone are trained; their gradients go to the
# stage's sink.


class _OnNodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: NodeTiles, num_tables: int, *tables_and_parameters: Tensor) -> Tensor:
        tables = [table.contiguous() for table in tables_and_parameters[:num_tables]]
        ctx.call, ctx.num_tables, ctx.num_parameters = call, num_tables, len(tables_and_parameters) - num_tables
        out, kept = call.forward(tables)
        ctx.save_for_backward(*tables, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_gradients()
        saved = ctx.saved_tensors  # once: a checkpoint gives them once
        tables, kept = saved[: ctx.num_tables], saved[ctx.num_tables :]
        grad_tables = ctx.call.backward(tables, kept, grads[0], ctx.needs_input_grad[2 : 2 + ctx.num_tables])
        ctx.call.grad_sink.finished()
        return None, None, *grad_tables, *[None] * ctx.num_parameters


class _OnEdges(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: EdgeTiles, nodes: HaloRows | None, owned: Tensor | None, edges: Tensor, *parameters: Tensor
    ) -> tuple[Tensor | None, ...]:
        edges = edges.contiguous()
        results, kept = call.forward(nodes, edges)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.num_parameters = call, len(parameters)
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
        call: EdgeTiles = ctx.call
        edges, *rest = ctx.saved_tensors
        kept, local = rest[: ctx.num_kept], rest[ctx.num_kept :]
        if not call.sums:
            grad_sums = None  # there are none
        else:
            # Ghosts are sent their owners' gradient of the sums: with it each copy of an edge has its whole gradient.
            # Also where no rank has one: every rank takes part in every exchange.
            like = call.chain[0].mlp.layers[0].linear.weight
            grad_sums = like.new_zeros(ctx.shape_of_sums) if grad_sums is None else grad_sums
        nodes = HaloRows(ctx.halo, local[0][: call.graph.num_owned], local[0]) if local else None
        spread = None if grad_sums is None else ctx.halo.spread(call.scaled(grad_sums.contiguous()))
        given = EdgeGradients(grad_edges, spread, grad_readout, grad_nodes)
        grad_owned, grad_input = call.backward(nodes, edges, kept, given, ctx.needs_input_grad[3])
        for link in call.chain:
            link.grad_sink.finished()
        # None for call and nodes, which are no tensors, and for parameters, whose gradients the stage's sink has.
        return None, None, grad_owned, grad_input, *[None] * ctx.num_parameters
