"""The interaction networks of acorn, in plain torch, as its checkpoints have them: one skeleton, and formulas.

With x the node states, e the edge states, S_dst and S_src sums over the edges that end and start in a node, and [ , ]
concatenation, each network says how it encodes features, what an iteration is, and how it scores an edge. Only width,
depth and seed can be chosen; all else is as published. A network with other options is a user's own module.

Networks here know nothing of ranks or tiles: they run on placed tensors, as any module does; `nn.interaction` builds
the first of stages, with the same parameters.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Generator, Tensor, nn


class Iterated(nn.Module):
    """Iterates states, with recomputation of some to save memory.

    Attributes:
        recompute_every: Iterations of a segment of which only the first one's input is kept; None: all are kept.
        through: Computes a segment and keeps its arguments alone: torch's checkpoint.
    """

    recompute_every: int | None = None
    through: Callable[..., Any] | None = None

    def after(self, iterate: Callable[..., Any], count: int, *states: Tensor) -> Any:
        """The states after `count` iterations; `iterate` takes them through some: `iterate(iterations, *states)`."""
        if self.recompute_every is None or self.through is None or not torch.is_grad_enabled():
            return iterate(range(count), *states)
        for start in range(0, count, self.recompute_every):
            states = self.through(partial(iterate, range(start, min(start + self.recompute_every, count))), *states)
        return states


class PublishedNetwork(Iterated):
    """Encodes an event, iterates, and scores every edge.

    Args:
        node_features: Features of a node.
        edge_features: Features of an edge; `acorn` does not look at them.
        hidden: Width of states and of hidden layers.
        graph_iters: Number of iterations.
        seed: Seed of the initial weights: a function of it alone, on every rank.

    Raises:
        ValueError: If a size is below 1.
    """

    takes_edge_features = False
    """Whether logits depend on `edge_attr`."""

    def __init__(
        self, node_features: int, edge_features: int = 0, *, hidden: int, graph_iters: int, seed: int = 0
    ) -> None:
        super().__init__()
        for name, size in {"node_features": node_features, "hidden": hidden, "graph_iters": graph_iters}.items():
            if size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1.")
        self.edge_features, self.graph_iters = edge_features, graph_iters
        self.build(node_features, hidden, torch.Generator().manual_seed(seed))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        """Logits of all edges, [E].

        Args:
            x: Node features, [N, node_features].
            edge_index: `src` and `dst` of each edge, int64 [2, E].
            edge_attr: Edge features, [E, edge_features].

        Raises:
            ValueError: If the network needs edge features and there are none.
        """
        return self.logits(x, edge_attr, edge_index[0], edge_index[1]).squeeze(-1)

    @abstractmethod
    def build(self, node_features: int, hidden: int, generator: Generator) -> None:
        """Make the MLPs, in the order in which their weights are drawn."""

    @abstractmethod
    def logits(self, x: Tensor, edge_attr: Tensor | None, src: Tensor, dst: Tensor) -> Tensor:
        """Logits, [E, 1], given the nodes at both ends of each edge, int64 [E]."""


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

    def logits(self, x: Tensor, edge_attr: Tensor | None, src: Tensor, dst: Tensor) -> Tensor:
        x = self.node_encoder(x)
        e = self.edge_encoder(joined(x[src], x[dst]))

        def iterate(iterations: range, x: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
            for _ in iterations:
                x = self.node_networks[0](joined(x, sum_at(x, dst, e), sum_at(x, src, e)))
                e = self.edge_networks[0](joined(x[src], x[dst], e))
            return x, e

        x, e = self.after(iterate, self.graph_iters, x, e)
        logits: Tensor = self.output_edge_classifier(joined(x[src], x[dst], e))
        return logits


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

    def build(self, node_features: int, hidden: int, generator: Generator) -> None:
        self.takes_edge_features = self.edge_features > 0

        def net(columns: int) -> nn.Sequential:
            return plain_mlp(generator, [columns, hidden, hidden, hidden], normed, lambda _: [nn.ReLU()])

        def normed(width: int) -> list[nn.Module]:
            return [nn.BatchNorm1d(width, eps=6e-5, track_running_stats=False), nn.ReLU()]

        self.node_encoder, self.edge_encoder = net(node_features), net(self.edge_features or 2 * hidden)
        self.edge_networks = nn.ModuleList(net(6 * hidden) for _ in range(self.graph_iters))
        self.node_networks = nn.ModuleList(net(4 * hidden) for _ in range(self.graph_iters))
        self.edge_decoder = net(hidden)
        self.edge_output_transform = plain_mlp(generator, [hidden, hidden, 1], normed)

    def logits(self, x: Tensor, edge_attr: Tensor | None, src: Tensor, dst: Tensor) -> Tensor:
        if self.takes_edge_features and edge_attr is None:
            raise ValueError(f"this network needs {self.edge_features} edge features and got None; pass edge_attr.")
        x = x_0 = self.node_encoder(x)
        takes = edge_attr is not None and self.takes_edge_features
        e = e_0 = self.edge_encoder(edge_attr if takes else joined(x[src], x[dst]))

        def iterate(iterations: range, x: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
            for k in iterations:
                x = joined(x, x_0)
                e = self.edge_networks[k](joined(e, e_0, x[src], x[dst]))
                if k < self.graph_iters - 1:  # the last one would reach no logit
                    x = self.node_networks[k](joined(sum_at(x, dst, e), sum_at(x, src, e), x))
            return x, e

        _, e = self.after(iterate, self.graph_iters, x, e)
        logits: Tensor = self.edge_output_transform(self.edge_decoder(e))
        return logits


OF_THE_FIELD: dict[str, type[PublishedNetwork]] = {"acorn": InteractionGNN, "acorn2": InteractionGNN2}
"""By the names on the command line."""

Modules = Callable[[int], Sequence[nn.Module]]
"""The modules after a linear layer of a width."""


def plain_mlp(
    generator: Generator, widths: Sequence[int], hidden: Modules, last: Modules = lambda _: []
) -> nn.Sequential:
    """Linear layers from each width to the next.

    Args:
        generator: Source of the initial weights.
        widths: Inputs, then the outputs of each layer.
        hidden: What follows every layer but the last.
        last: What follows the last.
    """
    modules: list[nn.Module] = []
    for position, (wide, width) in enumerate(pairwise(widths), start=2):
        modules += [_linear(generator, wide, width), *(hidden if position < len(widths) else last)(width)]
    return nn.Sequential(*modules)


def _linear(generator: Generator, in_features: int, out_features: int) -> nn.Linear:
    """torch's Linear with its default weights, uniform in +-1/sqrt(in_features), drawn from a generator.

    Not from torch's own one: ranks may be threads, whose draws from it would mix.
    """
    layer = nn.Linear(in_features, out_features, device="meta")  # which draws nothing
    bound = 1 / math.sqrt(in_features)
    for name, parameter in list(layer.named_parameters()):
        # Not by `to_empty`, which imports torch's compiler.
        drawn = torch.empty(parameter.shape, device="cpu").uniform_(-bound, bound, generator=generator)
        setattr(layer, name, nn.Parameter(drawn))
    return layer


def joined(*tables: Tensor) -> Tensor:
    """Tables of the same rows side by side."""
    return torch.cat(tables, dim=-1)


def sum_at(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Sums of edge rows at nodes, [N, width]; 0 at a node without edges.

    Args:
        x: Any table of the nodes, [N, ...].
        index: Node of each edge, int64 [E].
        values: Edge rows, [E, width].
    """
    return x.new_zeros(x.size(0), values.size(-1)).index_add(0, index, values)
