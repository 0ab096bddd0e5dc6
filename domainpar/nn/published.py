"""The published edge classifiers of tracking, in plain torch: one skeleton and a page of mathematics each.

With x the node states, e the edge states, S_dst and S_src sums over the edges that end and start in a node, and [ , ]
concatenation, each network says how it encodes features, what an iteration is, and how it scores an edge. Only width,
depth and seed can be chosen; all else is as published. A network with other options is a user's own module.

Networks here know nothing of ranks or tiles: `nn.adapt` runs them on a part of an event by watching each call of torch;
`nn.on_stages` builds some of stages, with the same parameters.
That is why they keep to few: rows of nodes by index, `torch.cat` of columns, functions of single numbers or rows,
torch's layers and `sum_at`. The number of nodes is only ever `x.size(0)`, the rows of a new table.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn


class EndNodes(NamedTuple):
    """Nodes at the two ends of each edge, int64 [E]."""

    src: Tensor
    dst: Tensor


class PublishedNetwork(nn.Module):
    """Encodes an event, iterates, and scores every edge.

    Args:
        node_features: Features of a node.
        edge_features: Features of an edge; most networks do not look at them.
        hidden: Width of states and of hidden layers.
        graph_iters: Number of iterations.
        seed: Seed of the initial weights: a function of it alone, on every rank.

    Raises:
        ValueError: If a size is below 1.
    """

    needs_edge_features = False

    def __init__(
        self, node_features: int, edge_features: int = 0, *, hidden: int, graph_iters: int, seed: int = 0
    ) -> None:
        super().__init__()
        sizes = {"node_features": node_features, "hidden": hidden, "graph_iters": graph_iters}
        if self.needs_edge_features:
            sizes["edge_features"] = edge_features
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1.")
        self.edge_features, self.graph_iters = edge_features, graph_iters
        self.build(node_features, hidden, torch.Generator().manual_seed(seed))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        """Logits of all edges, [E]; of a network with several readouts in training, [E, readouts].

        Args:
            x: Node features, [N, node_features].
            edge_index: `src` and `dst` of each edge, int64 [2, E].
            edge_attr: Edge features, [E, edge_features].

        Raises:
            ValueError: If the network needs edge features and there are none.
        """
        return self.logits(x, edge_attr, EndNodes(edge_index[0], edge_index[1])).squeeze(-1)

    @property
    def takes_edge_features(self) -> bool:
        """Whether logits depend on `edge_attr`: of some networks that is as their sizes are."""
        return self.needs_edge_features

    @abstractmethod
    def build(self, node_features: int, hidden: int, generator: Generator) -> None:
        """Make the MLPs, in the order in which their weights are drawn."""

    @abstractmethod
    def logits(self, x: Tensor, edge_attr: Tensor | None, ends: EndNodes) -> Tensor:
        """Logits, [E, 1], or [E, readouts]."""

    def given(self, edge_attr: Tensor | None) -> Tensor:
        """The edge features of a network that cannot do without.

        Raises:
            ValueError: If there are none.
        """
        if edge_attr is None:
            raise ValueError(f"this network needs {self.edge_features} edge features and got None; pass edge_attr.")
        return edge_attr


class InteractionGNN(PublishedNetwork):
    """`acorn`: nodes first, then edges with the new node states; one node and one edge net serve all iterations.

        encode       x = encode(node features)                   e = encode([x_src, x_dst])
        iterate      x = node_net([x, S_dst e, S_src e])         e = edge_net([x_src, x_dst, e])
        score        logit = mlp([x_src, x_dst, e])

    Nets have 2 layers, the mlp 3. LayerNorm without affine parameters and SiLU follow hidden layers, Tanh last ones,
    nothing the mlp's. There are no residuals.

    From GNN4ITkTeam/CommonFramework, `acorn/stages/edge_classifier/models/interaction_gnn.py`, as in its Example_3.
    """

    def build(self, node_features: int, hidden: int, generator: Generator) -> None:
        def net(columns: int) -> nn.Sequential:
            return plain_mlp(generator, [columns, hidden, hidden], normed, lambda _: [nn.Tanh()])

        def normed(width: int) -> list[nn.Module]:
            return [nn.LayerNorm(width, elementwise_affine=False), nn.SiLU()]

        self.node_encoder, self.edge_encoder = net(node_features), net(2 * hidden)
        self.edge_networks = nn.ModuleList([net(3 * hidden)])
        self.node_networks = nn.ModuleList([net(3 * hidden)])
        self.output_edge_classifier = plain_mlp(generator, [3 * hidden, hidden, hidden, 1], normed)

    def logits(self, x: Tensor, edge_attr: Tensor | None, ends: EndNodes) -> Tensor:
        x = self.node_encoder(x)
        e = apply_net(self.edge_encoder, *at_ends(x, ends))
        for _ in range(self.graph_iters):
            x = apply_net(self.node_networks[0], x, sum_at(x, ends.dst, e), sum_at(x, ends.src, e))
            e = apply_net(self.edge_networks[0], *at_ends(x, ends), e)
        return apply_net(self.output_edge_classifier, *at_ends(x, ends), e)


class InteractionGNN2(PublishedNetwork):
    """`acorn2`: edges first, then nodes with the new edge states; each iteration has nets of its own.

        encode       x_0 = encode(node features)                 e_0 = encode(edge features), or encode([x_src, x_dst])
        iterate      x = [x, x_0]                                e = [e, e_0]
                     e = edge_net([e, x_src, x_dst])             x = node_net([S_dst e, S_src e, x])
        score        logit = mlp(decode(e))

    Nets have 3 layers, the mlp 2. BatchNorm over all rows of the event, in training or not, and ReLU follow hidden
    layers, ReLU last ones, nothing the mlp's. torch refuses to norm a single row, so neither nodes nor edges may be
    just one. The last node update would reach no logit and is not computed; its net is kept, so that weights match
    acorn's, and gets no gradient.

    From GNN4ITkTeam/CommonFramework, as `InteractionGNN`; options of CTD_2023. What its forward pass does to features
    of strip endcaps is left out: copy the first 4 over the other 8 of hits with `hit_region` 2 or 6 beforehand.
    """

    @property
    def takes_edge_features(self) -> bool:
        """If there are any."""
        return self.edge_features > 0

    def build(self, node_features: int, hidden: int, generator: Generator) -> None:
        def net(columns: int) -> nn.Sequential:
            return plain_mlp(generator, [columns, hidden, hidden, hidden], normed, lambda _: [nn.ReLU()])

        def normed(width: int) -> list[nn.Module]:
            return [nn.BatchNorm1d(width, eps=6e-5, track_running_stats=False), nn.ReLU()]

        self.node_encoder, self.edge_encoder = net(node_features), net(self.edge_features or 2 * hidden)
        self.edge_networks = nn.ModuleList(net(6 * hidden) for _ in range(self.graph_iters))
        self.node_networks = nn.ModuleList(net(4 * hidden) for _ in range(self.graph_iters))
        self.edge_decoder = net(hidden)
        self.edge_output_transform = plain_mlp(generator, [hidden, hidden, 1], normed)

    def logits(self, x: Tensor, edge_attr: Tensor | None, ends: EndNodes) -> Tensor:
        x = x_0 = self.node_encoder(x)
        e = e_0 = apply_net(self.edge_encoder, *([self.given(edge_attr)] if self.edge_features else at_ends(x, ends)))
        for k in range(self.graph_iters):
            x = joined(x, x_0)
            e = apply_net(self.edge_networks[k], joined(e, e_0), *at_ends(x, ends))
            if k < self.graph_iters - 1:  # the last one would reach no logit
                x = apply_net(self.node_networks[k], sum_at(x, ends.dst, e), sum_at(x, ends.src, e), x)
        return apply_net(self.edge_output_transform, self.edge_decoder(e))


class AttentionNetwork(PublishedNetwork):
    """`agnn`: between scorings, each node collects its neighbours by the scores of the edges to them.

        encode       x = tanh(LN(linear(node features)))
        iterate      a = sigmoid(edge_net([x_src, x_dst]))
                     x = x + node_net([S_dst a x_src, S_src a x_dst, x])
        score        logit = edge_net([x_src, x_dst])

    One edge and one node net of 4 layers each. LayerNorm and Tanh follow every layer but the edge net's last.

    From sparticlesteve/heptrkx-gnn-tracking, `models/agnn.py`. Weights begin as torch's layers do by default; there
    they begin as Xavier's, with biases of 0.01.
    """

    def build(self, node_features: int, hidden: int, generator: Generator) -> None:
        def normed(width: int) -> list[nn.Module]:
            return [nn.LayerNorm(width), nn.Tanh()]

        self.input_network = plain_mlp(generator, [node_features, hidden], normed, normed)
        self.edge_network = plain_mlp(generator, [2 * hidden, hidden, hidden, hidden, 1], normed)
        self.node_network = plain_mlp(generator, [3 * hidden, hidden, hidden, hidden, hidden], normed, normed)

    def logits(self, x: Tensor, edge_attr: Tensor | None, ends: EndNodes) -> Tensor:
        x = self.input_network(x)
        for _ in range(self.graph_iters):
            x = apply_net(self.node_network, *self._collected(x, ends), x) + x
        return apply_net(self.edge_network, *at_ends(x, ends))

    def _collected(self, x: Tensor, ends: EndNodes) -> tuple[Tensor, Tensor]:
        # Apart, so that tables of edges are gone before the next ones are made.
        x_src, x_dst = at_ends(x, ends)
        a = torch.sigmoid(apply_net(self.edge_network, x_src, x_dst))
        return sum_at(x, ends.dst, a * x_src), sum_at(x, ends.src, a * x_dst)


class MessagePassingNetwork(PublishedNetwork):
    """`mpnn`: messages go along the edges both ways, before each edge is scored from its ends.

    With each edge taken twice, once from its `dst` to its `src`, and S sums at receivers:

        encode       x = encode(node features)                   2 layers, ReLU after both
        iterate      m = edge_net([x_sender, x_receiver])        4 layers, LayerNorm and ReLU after all
                     x = x + node_net([x, S m])                  the same
        score        logit = mlp([x_src, x_dst])                 given edges only, 2 layers, ReLU between them

    One edge and one node net serve all iterations. From sparticlesteve/heptrkx-gnn-tracking, `models/mpnn.py`, with
    torch's first weights as `AttentionNetwork`.
    """

    def build(self, node_features: int, hidden: int, generator: Generator) -> None:
        def normed(width: int) -> list[nn.Module]:
            return [nn.LayerNorm(width), nn.ReLU()]

        self.node_encoder = plain_mlp(generator, [node_features, hidden, hidden], last=lambda _: [nn.ReLU()])
        self.edge_network = plain_mlp(generator, [2 * hidden, hidden, hidden, hidden, hidden], normed, normed)
        self.node_network = plain_mlp(generator, [2 * hidden, hidden, hidden, hidden, hidden], normed, normed)
        self.edge_classifier = plain_mlp(generator, [2 * hidden, hidden, 1])

    def logits(self, x: Tensor, edge_attr: Tensor | None, ends: EndNodes) -> Tensor:
        x = self.node_encoder(x)
        sender, receiver = torch.cat([*ends], dim=0), torch.cat([ends.dst, ends.src], dim=0)
        for _ in range(self.graph_iters):
            # Messages have no name, so that they are gone before the next ones are made.
            received = sum_at(x, receiver, apply_net(self.edge_network, x[sender], x[receiver]))
            x = apply_net(self.node_network, x, received) + x
        return apply_net(self.edge_classifier, *at_ends(x, ends))


class GraphConvolutionalNetwork(PublishedNetwork):
    """`gcn`: averages over neighbourhoods, then each edge is scored from its ends.

    With d = 1 + edges from other nodes that end in a node, and the sum over those edges:

        encode       x = node features
        iterate      x_v = relu(linear(x_v / d_v + sum of x_src / sqrt(d_src d_v)))
        score        logit = mlp([x_src, x_dst])                 2 layers, ReLU between them

    Kipf and Welling as in pyg-team/pytorch_geometric, `nn/conv/gcn_conv.py`, with edge weights of 1: every node has one
    self-loop, whether the event has none of its own or several; duplicate edges count each; degrees are those at `dst`.
    The linear map is applied after the sum instead of before it, which is the same but for rounding.
    """

    def build(self, node_features: int, hidden: int, generator: Generator) -> None:
        widths = [node_features, *[hidden] * self.graph_iters]
        self.layers = nn.ModuleList(linear(generator, wide, width) for wide, width in pairwise(widths))
        self.head = plain_mlp(generator, [2 * hidden, hidden, 1])

    def logits(self, x: Tensor, edge_attr: Tensor | None, ends: EndNodes) -> Tensor:
        from_other = (ends.src != ends.dst).to(x.dtype).unsqueeze(-1)  # every node has its one self-loop already
        scale = (sum_at(x, ends.dst, from_other) + 1).rsqrt()
        for layer in self.layers:
            x = scale * x
            x = torch.relu(layer(scale * (sum_at(x, ends.dst, from_other * x[ends.src]) + x)))
        return apply_net(self.head, *at_ends(x, ends))


class ResidualInteractionNetwork(PublishedNetwork):
    """`resin`: interaction networks with residual connections of the nodes; each iteration has nets of its own.

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

    needs_edge_features = True

    def build(self, node_features: int, hidden: int, generator: Generator) -> None:
        def net(columns: int, out: int, hidden_layers: int = 2, bias: bool = True) -> nn.Sequential:
            return plain_mlp(generator, [columns, *[max(columns, out)] * hidden_layers, out], bias=bias)

        self.node_encoder = net(node_features, hidden, 1, bias=False)
        self.edge_encoder = net(self.edge_features, hidden, 1, bias=False)
        self.edge_networks = nn.ModuleList(net(3 * hidden, hidden) for _ in range(self.graph_iters))
        self.node_networks = nn.ModuleList(net(2 * hidden, hidden) for _ in range(self.graph_iters))
        self.head = net((self.graph_iters + 3) * hidden, 1)

    def logits(self, x: Tensor, edge_attr: Tensor | None, ends: EndNodes) -> Tensor:
        x, e = torch.relu(self.node_encoder(x)), [torch.relu(self.edge_encoder(self.given(edge_attr)))]
        for edge_network, node_network in zip(self.edge_networks, self.node_networks):
            a = torch.relu(x)
            e.append(apply_net(edge_network, a[ends.dst], a[ends.src], torch.relu(e[-1])))
            x = math.sqrt(0.5) * x + math.sqrt(0.5) * apply_net(node_network, a, sum_at(x, ends.dst, e[-1]))
        return apply_net(self.head, *at_ends(x, ends), *e)


class GraphNetsNetwork(PublishedNetwork):
    """`graphnets`: each edge has a state for each of its directions, and is scored after every iteration.

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

    needs_edge_features = deep_supervision = True

    def build(self, node_features: int, hidden: int, generator: Generator) -> None:
        def net(columns: int) -> nn.Sequential:
            return plain_mlp(generator, [columns, hidden, hidden], last=lambda _: [nn.ReLU()])

        self.node_encoder, self.edge_encoder = net(node_features), net(self.edge_features)
        self.edge_network, self.node_network = net(6 * hidden), net(3 * hidden)
        self.edge_decoder = net(hidden)
        self.edge_output = plain_mlp(generator, [hidden, hidden, 1])

    def logits(self, x: Tensor, edge_attr: Tensor | None, ends: EndNodes) -> Tensor:
        x = x_0 = self.node_encoder(x)
        along = against = e_0 = self.edge_encoder(self.given(edge_attr))
        readouts: list[Tensor] = []
        for k in range(self.graph_iters):
            x = joined(x_0, x)
            x_src, x_dst = at_ends(x, ends)
            against = apply_net(self.edge_network, e_0, against, x_src, x_dst)
            along = apply_net(self.edge_network, e_0, along, x_dst, x_src)
            if self.training:
                readouts += map(self._score, (against, along))
            if k < self.graph_iters - 1:
                x = apply_net(self.node_network, sum_at(x, ends.dst, along) + sum_at(x, ends.src, against), x)
        return joined(*readouts) if self.training else self._score(along)

    def _score(self, e: Tensor) -> Tensor:
        logits: Tensor = self.edge_output(self.edge_decoder(e))
        return logits


OF_THE_FIELD: dict[str, type[PublishedNetwork]] = {
    "agnn": AttentionNetwork,
    "mpnn": MessagePassingNetwork,
    "gcn": GraphConvolutionalNetwork,
    "resin": ResidualInteractionNetwork,
    "acorn": InteractionGNN,
    "acorn2": InteractionGNN2,
    "graphnets": GraphNetsNetwork,
}
"""By the names on the command line. The same result on any number of ranks to rounding, or, of those that `on_stages`
builds, to the last bit."""

Modules = Callable[[int], Sequence[nn.Module]]
"""The modules after a linear layer of a width."""


def plain_mlp(
    generator: Generator,
    widths: Sequence[int],
    hidden: Modules = lambda _: [nn.ReLU()],
    last: Modules = lambda _: [],
    bias: bool = True,
) -> nn.Sequential:
    """Linear layers from each width to the next.

    Args:
        generator: Source of the initial weights.
        widths: Inputs, then the outputs of each layer.
        hidden: What follows every layer but the last.
        last: What follows the last.
        bias: Whether layers have biases.
    """
    modules: list[nn.Module] = []
    for position, (wide, width) in enumerate(pairwise(widths), start=2):
        modules += [linear(generator, wide, width, bias), *(hidden if position < len(widths) else last)(width)]
    return nn.Sequential(*modules)


def linear(generator: Generator, in_features: int, out_features: int, bias: bool = True) -> nn.Linear:
    """torch's Linear with its default weights, uniform in +-1/sqrt(in_features), drawn from a generator.

    Not from torch's own one: ranks may be threads, whose draws from it would mix.
    """
    layer = nn.Linear(in_features, out_features, bias, device="meta")  # which draws nothing
    bound = 1 / math.sqrt(in_features)
    for name, parameter in list(layer.named_parameters()):
        # Not by `to_empty`, which imports torch's compiler.
        drawn = torch.empty(parameter.shape, device="cpu").uniform_(-bound, bound, generator=generator)
        setattr(layer, name, nn.Parameter(drawn))
    return layer


def apply_net(net: nn.Module, *tables: Tensor) -> Tensor:
    """Output of a net for tables of the same rows side by side."""
    rows: Tensor = net(tables[0] if len(tables) == 1 else joined(*tables))
    return rows


def joined(*tables: Tensor) -> Tensor:
    """Tables of the same rows side by side."""
    return torch.cat(tables, dim=-1)


def at_ends(x: Tensor, ends: EndNodes) -> tuple[Tensor, Tensor]:
    """Rows of nodes at both ends of each edge, [E, width] each."""
    return x[ends.src], x[ends.dst]


def sum_at(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Sums of edge rows at nodes, [N, width]; 0 at a node without edges.

    Args:
        x: Any table of the nodes, [N, ...].
        index: Node of each edge, int64 [E].
        values: Edge rows, [E, width].
    """
    return x.new_zeros(x.size(0), values.size(-1)).index_add(0, index, values)
