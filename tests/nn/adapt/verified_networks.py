"""Networks to verify on a small graph, and layers that look at a fact of one rank."""

import threading

import torch
from torch import nn

from domainpar.nn.adapt.rows import Rows, rows_of
from domainpar.nn.adapt.verify import verify

NUM_NODES, NUM_EDGES = 30, 90


def drawn(seed=0, num_nodes=NUM_NODES, num_edges=NUM_EDGES):
    """A graph with self-loops, duplicate edges and isolated nodes, and features of nodes."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, max(num_nodes - 2, 1), (2, num_edges), generator=generator)
    ends[:, :2] = ends[:1, :2]
    ends[:, 3:5] = ends[:, 5:7]
    return ends, torch.randn(num_nodes, 4, generator=generator)


ENDS, X = drawn()


def of_nodes(part):
    return part.nodes(X), part.edge_index


def verified(module, inputs=of_nodes, **arguments):
    return verify(module, (ENDS, NUM_NODES), inputs=inputs, **arguments)


class Sum(nn.Module):
    """Sums where edges end."""

    def __init__(self, width=8):
        super().__init__()
        self.lin = nn.Linear(width, width)

    def forward(self, x, edge_index):
        x = self.lin(x)
        return x.new_zeros(x.size(0), x.size(1)).index_add(0, edge_index[1], x[edge_index[0]])


class Net(nn.Module):
    """Two sums with a layer between them, then a score of each edge."""

    def __init__(self, middle=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.conv1, self.middle = nn.Linear(4, 8), Sum(), middle or nn.Tanh()
        self.conv2, self.last = Sum(), nn.Linear(16, 1)

    def forward(self, x, edge_index):
        x = self.middle(self.conv1(self.first(x), edge_index))
        x = self.conv2(x, edge_index)
        return self.last(torch.cat([x[edge_index[0]], x[edge_index[1]]], -1)).squeeze(-1)


def local_rows(x):
    """A fact of one rank, found behind the back of the watch."""
    rows = rows_of(x)
    return rows.axis.length if isinstance(rows, Rows) else x.size(0)


def on_rank_1():
    return threading.current_thread().name == "rank 1"


class ByLocalRows(nn.Module):
    def forward(self, x):
        return x / (1 + local_rows(x))


class FirstOf(nn.Module):
    """Uses of what a layer returns only what is right."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class Masks(nn.Module):
    """Some of the edges, loops behind them; sums over both."""

    def __init__(self):
        super().__init__()
        self.kept, self.joined = nn.Tanh(), nn.Linear(4, 4)

    def forward(self, x, edge_index):
        mask = edge_index[0] != edge_index[1]
        loops = torch.arange(x.size(0))
        some = self.kept(x[edge_index[0]][mask])
        ends = torch.cat([edge_index[:, mask], torch.stack([loops, loops])], 1)
        both = self.joined(torch.cat([some, x]))
        return x.new_zeros(x.size(0), 4).index_add(0, ends[1], both)
