"""What does a rank hold while a graph is split, if each is given the whole of it, and if each is given a slice?

    python bench/slices.py                                   2,000,000 nodes, 40,000,000 edges
    python bench/slices.py --nodes 2000 --ranks 1 2          seconds, to see that it runs

Every node has 20 edges from nodes near it. `whole`: `split_graph` into ranges of nodes; `slices`: `split_slices`, which
gives the same parts. Then each takes its rows of 16 columns of floats of nodes and of one of edges. Bytes: peak of the
fullest rank, a process, above what it held before the graph was made; the graph itself included.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial

import flags
import measuring
import numpy as np
import torch
from measuring import Columns, Row, ranks_of

from domainpar import split_graph, split_slices
from domainpar.parallel.world import World
from domainpar.testing import find_mpiexec, run_ranks
from domainpar.tracking.training.memory import MemoryMeter

PIECES = 64  # that nodes and edges are drawn in, so that each rank can draw its own
EDGES_OF_NODE, REACH, COLUMNS = 20, 2000, 16


def edges_of(piece: int, nodes: int) -> np.ndarray:
    """`src` and `dst` of the edges into the nodes of a piece."""
    rng = np.random.default_rng(piece)
    dst = np.repeat(np.arange(nodes * piece // PIECES, nodes * (piece + 1) // PIECES), EDGES_OF_NODE)
    return np.stack([(dst + rng.integers(-REACH, REACH, len(dst))) % nodes, dst])


def split(world: World, way: str, nodes: int) -> Row:
    """Split the graph, take rows. *Collective*."""
    torch.set_num_threads(1)
    meter = MemoryMeter(world.device)
    own = range(PIECES) if way == "whole" else range(world.rank, world.rank + 1)
    if way == "slices":
        own = range(PIECES * world.rank // world.size, PIECES * (world.rank + 1) // world.size)
    first, last = nodes * own.start // PIECES, nodes * own.stop // PIECES
    edge_index = np.concatenate([np.zeros((2, 0), np.int64), *(edges_of(piece, nodes) for piece in own)], axis=1)
    x = np.ones((last - first, COLUMNS), np.float32)
    e = np.ones((edge_index.shape[1], 1), np.float32)
    world.transport.barrier()
    began = time.perf_counter()
    if way == "whole":
        part = split_graph(edge_index, nodes, world, partitioner="contiguous")
    else:
        part = split_slices(edge_index, nodes, world)
    rows = part.nodes(x), part.edges(e)
    world.transport.barrier()
    seconds = time.perf_counter() - began
    ids = int(part.plan.edge_ids.sum()) + int(part.plan.ghost_ids.sum())
    return {"bytes": max(one or 0 for one in meter.taken(world)), "seconds": seconds, "rows": len(rows[0]), "ids": ids}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "slices")
    parser.add_argument("--nodes", type=int, default=2_000_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--transport", choices=("mpi", "gloo"), default="mpi" if find_mpiexec() else "gloo")
    parser.add_argument("--timeout", type=float, default=600.0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    results = measuring.Results("slices", options)
    rows: list[Row] = []
    same = True
    for ranks in options.ranks:
        call = partial(run_ranks, split, ranks, transport=options.transport, timeout=options.timeout)
        found = {way: call(way, options.nodes) for way in ("whole", "slices")}
        same &= len({str([(rank["rows"], rank["ids"]) for rank in of_ranks]) for of_ranks in found.values()}) == 1
        for way, of_ranks in found.items():
            row = {"ranks": ranks, "way": way, "bytes": of_ranks[0]["bytes"], "seconds": of_ranks[0]["seconds"]}
            rows.append(row)
            results.add(**row)
    columns: Columns = {
        "ranks": ranks_of,
        "way": lambda row: row["way"],
        "GiB": lambda row: f"{row['bytes'] / 2**30:.2f}",
        "seconds": lambda row: f"{row['seconds']:.3g}",
    }
    note = f"{options.nodes:,} nodes, {options.nodes * EDGES_OF_NODE:,} edges; the parts of both are "
    results.show("Splitting a graph", columns, rows, note + ("the same." if same else "NOT THE SAME."))
    results.end()
    return int(not same)


if __name__ == "__main__":
    measuring.run(__file__)
