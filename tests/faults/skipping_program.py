"""A program of a user in which rank 1 leaves out a call; `test_skipped_calls.py` starts it."""

import sys

import torch

from domainpar import World, parallelize, split_graph


def main(skips: str) -> None:
    edge_index, x = torch.arange(12).view(2, 6), torch.ones(12, 2)
    with World.session(timeout=60.0) as world:
        if skips != "the graph" or world.is_root:
            part = split_graph(edge_index, 12, world, partitioner="contiguous")
        if skips == "the graph":
            return
        model = parallelize(torch.nn.Linear(2, 2), world)
        for step in range(2):
            if skips == "a step" and step == 1 and world.rank == 1:
                continue
            model(part.nodes(x)).sum()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
