"""Interaction networks of tracking in their two published orders, built on stages.

Both keep a state per node and per edge and sum new edge states at both ends of each edge, apart from each other.
Definitions follow the acorn framework (`InteractionGNN`: node then edge; `InteractionGNN2`: edge then node), with
LayerNorm and an activation after every layer. States are replaced in each iteration, or updated by residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from domainpar.nn.calls import Aggregate
from domainpar.nn.heads import EDGE, Head, Readings, pooled
from domainpar.nn.memory import ModelSize
from domainpar.nn.mlp import MLP
from domainpar.nn.noise import key_of
from domainpar.nn.on_stages import OnStages, first_nodes
from domainpar.nn.recompute import Spreads, iterated
from domainpar.nn.stages import EdgeStage, NodeStage, through
from domainpar.nn.standard import Standard
from domainpar.nn.standardise import Standardise
from domainpar.parallel.halo import CompleteHalo, Spread
from domainpar.parallel.local import LocalGraph

Order = Literal["edge-first", "node-first"]
Readouts = Literal["last", "all"]


class InteractionNetwork(OnStages):
    """Scores every edge of an event.

    With x, e the node and edge states, S_dst and S_src the sums of edge states at nodes, and [ , ] concatenation:

        both         x = encode([node features])            e = encode([x_src, x_dst, edge features])
        edge-first   e = edge([x_src, x_dst, e])            x = node([x, S_dst e, S_src e])
        node-first   x = node([x, S_dst e, S_src e])        e = edge([x_src, x_dst, e])
        head         edge-first: logit = mlp(e)             node-first: logit = mlp([x_src, x_dst, e])

    The head reads the states after the last iteration. With `readouts="all"` it does so in training after each, and the
    loss is the mean over all readouts (deep supervision). It is one head with one set of weights, as states mean the
    same after any iteration, so a network of either form takes the other's weights.

    Heads of nodes read `mlp(x)` after one more node update; those of the graph are `pooled` from that. Without any,
    the last node update of the edge-first order would reach no logit and is left out. With `residual`, nets have no
    activation after their last norm, and `e = edge(...)`, `x = node(...)` become `e = e + edge(...)`,
    `x = x + node(...)`: gradients reach the first iterations whole. The defaults learn best (`bench/RESULTS.md`);
    acorn's form is `residual=False, aggregate="sum"`.

    Args:
        node_features: Features of a node.
        edge_features: Features of an edge; may be 0.
        hidden: Width of both states, a multiple of 16.
        graph_iters: Number of iterations, at least 1.
        order: `edge-first` or `node-first`.
        shared_weights: One edge and one node net for all iterations, instead of one each.
        layers: Layers of each MLP, without the head's last.
        seed: Seed of the initial weights: a function of it alone, on every rank.
        dtype: Type of the parameters, float32 or float64.
        products: Type of edge states and of the products that make them, if not that of the parameters: torch.bfloat16.
            Node states, norms and sums keep the parameters' type.
        recompute_every: Keep the states of every K-th iteration only, and compute those between again in backward;
            None: keep all.
        dropout: Probability with which each number of a hidden layer is dropped in training.
        residual: Update states instead of replacing them.
        aggregate: How sums at nodes are scaled: `sum` not at all, `mean` by 1 / degree, `root` by 1 / sqrt(degree).
        activation: Of hidden layers: `relu`, `silu` or `tanh`.
        norm: Before each activation: `layer` or `none`.
        readouts: In training, logits of edges after the `last` iteration, or after `all` of them.
        heads: What it is read for.
        standard: Constants that standardise features; None: features are taken as they are.

    Raises:
        ValueError: If a size is out of its range, or the types do not go together.
    """

    def __init__(
        self,
        node_features: int,
        edge_features: int = 0,
        *,
        hidden: int = 64,
        graph_iters: int = 3,
        order: Order = "edge-first",
        shared_weights: bool = False,
        layers: int = 2,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        products: torch.dtype | None = None,
        recompute_every: int | None = None,
        dropout: float = 0.0,
        residual: bool = True,
        aggregate: Aggregate = "root",
        activation: str = "relu",
        norm: str = "layer",
        readouts: Readouts = "last",
        heads: Sequence[Head] = (EDGE,),
        standard: Standard | None = None,
    ) -> None:
        super().__init__()
        if graph_iters < 1 or layers < 1 or node_features < 1:
            raise ValueError(
                f"graph_iters {graph_iters}, layers {layers} and node_features {node_features} must all be at least 1."
            )
        if products not in (None, dtype) and (products, dtype) != (torch.bfloat16, torch.float32):
            raise ValueError(
                f"products in {products} do not go with parameters in {dtype}; take torch.bfloat16 with torch.float32, "
                "or None for the parameters' own type."
            )
        if standard is not None and standard.sizes != (node_features, edge_features):
            raise ValueError(
                f"constants of {standard.sizes} node and edge features do not standardise "
                f"{(node_features, edge_features)}."
            )
        generator = torch.Generator().manual_seed(seed)
        widths = (hidden,) * layers
        last, normed = "none" if residual else None, norm == "layer"

        def mlp(columns: int, *, updates: bool = False) -> MLP:
            last_activation = last if updates else None
            return MLP(columns, widths, generator, False, dropout, activation, last_activation, normed)

        def edge_stage() -> EdgeStage:
            return EdgeStage(mlp(3 * hidden, updates=True), products, residual, aggregate)

        def node_stage() -> NodeStage:
            return NodeStage(mlp(3 * hidden, updates=True), residual)

        self.node_first, self.shared_weights = order == "node-first", shared_weights
        self.standardise = None if standard is None else Standardise(standard)
        self.node_encoder = NodeStage(mlp(node_features))
        self.edge_encoder = EdgeStage(mlp(2 * hidden + edge_features), products, aggregate=aggregate)
        self.edge_stages = _per_iteration(edge_stage, graph_iters, shared_weights)
        self.heads = tuple(heads)
        others = [head for head in self.heads if head.of != "edge"]
        num_node_updates = (graph_iters if self.node_first else graph_iters - 1) + bool(others)
        self.node_stages = _per_iteration(node_stage, num_node_updates, shared_weights)
        columns = (3 if self.node_first else 1) * hidden

        def readout(columns: int, out: int) -> MLP:
            return MLP(columns, (*widths, out), generator, True, dropout, activation, norm=normed)

        self.head = EdgeStage(readout(columns, 1), products) if EDGE in self.heads else None
        # Drawn last: what else there is begins as without them.
        self.other_heads = nn.ModuleDict(
            # torch has names of its own in such a dictionary.
            {f"of_{it.name}": NodeStage(readout(hidden, it.columns * (2 if it.of == "graph" else 1))) for it in others}
        )
        self.num_readouts = 0 if self.head is None else graph_iters if readouts == "all" else 1
        edge_item_bytes = None if products is None else products.itemsize
        sizes = (hidden, graph_iters, dtype.itemsize, edge_item_bytes, None, layers, self.node_first)
        self.size: ModelSize = ModelSize(*sizes, max(self.num_readouts, 1))
        self.recompute(recompute_every)
        self.to(dtype)  # drawn in torch's default type before: networks of a seed begin alike in any type

    @property
    def num_iterations(self) -> int:
        """One for each pass over the edges, but for their encoder's and the head's."""
        return len(self.edge_stages)

    def early_in_backward(self) -> Sequence[nn.Module]:
        """All iterations but the first quarter, if each has weights of its own: its backward is longer than any sum."""
        late = -(-self.num_iterations // 4)
        return () if self.shared_weights else (*self.edge_stages[late:], *self.node_stages[late:])

    def recompute(self, every: int | None) -> None:
        """As of any network on stages; memory is predicted with it."""
        super().recompute(every)
        self.size = replace(self.size, recompute_every=every)

    def forward(self, graph: LocalGraph, halo: CompleteHalo, key: int | None = None) -> Tensor:
        """Logits of all local edges, [num_edges]. *Collective*, forward and backward.

        With a key those of all readouts, [num_readouts, num_edges], if there are several.

        Args:
            graph: The part.
            halo: Joins the parts.
            key: Of the random numbers of this call, the same on every rank, for training; None: nothing is dropped.
        """
        edges = self.read(graph, halo, key).edges
        if edges is None:
            raise ValueError("this network has no head of edges; ask it with read.")
        return edges

    def read(self, graph: LocalGraph, halo: CompleteHalo, key: int | None = None) -> Readings:
        """As of any network on parts."""
        of, count = _Keys(key), len(self.edge_stages)
        reads = range(count - (min(1, self.num_readouts) if key is None else self.num_readouts), count)
        if self.standardise is not None:
            graph = self.standardise(graph)
        first = partial(self._first_states, graph, halo, of)
        states = iterated(first, partial(self._iterate, reads, graph, of), count, self.recompute_every, halo)
        logits = [readout.squeeze(1) for readout in states.readouts]
        # Pooling is no part of an iteration: computed again, it would ask the ranks again.
        others = {
            head.name: pooled(rows, head.usual_nodes, halo.transport) if head.of == "graph" else rows
            for head, rows in zip((head for head in self.heads if head.of != "edge"), states.others)
        }
        edges = torch.stack(logits) if len(logits) > 1 else logits[0] if logits else None
        return Readings(edges, others)

    def _first_states(self, graph: LocalGraph, halo: CompleteHalo, of: _Keys) -> States:
        nodes = first_nodes(self.node_encoder, graph, halo, of("node encoder"))
        if not self.node_first:
            return States(nodes, graph.edge_features, None, [], [])
        keys = [of("edge encoder")]
        edges, sums, _, same = through([self.edge_encoder], nodes, graph.edge_features, graph, sums=True, keys=keys)
        assert same is not None
        return States(same, edges, sums, [], [])

    def _iterate(
        self, reads: range, graph: LocalGraph, of: _Keys, iterations: range, take: Callable[[], States], halo: Spreads
    ) -> States:
        """Some iterations, with a readout after those in `reads`; the last of all leaves readouts alone."""
        nodes, edges, sums, readouts, others = take()
        last, reads_nodes = len(self.edge_stages) - 1, len(self.other_heads) > 0
        for iteration in iterations:
            if self.node_first:
                nodes, sums = self._update(nodes, sums, iteration, graph, of, halo), None
            # What works on the same states of nodes is one pass over the edges: first states of edges and the first
            # iteration, unless nodes come in between, and an iteration and its readout.
            stage = self.edge_stages[iteration]
            assert isinstance(stage, EdgeStage)
            stages, keys = [stage], [of("edges", iteration)]
            if iteration == 0 and not self.node_first:
                stages, keys = [self.edge_encoder, *stages], [of("edge encoder"), *keys]
            if iteration in reads:
                assert self.head is not None
                stages, keys = [*stages, self.head], [*keys, of("head") if iteration == last else of("head", iteration)]
            goes_on = iteration < last
            own = edges is not graph.edge_features
            edges, sums, readout, same = through(
                stages, nodes, edges, graph, sums=goes_on or reads_nodes, keeps=goes_on, overwrites=own, keys=keys
            )
            assert same is not None
            nodes, readouts = same, readouts if readout is None else [*readouts, readout]
            del same  # else what replaces it would be held beside it
            if not self.node_first and goes_on:
                nodes, sums = self._update(nodes, sums, iteration, graph, of, halo), None
            elif reads_nodes and not goes_on:
                owned = self._updated(nodes, sums, len(self.node_stages) - 1, graph, of)
                others, sums = [head([owned], graph, of("head", name)) for name, head in self.other_heads.items()], None
        return States(nodes, edges, sums, readouts, others)

    def _update(
        self, nodes: Spread, sums: Tensor | None, iteration: int, graph: LocalGraph, of: _Keys, halo: Spreads
    ) -> Spread:
        """New states of nodes, on their way to the ghosts."""
        return halo.spread(self._updated(nodes, sums, iteration, graph, of))

    def _updated(self, nodes: Spread, sums: Tensor | None, number: int, graph: LocalGraph, of: _Keys) -> Tensor:
        """New states of owned nodes, by one of the node stages."""
        assert sums is not None
        states: Tensor = self.node_stages[number]([nodes.owned, sums], graph, of("nodes", number))
        return states


class _Keys:
    """Keys of the calls of a network's stages; None without a key."""

    def __init__(self, key: int | None) -> None:
        self._key = key

    def __call__(self, *which: int | str) -> int | None:
        return None if self._key is None else key_of(self._key, *which)


class States(NamedTuple):
    """State between two iterations: of nodes and edges, the sums at nodes if the next one takes them, all readouts.

    `others` are rows of the owned nodes, for each head but that of edges.
    """

    nodes: Spread
    edges: Tensor | None
    sums: Tensor | None
    readouts: list[Tensor]
    others: list[Tensor]


def _per_iteration(make: Callable[[], nn.Module], count: int, shared: bool) -> nn.ModuleList:
    """`count` modules, or one module `count` times."""
    if shared and count:
        return nn.ModuleList([make()] * count)  # the same module each time, so one set of weights
    return nn.ModuleList(make() for _ in range(count))
