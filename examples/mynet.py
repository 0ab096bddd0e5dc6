"""A network of your own for `train`, in plain torch: python -m domainpar.train --model examples.mynet:Mine."""

import torch
from torch import Tensor, nn


class Mine(nn.Module):
    """A few iterations in which each node sums its neighbours' states; then a logit for each edge."""

    def __init__(self, node_features: int, edge_features: int, hidden: int, graph_iters: int) -> None:
        super().__init__()
        self.encode = nn.Linear(node_features, hidden)
        self.steps = nn.ModuleList(nn.Linear(2 * hidden, hidden) for _ in range(graph_iters))
        self.score = nn.Sequential(nn.Linear(2 * hidden + edge_features, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Features of hits [N, F], `src` and `dst` of edges [2, E], features of edges [E, G] -> logits [E]."""
        src, dst = edge_index
        nodes = torch.relu(self.encode(x))
        for step in self.steps:
            sums = torch.zeros_like(nodes).index_add(0, dst, nodes[src])
            nodes = torch.relu(step(torch.cat([nodes, sums], dim=1)))
        return self.score(torch.cat([nodes[src], nodes[dst], edge_attr], dim=1)).squeeze(1)
