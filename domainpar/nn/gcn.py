"""The graph convolutional network of Kipf and Welling on the whole event, in plain torch."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from domainpar.nn.plain import check_sizes, linear, perceptron, sum_at


class GraphConvolutionalNetwork(nn.Module):
    """Scores every edge, or every node, from averages over neighbourhoods.

    With x the node states, d = 1 + edges from other nodes that end in a node, and sums over those edges:

        each layer   x_v = relu(linear(x_v / d_v + sum of x_src / sqrt(d_src d_v)))
        edges        logit = mlp([x_src, x_dst]), 2 layers, ReLU between them
        nodes        the last layer makes the logits: no ReLU

    This is pyg-team/pytorch_geometric `nn/conv/gcn_conv.py` with edge weights of 1: every node has one self-loop,
    whether the event has none of its own or several; duplicate edges count each; degrees are those at `dst`. The linear
    map is applied after the sum instead of before it, which is the same but for rounding; its weight and bias are
    `lin.weight` and `bias` there.

    Args:
        node_features: Features of a node.
        hidden: Width of the node states.
        layers: Number of convolutions.
        of: `edges` or `nodes`: what to score.
        out_features: Logits of each.
        seed: Seed of the initial weights: a function of it alone, on every rank.
        dtype: Type of the parameters.

    Raises:
        ValueError: If a size is below 1, or `of` is something else.
    """

    def __init__(
        self,
        node_features: int,
        *,
        hidden: int = 64,
        layers: int = 3,
        of: Literal["edges", "nodes"] = "edges",
        out_features: int = 1,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        check_sizes(node_features=node_features, hidden=hidden, layers=layers, out_features=out_features)
        if of not in ("edges", "nodes"):
            raise ValueError(f"cannot score {of!r}; take edges or nodes.")
        generator = torch.Generator().manual_seed(seed)
        widths = [node_features, *[hidden] * layers]
        if of == "nodes":
            widths[-1] = out_features
        self.of, self.out_features = of, out_features
        self.layers = nn.ModuleList(linear(wide, width, generator) for wide, width in pairwise(widths))
        if of == "edges":
            self.head = perceptron(2 * hidden, [hidden, out_features], generator)
        self.to(dtype)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        """Logits of all edges, [E], or nodes, [N]; with several each, [E or N, out_features].

        Args:
            x: Node features, [N, node_features].
            edge_index: `src` and `dst` of each edge, int64 [2, E].
            edge_attr: Not looked at; every edge has the weight 1.
        """
        src, dst = edge_index[0], edge_index[1]
        from_other = (src != dst).to(x.dtype).unsqueeze(-1)  # every node has its one self-loop already
        scale = (sum_at(x, dst, from_other) + 1).rsqrt()
        last = len(self.layers) - 1
        for position, layer in enumerate(self.layers):
            scaled = scale * x
            x = layer(scale * (sum_at(scaled, dst, from_other * scaled[src]) + scaled))
            if position < last or self.of == "edges":
                x = torch.relu(x)
        logits: Tensor = self.head(torch.cat([x[src], x[dst]], dim=-1)) if self.of == "edges" else x
        return logits.squeeze(-1) if self.out_features == 1 else logits
