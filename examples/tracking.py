"""Find tracks: a plain PyG module learns which edges join two hits of one particle. Every step is a new event.

Start it with `python examples/tracking.py` or `mpiexec -n 4 python examples/tracking.py`: the losses are the same."""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch_geometric.nn import MLP, MessagePassing

from domainpar import World, parallelize, simulate_event, split_graph
from domainpar.tracking.events.construct import Cuts, build_graph


class InteractionNetwork(MessagePassing):
    """Each edge reads the hits at both ends; each hit sums the edges that end at it, and those that begin there."""

    def __init__(self, width: int = 32, iterations: int = 3) -> None:
        super().__init__(aggr="sum")
        self.enter_hits, self.enter_edges = MLP([3, width, width], norm=None), MLP([6, width, width], norm=None)
        self.edge_nets = nn.ModuleList(MLP([3 * width, width, width], norm=None) for _ in range(iterations))
        self.hit_nets = nn.ModuleList(MLP([3 * width, width, width], norm=None) for _ in range(iterations))
        self.classify = MLP([width, width, 1], norm=None)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        hits, edges, size = self.enter_hits(x), self.enter_edges(edge_attr), (x.size(0), x.size(0))
        for edge_net, hit_net in zip(self.edge_nets, self.hit_nets):
            edges = edges + edge_net(torch.cat([hits[edge_index[0]], hits[edge_index[1]], edges], dim=1))
            ending = self.propagate(edge_index, edges=edges, size=size)
            beginning = self.propagate(edge_index.flip(0), edges=edges, size=size)
            hits = hits + hit_net(torch.cat([hits, ending, beginning], dim=1))
        return self.classify(edges).squeeze(1)

    def message(self, edges: Tensor) -> Tensor:
        return edges


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=30)
steps = parser.parse_args().steps
torch.manual_seed(0)
with World.session() as world:
    model = parallelize(InteractionNetwork().double(), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        event = build_graph(simulate_event(seed=step, num_hits=1000), Cuts(phi_slope=2e-3, z0=1000.0))
        x, edge_attr, label = (torch.tensor(a).double() for a in (event.features, event.edge_features, event.label))
        part = split_graph(event.edge_index, len(x), world)
        logits = model(part.nodes(x), part.edge_index, part.edges(edge_attr))
        loss = binary_cross_entropy_with_logits(logits, label, pos_weight=torch.tensor(2.0))  # a true edge counts twice
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if world.is_root:
            print(f"step {step}: {len(x)} hits, {len(label)} edges, loss {loss.item()!r}")
