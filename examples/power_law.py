"""Classes of nodes in a power-law graph: full-graph training of an unmodified PyG model, with batch norm and dropout.

Start it with `python examples/power_law.py` or `mpiexec -n 4 python examples/power_law.py`: the losses are the same."""

import argparse

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot
from torch_geometric.nn import GraphSAGE

from domainpar import World, parallelize, split_graph

NUM_NODES, NUM_LINKS, NUM_CLASSES = 2000, 4, 5


def preferential_attachment(seed: int = 0) -> tuple[Tensor, Tensor]:
    """A graph in which each new node links to nodes that have many links, mostly of its own class; and the classes."""
    rng = np.random.default_rng(seed)
    ends = [[label] for label in range(NUM_CLASSES)]  # nodes of each class, each of them once per link
    links = []
    for node in range(NUM_CLASSES, NUM_NODES):
        own = node % NUM_CLASSES
        for _ in range(NUM_LINKS):
            pool = ends[own if rng.random() < 0.7 else rng.integers(NUM_CLASSES)]
            links.append((node, pool[rng.integers(len(pool))]))
            pool.append(links[-1][1])
            ends[own].append(node)
    src, dst = torch.tensor(links).T
    return torch.stack([torch.cat([src, dst]), torch.cat([dst, src])]), torch.arange(NUM_NODES) % NUM_CLASSES


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=50)
steps = parser.parse_args().steps
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
edge_index, label = preferential_attachment()
x = one_hot(label, NUM_CLASSES) + 2 * torch.randn(NUM_NODES, NUM_CLASSES)  # too noisy without the neighbours
is_train = torch.rand(NUM_NODES) < 0.5
with World.session() as world:
    part = split_graph(edge_index, NUM_NODES, world)
    model = parallelize(GraphSAGE(NUM_CLASSES, 32, 2, NUM_CLASSES, dropout=0.5, norm="batch_norm"), world)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    nodes = part.nodes(x)
    for step in range(steps):
        loss = cross_entropy(model(nodes, part.edge_index)[is_train], label[is_train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if world.is_root:
            print(f"step {step}: loss {loss.item()!r}")
    model.eval()
    accuracy = (model(nodes, part.edge_index).argmax(1) == label)[~is_train].double().mean()
    if world.is_root:
        print(f"accuracy on nodes not trained on: {accuracy.item()!r}")
