"""Energies of a cloud of moving atoms: the graph is built and split anew from their positions in every step.

Start it with `python`, `mpiexec -n 4 python` or `torchrun --nproc-per-node 4`, then `examples/molecule.py`. A
table of all atoms by all atoms is refused in a forward pass. So find neighbours first, then split.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from domainpar import World, parallelize, split_graph

REACH, NUM_ATOMS, KINDS, WIDTH = 1.6, 300, 4, 16


class Energy(nn.Module):
    """Energy of each atom, [N], from messages of its neighbours that are weighted by functions of their distance."""

    def __init__(self, rounds: int = 2) -> None:
        super().__init__()
        self.kinds, self.energy = nn.Embedding(KINDS, WIDTH), nn.Linear(WIDTH, 1)
        self.filters = nn.ModuleList(nn.Linear(8, WIDTH) for _ in range(rounds))
        self.updates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(rounds))

    def forward(self, place: Tensor, kind: Tensor, edge_index: Tensor) -> Tensor:
        (src, dst), x = edge_index, self.kinds(kind)
        distance = (place[src] - place[dst]).square().sum(dim=1, keepdim=True).sqrt()
        shells = torch.exp(-8 * (distance - torch.linspace(0.2, REACH, 8)) ** 2) * (1 - distance / REACH) ** 2
        for weights, update in zip(self.filters, self.updates):
            x = x + update(torch.zeros_like(x).index_add(0, dst, weights(shells) * x[src])).tanh()
        return self.energy(x).squeeze(1)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=60)
steps = parser.parse_args().steps
torch.set_default_dtype(torch.float64)
draw = torch.Generator().manual_seed(0)
place, speed = 2.4 * torch.randn(NUM_ATOMS, 3, generator=draw), torch.randn(NUM_ATOMS, 3, generator=draw)
kind = torch.randint(KINDS, (NUM_ATOMS,), generator=draw)
with World.session() as world:
    torch.manual_seed(0)
    model = parallelize(Energy(), world)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        src, dst = edges = (torch.cdist(place, place).fill_diagonal_(2 * REACH) < REACH).nonzero().T
        away = (place[src] - place[dst]).norm(dim=1)
        pairs = (torch.exp(1.6 - 2 * away) - torch.exp(0.8 - away)) * (1 - away / REACH) ** 2 * (1 + kind[src])
        part = split_graph(edges, NUM_ATOMS, world)  # a new graph in each step: some thousand edges take milliseconds
        energy = torch.zeros(NUM_ATOMS).index_add(0, dst, pairs)
        loss = mse_loss(model(part.nodes(place), part.nodes(kind), part.edge_index), energy)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if world.is_root:
            print(f"step {step}, {len(away)} pairs: loss {loss.item()!r}")
        place = place + 0.02 * speed
