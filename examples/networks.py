"""Edge classifiers of tracking in plain torch, as they were published: copy one, change it, and train it with

    python -m domainpar.train --model examples.networks:AttentionNetwork

With x the node states, e the edge states, S_dst and S_src sums over the edges that end and start in a node, and [ , ]
concatenation, each network says how it encodes features, what an iteration is, and how it scores an edge.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class AttentionNetwork(nn.Module):
    """Between scorings, each node collects its neighbours by the scores of the edges to them.

        encode       x = tanh(LN(linear(node features)))
        iterate      a = sigmoid(edge_net([x_src, x_dst]))
                     x = x + node_net([S_dst a x_src, S_src a x_dst, x])
        score        logit = edge_net([x_src, x_dst])

    One edge and one node net of 4 layers each. LayerNorm and Tanh follow every layer but the edge net's last.

    From sparticlesteve/heptrkx-gnn-tracking, `models/agnn.py`. Weights begin as torch's layers do by default; there
    they begin as Xavier's, with biases of 0.01.
    """

    def __init__(self, node_features: int, hidden: int, graph_iters: int) -> None:
        super().__init__()
        self.graph_iters = graph_iters
        self.input_network = mlp([node_features, hidden], nn.Tanh, norm=True, ends=True)
        self.edge_network = mlp([2 * hidden, hidden, hidden, hidden, 1], nn.Tanh, norm=True)
        self.node_network = mlp([3 * hidden, hidden, hidden, hidden, hidden], nn.Tanh, norm=True, ends=True)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Features of hits [N, F], `src` and `dst` of edges [2, E] -> logits [E]."""
        src, dst = edge_index
        x = self.input_network(x)
        for _ in range(self.graph_iters):
            x = x + self.node_network(joined(*self.collected(x, src, dst), x))
        return self.edge_network(joined(x[src], x[dst])).squeeze(-1)

    def collected(self, x: Tensor, src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
        """Sums at both ends; apart, so that tables of edges are gone before the next ones are made."""
        x_src, x_dst = x[src], x[dst]
        a = torch.sigmoid(self.edge_network(joined(x_src, x_dst)))
        return sum_at(x, dst, a * x_src), sum_at(x, src, a * x_dst)


class MessagePassingNetwork(nn.Module):
    """Messages go along the edges both ways, before each edge is scored from its ends.

    With each edge taken twice, once from its `dst` to its `src`, and S sums at receivers:

        encode       x = encode(node features)                   2 layers, ReLU after both
        iterate      m = edge_net([x_sender, x_receiver])        4 layers, LayerNorm and ReLU after all
                     x = x + node_net([x, S m])                  the same
        score        logit = mlp([x_src, x_dst])                 given edges only, 2 layers, ReLU between them

    One edge and one node net serve all iterations. From sparticlesteve/heptrkx-gnn-tracking, `models/mpnn.py`, with
    torch's first weights as `AttentionNetwork`.
    """

    def __init__(self, node_features: int, hidden: int, graph_iters: int) -> None:
        super().__init__()
        self.graph_iters = graph_iters
        self.node_encoder = mlp([node_features, hidden, hidden], ends=True)
        self.edge_network = mlp([2 * hidden, hidden, hidden, hidden, hidden], norm=True, ends=True)
        self.node_network = mlp([2 * hidden, hidden, hidden, hidden, hidden], norm=True, ends=True)
        self.edge_classifier = mlp([2 * hidden, hidden, 1])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Features of hits [N, F], `src` and `dst` of edges [2, E] -> logits [E]."""
        src, dst = edge_index
        sender, receiver = torch.cat([src, dst]), torch.cat([dst, src])
        x = self.node_encoder(x)
        for _ in range(self.graph_iters):
            received = sum_at(x, receiver, self.edge_network(joined(x[sender], x[receiver])))
            x = x + self.node_network(joined(x, received))
        return self.edge_classifier(joined(x[src], x[dst])).squeeze(-1)


class GraphConvolutionalNetwork(nn.Module):
    """Averages over neighbourhoods, then each edge is scored from its ends.

    With d = 1 + edges from other nodes that end in a node, and the sum over those edges:

        encode       x = node features
        iterate      x_v = relu(linear(x_v / d_v + sum of x_src / sqrt(d_src d_v)))
        score        logit = mlp([x_src, x_dst])                 2 layers, ReLU between them

    Kipf and Welling as in pyg-team/pytorch_geometric, `nn/conv/gcn_conv.py`, with edge weights of 1: every node has one
    self-loop, whether the event has none of its own or several; duplicate edges count each; degrees are those at `dst`.
    The linear map is applied after the sum instead of before it, which is the same but for rounding.
    """

    def __init__(self, node_features: int, hidden: int, graph_iters: int) -> None:
        super().__init__()
        widths = [node_features, *[hidden] * graph_iters]
        self.layers = nn.ModuleList(nn.Linear(wide, width) for wide, width in pairwise(widths))
        self.head = mlp([2 * hidden, hidden, 1])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Features of hits [N, F], `src` and `dst` of edges [2, E] -> logits [E]."""
        src, dst = edge_index
        from_other = (src != dst).to(x.dtype).unsqueeze(-1)  # every node has its one self-loop already
        scale = (sum_at(x, dst, from_other) + 1).rsqrt()
        for layer in self.layers:
            x = scale * x
            x = torch.relu(layer(scale * (sum_at(x, dst, from_other * x[src]) + x)))
        return self.head(joined(x[src], x[dst])).squeeze(-1)


class ResidualInteractionNetwork(nn.Module):
    """Interaction networks with residual connections of the nodes; each iteration has nets of its own.

        encode       x_0 = relu(encode(node features))           e_0 = relu(encode(edge features))
        iterate      a = relu(x_k)                               e_k+1 = edge_net([a_dst, a_src, relu(e_k)])
                     x_k+1 = (x_k + node_net([a, S_dst e_k+1])) / sqrt(2)
        score        logit = mlp([x_src, x_dst, e_0, ..., e_L])  of x_L, with all edge states

    Nets and mlp have 3 layers, encoders 2 without biases, with ReLU between them; hidden layers are as wide as the
    larger one of inputs and outputs.

    From gnn-tracking/gnn_tracking, `models/edge_classifier.py` (`ECForGraphTCN`; `graph_iters` is `L_ec`) and
    `models/resin.py` (`skip1`, alpha 0.5). There the first iteration leaves out the ReLU, which does nothing to encoded
    states, and the network ends in 0.001 + 0.998 sigmoid(logit): its scores are in the order of these logits.
    """

    def __init__(self, node_features: int, edge_features: int, hidden: int, graph_iters: int) -> None:
        super().__init__()

        def net(columns: int, out: int, hidden_layers: int = 2, bias: bool = True) -> nn.Sequential:
            return mlp([columns, *[max(columns, out)] * hidden_layers, out], bias=bias)

        self.node_encoder = net(node_features, hidden, 1, bias=False)
        self.edge_encoder = net(edge_features, hidden, 1, bias=False)
        self.edge_networks = nn.ModuleList(net(3 * hidden, hidden) for _ in range(graph_iters))
        self.node_networks = nn.ModuleList(net(2 * hidden, hidden) for _ in range(graph_iters))
        self.head = net((graph_iters + 3) * hidden, 1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Features of hits [N, F], `src` and `dst` of edges [2, E], features of edges [E, G] -> logits [E]."""
        src, dst = edge_index
        x, e = torch.relu(self.node_encoder(x)), [torch.relu(self.edge_encoder(edge_attr))]
        for edge_network, node_network in zip(self.edge_networks, self.node_networks):
            a = torch.relu(x)
            e.append(edge_network(joined(a[dst], a[src], torch.relu(e[-1]))))
            x = math.sqrt(0.5) * x + math.sqrt(0.5) * node_network(joined(a, sum_at(x, dst, e[-1])))
        return self.head(joined(x[src], x[dst], *e)).squeeze(-1)


class GraphNetsNetwork(nn.Module):
    """Each edge has a state for each of its directions, and is scored after every iteration.

    For both directions of an edge, the sender being its `src` or its `dst`, and S the sum over all that arrive at a
    node:

        encode       x_0 = encode(node features)                 e_0 = encode(edge features), of both directions
        iterate      e = edge_net([e_0, e, x_0 and x of the receiver, of the sender])
                     x = node_net([S e, x_0, x])
        score        logit = mlp(decode(e))                      after every iteration

    Every net has 2 layers, ReLU after both; the mlp ReLU between its two. One edge and one node net serve all
    iterations; the last node update would reach no logit. In training there is a readout for each iteration and
    direction, and the loss is the mean over all; the score is that of the last iteration, along the edge.

    The interaction network of arXiv:2003.11603, in graph_nets; from the code of its authors, `heptrkx/nx_graph`. There
    graphs hold both directions with the same features; weights begin as torch's layers do here.
    """

    deep_supervision = True  # so that `train` takes the mean of the losses of all readouts

    def __init__(self, node_features: int, edge_features: int, hidden: int, graph_iters: int) -> None:
        super().__init__()
        self.graph_iters = graph_iters
        self.node_encoder = mlp([node_features, hidden, hidden], ends=True)
        self.edge_encoder = mlp([edge_features, hidden, hidden], ends=True)
        self.edge_network = mlp([6 * hidden, hidden, hidden], ends=True)
        self.node_network = mlp([3 * hidden, hidden, hidden], ends=True)
        self.edge_decoder = mlp([hidden, hidden, hidden], ends=True)
        self.edge_output = mlp([hidden, hidden, 1])

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Features of hits [N, F], `src` and `dst` of edges [2, E], features of edges [E, G] -> logits [E].

        In training those of all readouts, [E, readouts], the last one last.
        """
        src, dst = edge_index
        x = x_0 = self.node_encoder(x)
        along = against = e_0 = self.edge_encoder(edge_attr)
        readouts: list[Tensor] = []
        for k in range(self.graph_iters):
            x = joined(x_0, x)
            x_src, x_dst = x[src], x[dst]
            against = self.edge_network(joined(e_0, against, x_src, x_dst))
            along = self.edge_network(joined(e_0, along, x_dst, x_src))
            if self.training:
                readouts += [self.score(against), self.score(along)]
            if k < self.graph_iters - 1:
                x = self.node_network(joined(sum_at(x, dst, along) + sum_at(x, src, against), x))
        return joined(*readouts) if self.training else self.score(along).squeeze(-1)

    def score(self, e: Tensor) -> Tensor:
        """Logits of states, [E, 1]."""
        return self.edge_output(self.edge_decoder(e))


def mlp(
    widths: Sequence[int],
    activation: type[nn.Module] = nn.ReLU,
    norm: bool = False,
    ends: bool = False,
    bias: bool = True,
) -> nn.Sequential:
    """Linear layers from each width to the next; LayerNorm, if there is a norm, and activation follow all but the last.

    Args:
        widths: Inputs, then the outputs of each layer.
        activation: A module.
        norm: Whether there is a LayerNorm before it.
        ends: Whether they follow the last layer, too.
        bias: Whether layers have biases.
    """
    modules: list[nn.Module] = []
    for position, (wide, width) in enumerate(pairwise(widths), start=2):
        modules.append(nn.Linear(wide, width, bias))
        if ends or position < len(widths):
            modules += [nn.LayerNorm(width), activation()] if norm else [activation()]
    return nn.Sequential(*modules)


def joined(*tables: Tensor) -> Tensor:
    """Tables of the same rows side by side."""
    return torch.cat(tables, dim=-1)


def sum_at(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Sums of rows of edges at nodes, [N, width], given a table of the nodes and the node of each edge."""
    return x.new_zeros(x.size(0), values.size(-1)).index_add(0, index, values)
