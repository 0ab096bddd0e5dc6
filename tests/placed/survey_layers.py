"""Layers and networks as users write them, for the survey of PyG's modules. Imports torch_geometric."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as pyg
from survey_samples import EDGE_FEATURES, FEATURES, HIDDEN
from torch import Tensor, nn


def mlp(width: int = FEATURES, out: int = HIDDEN) -> nn.Sequential:
    """Two linear layers with a ReLU between them."""
    return nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, out))


class Messages(pyg.MessagePassing):
    """A layer as users write one: a message from both ends and the edge, any aggregation, a root weight."""

    def __init__(self, aggregation: Any = "sum", width: int = HIDDEN, **options: Any) -> None:
        super().__init__(aggr=aggregation, **options)
        self.message_net = nn.Linear(2 * FEATURES + EDGE_FEATURES, HIDDEN)
        self.root = nn.Linear(FEATURES, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x, edge_attr=edge_attr) + self.root(x)
        return out

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return torch.tanh(self.message_net(torch.cat([x_i, x_j, edge_attr], dim=-1)))


class Neighbours(pyg.MessagePassing):
    """The sum of what the neighbours hold, without weights: the least a layer can be.

    Of the base class itself no object is ever made: that replaces `propagate` in the class, for every layer made later.
    """

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x)
        return out

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


class EdgeUpdates(pyg.MessagePassing):
    """Weights of edges from `edge_updater`, before `propagate`; a softmax over what arrives at a node by hand."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.score = nn.Linear(2 * FEATURES, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        score = self.edge_updater(edge_index, x=x)
        top = x.new_full((x.size(0),), -1e9).scatter_reduce(0, edge_index[1], score, "amax")
        weight = torch.exp(score - top[edge_index[1]])
        total = x.new_zeros(x.size(0)).index_add(0, edge_index[1], weight)
        out: Tensor = self.propagate(edge_index, x=x, weight=weight / total[edge_index[1]])
        return out

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        scores: Tensor = self.score(torch.cat([x_i, x_j], dim=-1))
        return scores.squeeze(-1)

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return weight.unsqueeze(-1) * x_j


class SharedLayer(nn.Module):
    """One convolution used twice inside a nested module, and once more outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.GCNConv(FEATURES, FEATURES)
        self.inner = nn.ModuleDict({"conv": self.conv, "other": pyg.SAGEConv(FEATURES, FEATURES)})

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = torch.relu(self.conv(x, edge_index))
        x = torch.relu(self.inner["other"](x, edge_index))
        x = x + self.inner["conv"](x, edge_index)
        out: Tensor = self.conv(x, edge_index)
        return out


class VirtualNode(nn.Module):
    """A state of the whole graph, added to all nodes, then pooled back from them."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Embedding(1, FEATURES)
        self.convs = nn.ModuleList([pyg.GINConv(mlp()) for _ in range(2)])
        self.update = mlp()

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        state: Tensor = self.start(batch.new_zeros(1))
        for conv in self.convs:
            x = conv(x + state[batch], edge_index)
            state = state + self.update(pyg.global_add_pool(x, batch, 1))
        return x + state[batch]


class EdgeClassifier(nn.Module):
    """An interaction network without PyG: the state of edges evolves with that of nodes; one logit per edge."""

    def __init__(self, steps: int = 2) -> None:
        super().__init__()
        self.encode = nn.Linear(EDGE_FEATURES, HIDDEN)
        self.edge_net = mlp(2 * FEATURES + HIDDEN)
        self.node_net = mlp(FEATURES + 2 * HIDDEN)
        self.head = nn.Linear(HIDDEN, 1)
        self.steps = steps

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        src, dst = edge_index
        edges = self.encode(edge_attr)
        for _ in range(self.steps):
            edges = edges + self.edge_net(torch.cat([x[src], x[dst], edges], dim=-1))
            zeros = x.new_zeros(x.size(0), HIDDEN)
            at_ends = [zeros.index_add(0, dst, edges), zeros.index_add(0, src, edges)]
            x = x + self.node_net(torch.cat([x, *at_ends], dim=-1))
        logits: Tensor = self.head(edges)
        return logits.squeeze(-1)


class Jumping(nn.Module):
    """Two convolutions and JumpingKnowledge over what they gave."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.convs = nn.ModuleList([pyg.GCNConv(FEATURES, FEATURES) for _ in range(2)])
        self.jump = pyg.JumpingKnowledge(mode, FEATURES, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first = torch.relu(self.convs[0](x, edge_index))
        out: Tensor = self.jump([first, self.convs[1](first, edge_index)])
        return out


class Propagated(nn.Module):
    """Labels of some nodes that edges carry to the others, added to what a layer says of each."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.carry = nn.Linear(FEATURES, 5), pyg.LabelPropagation(3, 0.8)

    def forward(self, x: Tensor, known: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        said = self.lin(x).softmax(dim=-1)
        return said + self.carry(said, edge_index, known, edge_weight)


class Corrected(nn.Module):
    """What a layer says of each node, corrected by what is known of some, and made smooth along edges."""

    def __init__(self, autoscale: bool = True) -> None:
        super().__init__()
        self.lin, self.after = nn.Linear(FEATURES, 5), pyg.CorrectAndSmooth(3, 0.7, 2, 0.6, autoscale, 0.5)

    def forward(self, x: Tensor, known: Tensor, edge_index: Tensor) -> Tensor:
        said = self.lin(x).softmax(dim=-1)
        true = nn.functional.one_hot(x[known].argmax(dim=-1) % 5, 5).to(x.dtype)
        corrected = self.after.correct(said, true, known, edge_index)
        return said + self.after.smooth(corrected, true, known, edge_index)
