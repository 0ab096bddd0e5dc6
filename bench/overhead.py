"""What do placed tensors cost over plain torch_geometric, on one rank and on two?

    python bench/overhead.py                                   one rank against plain torch_geometric
    mpiexec -n 2 python bench/overhead.py --nodes 1000000      a step of two ranks, with batch norm and METIS
    python bench/overhead.py --nodes 1000 --repeats 3          seconds, to see that it runs

Four SAGE layers of 64 (three with batch norm where there are several ranks), 6 edges a node between near nodes, one
thread. Plain, placed and placed with the same bits (on one rank) take turns, and the shortest of each counts, in
seconds of CPU: so other programs disturb less.
`split`: seconds of `split_graph`.
"""

from __future__ import annotations

import argparse
import copy
import math
import resource
import time
from collections.abc import Callable, Sequence

import flags
import measuring
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

from domainpar import World, parallelize, split_graph


class Sage(nn.Module):
    def __init__(self, layers: int, norm: bool) -> None:
        super().__init__()
        self.convs = nn.ModuleList(SAGEConv(64, 64) for _ in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(64) if norm else nn.Identity() for _ in range(layers))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms):
            x = F.relu(norm(conv(x, edge_index)))
        return x


def graph(num_nodes: int, degree: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    src = torch.arange(num_nodes).repeat_interleave(degree)
    dst = (src + torch.randint(-50, 51, (len(src),), generator=draw)) % num_nodes
    x, y = (torch.randn(num_nodes, 64, generator=draw) for _ in range(2))
    return torch.stack([src, dst]), x, y


def shortest(steps: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of CPU of the shortest call of each, taken in turns."""
    seconds = dict.fromkeys(steps, float("inf"))
    for _ in range(repeats):
        for name, step in steps.items():
            began = time.process_time()
            step()
            seconds[name] = min(seconds[name], time.process_time() - began)
    return seconds


def measure(world: World, num_nodes: int, repeats: int, partitioner: str) -> dict[str, float]:
    """Seconds of CPU of a step on this rank, and beside it on one rank of plain torch_geometric, and of a step with the
    same bits; of the split; the peak.
    """
    edge_index, x, y = graph(num_nodes, 6 if world.size == 1 else 5)
    torch.manual_seed(0)
    plain = Sage(4, False) if world.size == 1 else Sage(3, True)
    began = time.perf_counter()
    part = split_graph(edge_index, num_nodes, world, partitioner=partitioner)
    split = time.perf_counter() - began
    net = parallelize(copy.deepcopy(plain), world)
    mine, target = part.nodes(x), part.nodes(y)

    def placed() -> None:
        net.zero_grad()
        F.mse_loss(net(mine, part.edge_index), target).backward()

    def alone() -> None:
        plain.zero_grad()
        F.mse_loss(plain(x, edge_index), y).backward()

    steps = {"placed": placed} | ({"plain": alone} if world.size == 1 else {})
    if world.size == 1:
        other = World.alone()
        exact, its = parallelize(copy.deepcopy(plain), other, same_bits=True), split_graph(edge_index, num_nodes, other)
        rows, wanted = its.nodes(x), its.nodes(y)

        def same_bits() -> None:
            exact.zero_grad()
            F.mse_loss(exact(rows, its.edge_index), wanted).backward()

        steps["same bits"] = same_bits
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"plain": math.nan, "same bits": math.nan, **shortest(steps, repeats), "split": split, "peak": peak}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "overhead")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 20_000, 200_000])
    parser.add_argument("--repeats", type=int, default=0, help="steps of each; default: some seconds' worth")
    parser.add_argument("--partitioner", default="contiguous")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    torch.set_num_threads(1)
    results = measuring.Results("overhead", options)
    with World.session() as world:
        for nodes in options.nodes:
            repeats = options.repeats or max(3, min(200, 2_000_000 // nodes))
            results.add(rank=world.rank, nodes=nodes, **measure(world, nodes, repeats, options.partitioner))
        columns: measuring.Columns = {
            "nodes": lambda row: f"{row['nodes']:,}",
            "plain ms": lambda row: f"{1e3 * row['plain']:.2f}",
            "placed ms": lambda row: f"{1e3 * row['placed']:.2f}",
            "ratio": lambda row: f"{row['placed'] / row['plain']:.3f}",
            "same bits ms": lambda row: f"{1e3 * row['same bits']:.2f}",
            "ratio to placed": lambda row: f"{row['same bits'] / row['placed']:.3f}",
            "split s": lambda row: f"{row['split']:.2f}",
            "peak GiB": lambda row: f"{row['peak']:.2f}",
        }
        results.show(f"A step, in seconds of CPU: rank {world.rank} of {world.size}", columns, results.rows)
    results.end()


if __name__ == "__main__":
    main()
