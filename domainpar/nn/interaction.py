"""Interaction networks of tracking in their two published orders, built on stages.

Both keep a state per node and per edge and sum new edge states at both ends of each edge, apart from each other.
Definitions follow the acorn framework (`InteractionGNN`: node then edge; `InteractionGNN2`: edge then node), with
LayerNorm and ReLU after every layer and no residual.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from domainpar.nn.mlp import MLP
from domainpar.nn.stages import EdgeStage, NodeStage
from domainpar.parallel.halo import CompleteHalo
from domainpar.parallel.local import LocalGraph

Order = Literal["edge-first", "node-first"]


class InteractionNetwork(nn.Module):
    """Scores every edge of an event.

    With x, e the node and edge states, S_dst and S_src the sums of edge states at nodes, and [ , ] concatenation:

        both         x = encode([node features])            e = encode([x_src, x_dst, edge features])
        edge-first   e = edge([x_src, x_dst, e])            x = node([x, S_dst e, S_src e])
        node-first   x = node([x, S_dst e, S_src e])        e = edge([x_src, x_dst, e])
        head         edge-first: logit = mlp(e)             node-first: logit = mlp([x_src, x_dst, e])

    The last node update of the edge-first order would reach no logit and is left out.

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

    Raises:
        ValueError: If a size is out of its range.
    """

    def __init__(
        self,
        node_features: int,
        edge_features: int = 0,
        *,
        hidden: int = 64,
        graph_iters: int = 4,
        order: Order = "edge-first",
        shared_weights: bool = False,
        layers: int = 2,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if graph_iters < 1 or layers < 1 or node_features < 1:
            raise ValueError(
                f"graph_iters {graph_iters}, layers {layers} and node_features {node_features} must all be at least 1."
            )
        generator = torch.Generator().manual_seed(seed)
        widths = (hidden,) * layers

        def edge_stage(edge_width: int) -> EdgeStage:
            return EdgeStage(MLP(2 * hidden + edge_width, widths, generator))

        def node_stage() -> NodeStage:
            return NodeStage(MLP(3 * hidden, widths, generator))

        self.node_first = order == "node-first"
        self.node_encoder = NodeStage(MLP(node_features, widths, generator))
        self.edge_encoder = edge_stage(edge_features)
        self.edge_stages = _per_iteration(lambda: edge_stage(hidden), graph_iters, shared_weights)
        num_node_updates = graph_iters if self.node_first else graph_iters - 1
        self.node_stages = _per_iteration(node_stage, num_node_updates, shared_weights)
        self.head = EdgeStage(MLP((3 if self.node_first else 1) * hidden, (*widths, 1), generator, plain_output=True))
        self.to(dtype)

    def forward(self, graph: LocalGraph, halo: CompleteHalo) -> Tensor:
        """Logits of all local edges, [num_edges]. *Collective*, forward and backward."""
        x = self.node_encoder([graph.features[: graph.num_owned]], graph)
        nodes = halo.extend(x)
        edges, sums = self.edge_encoder(nodes, graph.edge_features, graph, sums=self.node_first)
        iterate = self._node_first if self.node_first else self._edge_first
        return iterate(x, nodes, edges, sums, graph, halo).squeeze(1)

    def _edge_first(
        self, x: Tensor, nodes: Tensor, edges: Tensor, sums: Tensor, graph: LocalGraph, halo: CompleteHalo
    ) -> Tensor:
        for edge_stage, node_stage in zip(self.edge_stages, self.node_stages):
            edges, sums = edge_stage(nodes, edges, graph)
            x = node_stage([x, halo.hand_out(sums)], graph)
            nodes = halo.extend(x)
        edges, _ = self.edge_stages[-1](nodes, edges, graph, sums=False)
        logits: Tensor = self.head(None, edges, graph, sums=False)[0]
        return logits

    def _node_first(
        self, x: Tensor, nodes: Tensor, edges: Tensor, sums: Tensor, graph: LocalGraph, halo: CompleteHalo
    ) -> Tensor:
        last = len(self.edge_stages) - 1
        for iteration, (node_stage, edge_stage) in enumerate(zip(self.node_stages, self.edge_stages)):
            x = node_stage([x, halo.hand_out(sums)], graph)
            nodes = halo.extend(x)
            edges, sums = edge_stage(nodes, edges, graph, sums=iteration < last)
        logits: Tensor = self.head(nodes, edges, graph, sums=False)[0]
        return logits


def _per_iteration(make: Callable[[], nn.Module], count: int, shared: bool) -> nn.ModuleList:
    """`count` modules, or one module `count` times."""
    if shared and count:
        return nn.ModuleList([make()] * count)
    return nn.ModuleList(make() for _ in range(count))
