"""Residual interaction networks of gnn_tracking, in plain torch."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from domainpar.nn.plain import check_sizes, perceptron, sum_at


class ResidualInteractionNetwork(nn.Module):
    """Scores every edge after interaction networks with residual connections of the nodes.

    With x, e the node and edge states, and [ , ] concatenation:

        begin        x_0 = relu(encode(node features))           e_0 = relu(encode(edge features))
        layer k      a = relu(x_k)
                     e_k+1 = edge_net([a_dst, a_src, relu(e_k)])
                     y = node_net([a, sum of e_k+1 at dst])
                     x_k+1 = sqrt(alpha) x_r + sqrt(1 - alpha) y
        end          logit = mlp([x_src, x_dst, e_0, ..., e_L])      of x_L

    Each layer has nets of its own, of 3 linear layers with ReLU between them; so has the mlp. Encoders have 2, without
    biases. With `skip1` r = k, the state before; with `skip_top` r is one earlier state for all layers, and x_k+1 = y
    until there is one. (There the first layer leaves out the ReLU, which does nothing to encoded states.)

    "There" is gnn-tracking/gnn_tracking, `models/edge_classifier.py` (`ECForGraphTCN`; `layers` is `L_ec`) and
    `models/resin.py`. The network ends there in w = 0.001 + 0.998 sigmoid(logit), so its scores are in that order too;
    `squash` gives w itself, for losses that expect it. A loss that takes logits must not get it.

    Args:
        node_features: Features of a node.
        edge_features: Features of an edge.
        node_dim: Width of the node states.
        edge_dim: Width of the edge states.
        hidden: Width of hidden layers; None: in each perceptron the larger one of its inputs and outputs.
        layers: Number of interaction networks.
        alpha: Share of the residual, in [0, 1].
        residual: `skip1` or `skip_top`.
        connect_to: With `skip_top`, the state r; 0 is the encoded one.
        use_node_embedding: Give the last node states to the mlp. Without them the last node net reaches no logit: it
            is kept, but not computed.
        use_intermediate_edge_embeddings: Give all edge states to the mlp, not the last alone.
        squash: Return w instead of logits.
        seed: Seed of the initial weights: a function of it alone, on every rank.
        dtype: Type of the parameters.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        node_features: int,
        edge_features: int,
        *,
        node_dim: int = 5,
        edge_dim: int = 4,
        hidden: int | None = None,
        layers: int = 3,
        alpha: float = 0.5,
        residual: Literal["skip1", "skip_top"] = "skip1",
        connect_to: int = 1,
        use_node_embedding: bool = True,
        use_intermediate_edge_embeddings: bool = True,
        squash: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        check_sizes(
            node_features=node_features,
            edge_features=edge_features,
            node_dim=node_dim,
            edge_dim=edge_dim,
            hidden=1 if hidden is None else hidden,
            layers=layers,
        )
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha {alpha:g} is not in [0, 1]; it is the share of the residual.")
        if residual not in ("skip1", "skip_top"):
            raise ValueError(f"unknown residual {residual!r}; take skip1 or skip_top.")
        if not 0 <= connect_to <= layers:
            raise ValueError(f"connect_to {connect_to} is no state of {layers} layers; take one in [0, {layers}].")
        generator = torch.Generator().manual_seed(seed)

        def net(in_features: int, out_features: int, depth: int = 3, bias: bool = True) -> nn.Sequential:
            width = max(in_features, out_features) if hidden is None else hidden
            return perceptron(in_features, [width] * (depth - 1) + [out_features], generator, bias=bias)

        self.residual, self.connect_to, self.squash = residual, connect_to, squash
        self.of_residual, self.of_new = math.sqrt(alpha), math.sqrt(1 - alpha)
        self.use_node_embedding = use_node_embedding
        self.use_intermediate_edge_embeddings = use_intermediate_edge_embeddings
        self.node_encoder = net(node_features, node_dim, depth=2, bias=False)
        self.edge_encoder = net(edge_features, edge_dim, depth=2, bias=False)
        self.edge_networks = nn.ModuleList(net(2 * node_dim + edge_dim, edge_dim) for _ in range(layers))
        self.node_networks = nn.ModuleList(net(node_dim + edge_dim, node_dim) for _ in range(layers))
        num_edge_states = layers + 1 if use_intermediate_edge_embeddings else 1
        self.head = net((2 * node_dim if use_node_embedding else 0) + num_edge_states * edge_dim, 1)
        self.to(dtype)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        """Logits of all edges, [E]; with `squash`, scores in [0.001, 0.999].

        Args:
            x: Node features, [N, node_features].
            edge_index: `src` and `dst` of each edge, int64 [2, E].
            edge_attr: Edge features, [E, edge_features].

        Raises:
            ValueError: If there are no edge features.
        """
        if edge_attr is None:
            raise ValueError("this network needs edge features and got None; pass edge_attr, [E, edge_features].")
        src, dst = edge_index[0], edge_index[1]
        x, e = torch.relu(self.node_encoder(x)), torch.relu(self.edge_encoder(edge_attr))
        top, states, last = None, [e], len(self.edge_networks) - 1
        for position, (edge_net, node_net) in enumerate(zip(self.edge_networks, self.node_networks)):
            if position == self.connect_to:
                top = x
            active = torch.relu(x)
            e = edge_net(torch.cat([active[dst], active[src], torch.relu(e)], dim=-1))
            states.append(e)
            if position < last or self.use_node_embedding:
                new = node_net(torch.cat([active, sum_at(x, dst, e)], dim=-1))
                earlier = x if self.residual == "skip1" else top
                x = new if earlier is None else self.of_residual * earlier + self.of_new * new
        to_head = states if self.use_intermediate_edge_embeddings else states[-1:]
        if self.use_node_embedding:
            to_head = [x[src], x[dst], *to_head]
        logits: Tensor = self.head(torch.cat(to_head, dim=-1)).squeeze(-1)
        return 0.001 + 0.998 * torch.sigmoid(logits) if self.squash else logits
