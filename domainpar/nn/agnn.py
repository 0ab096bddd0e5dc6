"""The segment classifiers of HEP.TrkX in plain torch: attention (`agnn`) and message passing (`mpnn`).

Definitions follow sparticlesteve/heptrkx-gnn-tracking (`models/agnn.py`, `models/mpnn.py`, `models/utils.py`). Weights
begin as torch's layers do by default; there they begin as Xavier's, with biases of 0.01.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from domainpar.nn.plain import check_sizes, perceptron, sum_at


class AttentionNetwork(nn.Module):
    """Scores every edge; between scorings, each node collects its neighbours by the scores of the edges to them.

    With x the node states, sums at a node v, and [ , ] concatenation:

        begin        x = tanh(LN(linear(node features)))
        iteration    a = sigmoid(edge_net([x_src, x_dst]))
                     m_in = sum of a x_src over edges that end in v
                     m_out = sum of a x_dst over edges that start in v
                     x = x + node_net([m_in, m_out, x])
        end          logit = edge_net([x_src, x_dst])

    One edge and one node net serve all iterations. LayerNorm and Tanh follow every layer but the edge net's last.
    The defaults are those of `configs/agnn.yaml`.

    Args:
        node_features: Features of a node.
        hidden: Width of the node states and of every hidden layer.
        graph_iters: Number of iterations.
        edge_layers: Layers of the edge net.
        node_layers: Layers of the node net.
        seed: Seed of the initial weights: a function of it alone, on every rank.
        dtype: Type of the parameters.

    Attributes:
        input_network: node features -> hidden.
        edge_network: 2 hidden -> 1, the score of an edge before the sigmoid.
        node_network: 3 hidden -> hidden.

    Raises:
        ValueError: If a size is below 1.
    """

    def __init__(
        self,
        node_features: int,
        *,
        hidden: int = 64,
        graph_iters: int = 8,
        edge_layers: int = 4,
        node_layers: int = 4,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        check_sizes(
            node_features=node_features,
            hidden=hidden,
            graph_iters=graph_iters,
            edge_layers=edge_layers,
            node_layers=node_layers,
        )
        generator = torch.Generator().manual_seed(seed)

        def net(in_features: int, widths: list[int], output: str | None) -> nn.Sequential:
            return perceptron(
                in_features,
                widths,
                generator,
                hidden_activation="Tanh",
                output_activation=output,
                norms=_layer_norm,
                output_norms=_layer_norm,
            )

        self.graph_iters = graph_iters
        self.input_network = net(node_features, [hidden], "Tanh")
        self.edge_network = net(2 * hidden, [hidden] * (edge_layers - 1) + [1], None)
        self.node_network = net(3 * hidden, [hidden] * node_layers, "Tanh")
        self.to(dtype)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        """Logits of all edges, [E].

        Args:
            x: Node features, [N, node_features].
            edge_index: `src` and `dst` of each edge, int64 [2, E].
            edge_attr: Not looked at; this network has no edge features.
        """
        src, dst = edge_index[0], edge_index[1]
        x = self.input_network(x)
        for _ in range(self.graph_iters):
            x_src, x_dst = x[src], x[dst]
            a = torch.sigmoid(self.edge_network(torch.cat([x_src, x_dst], dim=-1)))
            m_in, m_out = sum_at(x, dst, a * x_src), sum_at(x, src, a * x_dst)
            x = self.node_network(torch.cat([m_in, m_out, x], dim=-1)) + x
        logits: Tensor = self.edge_network(torch.cat([x[src], x[dst]], dim=-1))
        return logits.squeeze(-1)


class MessagePassingNetwork(nn.Module):
    """Scores every edge after messages have gone along the edges both ways.

    With x the node states, [ , ] concatenation, and each edge taken twice, once from its `dst` to its `src`:

        begin        x = encode(node features)                   ReLU after every layer
        iteration    m = edge_net([x_sender, x_receiver])        LayerNorm and ReLU after every layer
                     x = x + node_net([x, sum of m at receivers])
        end          logit = mlp([x_src, x_dst])                 given edges only, 2 layers, ReLU between them

    One edge and one node net serve all iterations.

    Args:
        node_features: Features of a node.
        hidden: Width of the node states and of every hidden layer.
        graph_iters: Number of iterations.
        encoder_layers: Layers of the encoder.
        edge_layers: Layers of the edge net.
        node_layers: Layers of the node net.
        seed: Seed of the initial weights: a function of it alone, on every rank.
        dtype: Type of the parameters.

    Raises:
        ValueError: If a size is below 1.
    """

    def __init__(
        self,
        node_features: int,
        *,
        hidden: int = 64,
        graph_iters: int = 8,
        encoder_layers: int = 2,
        edge_layers: int = 4,
        node_layers: int = 4,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        check_sizes(
            node_features=node_features,
            hidden=hidden,
            graph_iters=graph_iters,
            encoder_layers=encoder_layers,
            edge_layers=edge_layers,
            node_layers=node_layers,
        )
        generator = torch.Generator().manual_seed(seed)

        def normed(layers: int) -> nn.Sequential:
            widths = [hidden] * layers
            return perceptron(
                2 * hidden, widths, generator, output_activation="ReLU", norms=_layer_norm, output_norms=_layer_norm
            )

        self.graph_iters = graph_iters
        self.node_encoder = perceptron(node_features, [hidden] * encoder_layers, generator, output_activation="ReLU")
        self.edge_network = normed(edge_layers)
        self.node_network = normed(node_layers)
        self.edge_classifier = perceptron(2 * hidden, [hidden, 1], generator)
        self.to(dtype)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        """Logits of all edges, [E].

        Args:
            x: Node features, [N, node_features].
            edge_index: `src` and `dst` of each edge, int64 [2, E].
            edge_attr: Not looked at; this network has no edge features.
        """
        src, dst = edge_index[0], edge_index[1]
        sender, receiver = torch.cat([src, dst], dim=0), torch.cat([dst, src], dim=0)
        x = self.node_encoder(x)
        for _ in range(self.graph_iters):
            messages = self.edge_network(torch.cat([x[sender], x[receiver]], dim=-1))
            x = self.node_network(torch.cat([x, sum_at(x, receiver, messages)], dim=-1)) + x
        logits: Tensor = self.edge_classifier(torch.cat([x[src], x[dst]], dim=-1))
        return logits.squeeze(-1)


def _layer_norm(width: int) -> list[nn.Module]:
    return [nn.LayerNorm(width)]
