"""Classes of nodes of a graph that no rank holds, of the size of ogbn-products: 2.4 million nodes, 62 million edges.

mpiexec -n 4 python examples/products.py, or torchrun --nproc-per-node 4; small: --nodes 2000 --edges 20000. The graph
is drawn here, in pieces that do not depend on the number of ranks: neighbours have nearby ids, and one edge in twenty
goes anywhere, most often to a few nodes. Printed are the loss, seconds and memory of each rank.
"""

import argparse
import resource
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from domainpar import World, parallelize, split_slices

PIECES, FEATURES, CLASSES, WIDTH, COLUMNS = 48, 50, 47, 64, 16


class Mean(nn.Module):
    """A GraphSAGE layer. Messages of some columns at a time: those of all would take most of the memory."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor, degree: Tensor) -> Tensor:
        (src, dst), h = edge_index, self.others(x)
        # Not index_add: torch would keep its messages for the backward pass.
        sums = [
            torch.zeros_like(some).scatter_add(0, dst[:, None].expand(-1, some.size(1)), some[src])
            for some in h.split(COLUMNS, dim=1)
        ]
        return self.own(x) + torch.cat(sums, dim=1) / degree


def nodes_of(piece: int, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Features and classes of one piece of the nodes; a class is told by features and by neighbours."""
    first, last = (num_nodes * at // PIECES for at in (piece, piece + 1))
    y = torch.arange(first, last) * CLASSES // num_nodes
    x = torch.randn(last - first, FEATURES, generator=torch.Generator().manual_seed(piece))
    return x.scatter_add_(1, y[:, None], torch.ones(last - first, 1)), y


def edges_of(piece: int, num_nodes: int, num_edges: int) -> Tensor:
    """One piece of the edges, both directions of each pair, int64 [2, n]."""
    draw, count = torch.Generator().manual_seed(PIECES + piece), num_edges // (2 * PIECES)
    src = torch.randint(num_nodes, (count,), generator=draw)
    near = src + torch.randint(-num_nodes // 500 - 2, num_nodes // 500 + 3, (count,), generator=draw)
    anywhere = (num_nodes * torch.rand(count, generator=draw, dtype=torch.float64) ** 4).long()
    dst = torch.where(torch.rand(count, generator=draw) < 0.05, anywhere, near.clamp(0, num_nodes - 1))
    return torch.stack([torch.cat([src, dst]), torch.cat([dst, src])])


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--nodes", type=int, default=2_400_000)
parser.add_argument("--edges", type=int, default=62_000_000)
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--double", action="store_true", help="float64")
args = parser.parse_args()
torch.set_default_dtype(torch.float64 if args.double else torch.float32)
with World.session() as world:
    pieces = range(PIECES * world.rank // world.size, PIECES * (world.rank + 1) // world.size)
    part = split_slices(torch.cat([edges_of(piece, args.nodes, args.edges) for piece in pieces], 1), args.nodes, world)
    x, y = (part.nodes(torch.cat(rows)) for rows in zip(*(nodes_of(piece, args.nodes) for piece in pieces)))
    learned = torch.arange(args.nodes) % 10 == 0  # one node in ten
    targets, ends = y[learned], part.edge_index[1]
    degree = x.new_zeros(args.nodes).index_add(0, ends, torch.ones_like(ends, dtype=x.dtype)).clamp(min=1)[:, None]
    torch.manual_seed(0)
    layers = parallelize(nn.ModuleList([Mean(FEATURES, WIDTH), Mean(WIDTH, WIDTH), Mean(WIDTH, CLASSES)]), world)
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.01)
    for step in range(args.steps):
        began, h = time.perf_counter(), x
        for number, layer in enumerate(layers):
            h = layer(h.relu() if number else h, part.edge_index, degree)
        loss = cross_entropy(h[learned], targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if world.is_root:
            print(f"step {step}: loss {loss.item()!r}, {time.perf_counter() - began:.2f} s", flush=True)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    about = f"{part.plan.num_owned} nodes, {part.plan.num_ghosts} of others, {part.plan.num_edges} edges"
    print(f"rank {world.rank}: {about}, {memory:.2f} GiB at most")
