"""What do the dense forms of distributed graph networks send, against a halo: 1D, 1.5D, 2D and 3D of CAGNET?

    python bench/cagnet.py                                  an event of TrackML size and a power-law graph
    python bench/cagnet.py --data DIR --event 1012          a real event
    python bench/cagnet.py --case tiny --nodes 500 --ranks 2 4 8       seconds, to see that it runs

One layer of a graph convolution, Y = A X of f columns, and its way back, G = A^T Y, on ranks that hold blocks of A and
of X as Tripathy, Yelick and Buluc (SC20) lay them out: in rows (1D); in rows of which c ranks hold copies (1.5D); in a
square of blocks (2D); in a cube (3D). Blocks travel through domainpar's transports, and every rank's share is compared
with the product made at once. `halo`: what domainpar does, ghosts alone, tiles grouped by `--grouping`.

MB: sent by a rank on average, forward and back. `formula`: of Buluc's talk of 2021, a bound that counts whole
blocks where a rank sends none to itself. Edges of A that travel in 2D and 3D are counted, two int32 each. Seconds:
medians of ranks as processes, without making blocks or plans; with more ranks than cores (*) they show nothing.
"""

from __future__ import annotations

import argparse
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cases
import flags
import measuring
import numpy as np
import torch
from measuring import Columns, Row, ranks_of
from torch import Tensor

from domainpar.measure.rates import slowest
from domainpar.parallel.transport import Transport
from domainpar.parallel.world import World
from domainpar.testing import find_mpiexec, run_ranks
from domainpar.tracking.events.store import EventStore
from partitioners import Metis, Topology, group

MB = 1e6


@dataclass(frozen=True, eq=False)
class Graph:
    """A graph, and the part of each of its nodes by number of ranks."""

    name: str
    num_nodes: int
    edge_index: np.ndarray
    parts: dict[int, np.ndarray]


# --- pieces of communication -----------------------------------------------------------------------------------------


def broadcast(transport: Transport, rows: Tensor | None, shape: Sequence[int], root: int, dtype: Any) -> Tensor:
    """Rows of one rank on all of them. *Collective*."""
    size, here = transport.size, transport.rank
    to, origin = [0] * size, [0] * size
    count = shape[0]
    if here == root:
        assert rows is not None
        to = [0 if rank == here else count for rank in range(size)]
        send = rows.repeat(size - 1, *[1] * (rows.dim() - 1)).contiguous()
        transport.start(send, to, rows.new_empty(0, *shape[1:]), origin).finish()
        return rows
    origin[root] = count
    received = torch.empty(*shape, dtype=dtype)
    transport.start(torch.empty(0, *shape[1:], dtype=dtype), to, received, origin).finish()
    return received


def sum_scattered(transport: Transport, partial: Tensor) -> tuple[Tensor, slice]:
    """This rank's piece of the sum of all ranks' rows, and which rows those are. *Collective*."""
    borders = pieces(len(partial), transport.size)
    mine = slice(borders[transport.rank], borders[transport.rank + 1])
    counts = np.diff(borders)
    to = [0 if rank == transport.rank else int(count) for rank, count in enumerate(counts)]
    send = torch.cat([partial[borders[rank] : borders[rank + 1]] for rank in range(transport.size) if to[rank]] or
                     [partial[:0]])  # fmt: skip
    own = int(counts[transport.rank])
    origin = [0 if rank == transport.rank else own for rank in range(transport.size)]
    received = partial.new_empty(sum(origin), partial.shape[1])
    transport.start(send.contiguous(), to, received, origin).finish()
    total = partial[mine].clone()
    for piece in received.split(own) if own else ():
        total += piece
    return total, mine


def gathered(transport: Transport, piece: Tensor, borders: Sequence[int]) -> Tensor:
    """The pieces of all ranks, on each of them. *Collective*."""
    counts = np.diff(borders)
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    to = [0 if rank == transport.rank else len(piece) for rank in range(transport.size)]
    origin = [0 if rank == transport.rank else int(counts[rank]) for rank in range(transport.size)]
    received = piece.new_empty(sum(origin), piece.shape[1])
    send = piece.repeat(len(others), 1) if others else piece[:0]
    transport.start(send.contiguous(), to, received, origin).finish()
    parts = dict(zip(others, received.split([origin[rank] for rank in others]))) | {transport.rank: piece}
    return torch.cat([parts[rank] for rank in range(transport.size)])


def pieces(count: int, number: int) -> list[int]:
    """Borders of even pieces."""
    return [count * at // number for at in range(number + 1)]


def block_of(edge_index: np.ndarray, dst: tuple[int, int], src: tuple[int, int]) -> Tensor:
    """Edges of a block of A: rows of `src` and `dst` counted from its corner, int32 [E, 2]; made once."""
    key = threading.get_ident(), int(edge_index[0, 0]), int(edge_index[1, 0]), dst, src
    if key not in _blocks:
        inside = (edge_index[1] >= dst[0]) & (edge_index[1] < dst[1])
        inside &= (edge_index[0] >= src[0]) & (edge_index[0] < src[1])
        ends = edge_index[:, inside] - np.array([[src[0]], [dst[0]]])
        _blocks[key] = torch.from_numpy(np.ascontiguousarray(ends.T)).to(torch.int32)
    return _blocks[key]


_blocks: dict[tuple[Any, ...], Tensor] = {}


def add_product(y: Tensor, block: Tensor, x: Tensor) -> None:
    """y += A x for a block of A."""
    y.index_add_(0, block[:, 1].long(), x[block[:, 0].long()])


# --- forms: each returns (rows, columns, this rank's share of A X) ---------------------------------------------------


def in_rows(world: World, graph: Graph, x: Tensor, edges: np.ndarray, copies: int = 1) -> tuple[slice, slice, Tensor]:
    """1D, and 1.5D where `copies` ranks hold each block of rows."""
    rows = world.size // copies
    i, layer = world.rank // copies, world.rank % copies
    borders = pieces(graph.num_nodes, rows)
    y = torch.zeros(borders[i + 1] - borders[i], x.shape[1])
    same_layer = (
        world.transport.split([range(at, world.size, copies) for at in range(copies)])
        if copies > 1
        else world.transport
    )
    for j in range(layer, rows, copies):
        begin, end = borders[j], borders[j + 1]
        own = x[begin:end].contiguous() if j == i else None
        block_x = broadcast(same_layer, own, (end - begin, x.shape[1]), j, x.dtype)
        add_product(y, block_of(edges, (borders[i], borders[i + 1]), (begin, end)), block_x)
    if copies > 1:
        same_rows = world.transport.split([range(at * copies, (at + 1) * copies) for at in range(rows)])
        piece, _ = sum_scattered(same_rows, y)
        y = gathered(same_rows, piece, pieces(len(y), copies))
        count_all(world, same_layer, same_rows)
    return slice(borders[i], borders[i + 1]), slice(0, x.shape[1]), y


def in_a_square(world: World, graph: Graph, x: Tensor, edges: np.ndarray) -> tuple[slice, slice, Tensor]:
    """2D: rank (i, j) of a square holds A_ij and X_ij; blocks of A go along rows and blocks of X along columns."""
    side = math.isqrt(world.size)
    i, j = divmod(world.rank, side)
    nodes, columns = pieces(graph.num_nodes, side), pieces(x.shape[1], side)
    in_row = world.transport.split([range(at * side, (at + 1) * side) for at in range(side)])
    in_column = world.transport.split([range(at, world.size, side) for at in range(side)])
    y = torch.zeros(nodes[i + 1] - nodes[i], columns[j + 1] - columns[j])
    for k in range(side):
        own_block = block_of(edges, (nodes[i], nodes[i + 1]), (nodes[k], nodes[k + 1]))
        block = broadcast(in_row, own_block if k == j else None, own_block.shape, k, torch.int32)
        own_x = x[nodes[k] : nodes[k + 1], columns[j] : columns[j + 1]].contiguous()
        add_product(y, block, broadcast(in_column, own_x if k == i else None, own_x.shape, k, x.dtype))
    count_all(world, in_row, in_column)
    return slice(nodes[i], nodes[i + 1]), slice(columns[j], columns[j + 1]), y


def in_a_cube(world: World, graph: Graph, x: Tensor, edges: np.ndarray) -> tuple[slice, slice, Tensor]:
    """3D: each layer of a cube multiplies its share of the sources as a square does; layers add up what they have."""
    side = round(world.size ** (1 / 3))
    layer, within = divmod(world.rank, side * side)
    i, j = divmod(within, side)
    nodes, columns = pieces(graph.num_nodes, side), pieces(x.shape[1], side)
    first = layer * side * side
    layers = [range(at * side * side, (at + 1) * side * side) for at in range(side)]
    in_row = world.transport.split(
        [range(of[0] + at * side, of[0] + (at + 1) * side) for of in layers for at in range(side)]
    )
    in_column = world.transport.split([range(of[0] + at, of[-1] + 1, side) for of in layers for at in range(side)])
    through = world.transport.split([range(at, world.size, side * side) for at in range(side * side)])
    assert first + i * side + j == world.rank
    y = torch.zeros(nodes[i + 1] - nodes[i], columns[j + 1] - columns[j])
    for k in range(side):  # the sources of a layer, in as many pieces
        shares = pieces(nodes[k + 1] - nodes[k], side)
        begin, end = nodes[k] + shares[layer], nodes[k] + shares[layer + 1]
        own_block = block_of(edges, (nodes[i], nodes[i + 1]), (begin, end))
        block = broadcast(in_row, own_block if k == j else None, own_block.shape, k, torch.int32)
        own_x = x[begin:end, columns[j] : columns[j + 1]].contiguous()
        add_product(y, block, broadcast(in_column, own_x if k == i else None, own_x.shape, k, x.dtype))
    y, mine = sum_scattered(through, y)
    count_all(world, in_row, in_column, through)
    return slice(nodes[i] + mine.start, nodes[i] + mine.stop), slice(columns[j], columns[j + 1]), y


def with_ghosts(world: World, graph: Graph, x: Tensor, edges: np.ndarray) -> tuple[np.ndarray, slice, Tensor]:
    """The halo: rows of ghosts alone."""
    part = graph.parts[world.size]
    owned = np.flatnonzero(part == world.rank)
    incoming = edges[:, part[edges[1]] == world.rank]
    ghosts = np.unique(incoming[0][part[incoming[0]] != world.rank])
    wanted = [ghosts[part[ghosts] == rank] for rank in range(world.size)]
    # What others want of this rank follows from the graph, which every rank has here.
    asked = []
    for rank in range(world.size):
        theirs = edges[:, part[edges[1]] == rank]
        asked.append(np.unique(theirs[0][part[theirs[0]] == world.rank]) if rank != world.rank else ghosts[:0])
    order = np.concatenate([owned, *wanted])
    place = np.full(graph.num_nodes, -1)
    place[order] = np.arange(len(order))
    received = torch.empty(len(ghosts), x.shape[1])
    send = x[torch.from_numpy(np.concatenate(asked))].contiguous()
    began = time.perf_counter()
    world.transport.start(send, [len(ids) for ids in asked], received, [len(ids) for ids in wanted]).finish()
    table = torch.cat([x[torch.from_numpy(owned)], received])
    y = torch.zeros(len(owned), x.shape[1])
    y.index_add_(0, torch.from_numpy(place[incoming[1]]), table[torch.from_numpy(place[incoming[0]])])
    world_seconds[world.rank] = time.perf_counter() - began
    return owned, slice(0, x.shape[1]), y


world_seconds: dict[int, float] = {}
"""Of the halo's exchange and product on each rank: plans are made once, and not in each step."""


def count_all(world: World, *transports: Transport) -> None:
    """Count what smaller groups sent with the rest."""
    for transport in transports:
        if transport is not world.transport:
            world.transport.bytes_sent += transport.bytes_sent
            transport.bytes_sent = 0


def forms_of(ranks: int) -> dict[str, tuple[Callable[..., Any], dict[str, int]]]:
    """The forms that so many ranks can take."""
    forms: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {"halo": (with_ghosts, {}), "1D": (in_rows, {})}
    for copies in (2, 4):
        if ranks % copies == 0 and copies * copies <= ranks:
            forms[f"1.5D, c = {copies}"] = (in_rows, {"copies": copies})
    if ranks > 1 and math.isqrt(ranks) ** 2 == ranks:
        forms["2D"] = (in_a_square, {})
    if ranks > 1 and round(ranks ** (1 / 3)) ** 3 == ranks:
        forms["3D"] = (in_a_cube, {})
    return forms


def formula(form: str, nodes: int, edges: int, columns: int, ranks: int) -> float | None:
    """Megabytes of a process and layer, forward and back, by the table of the talk; none for the halo."""
    dense = 2 * 4.0 * nodes * columns / MB
    if form == "1D":
        return dense
    if form.startswith("1.5D"):
        copies = int(form[-1])
        return dense * (1 / copies + copies / ranks)
    if form == "2D":
        return (4 * dense + 8.0 * edges / MB) / math.sqrt(ranks)
    if form == "3D":
        return (6 * dense + 8.0 * edges / MB) / ranks ** (2 / 3)
    return None


# --- measuring -------------------------------------------------------------------------------------------------------


def measured(world: World, graph: Graph, name: str, columns: int, repeats: int) -> Row:
    """Bytes and seconds of a form on this rank, and how far its share is from the whole product. *Collective*."""
    torch.set_num_threads(1)
    x = torch.randn(graph.num_nodes, columns, generator=torch.Generator().manual_seed(0))
    form, options = forms_of(world.size)[name]
    seconds, apart, sent = [], 0.0, 0
    for turn in range(repeats + 1):
        world.transport.barrier()
        world.transport.bytes_sent = 0
        total = 0.0
        for edges in (graph.edge_index, graph.edge_index[::-1]):  # and back, with the transpose
            began = time.perf_counter()
            rows, cols, y = form(world, graph, x, edges, **options)
            total += world_seconds[world.rank] if name == "halo" else time.perf_counter() - began
            if turn == 0:
                whole = torch.zeros_like(x).index_add_(0, torch.from_numpy(edges[1].copy()), x[edges[0].copy()])
                expected = whole[rows][:, cols]
                apart = max(apart, float((y - expected).abs().max() / whole.abs().max()) if y.numel() else 0.0)
        sent = world.transport.bytes_sent
        seconds.append(total)
    return {"seconds": seconds[1:], "bytes": sent, "apart": apart}


def graphs_of(options: argparse.Namespace) -> list[Graph]:
    """An event in stored order, in its tiles; and a power-law graph, by METIS."""
    case = cases.chosen_case(options)
    store = EventStore(case.store)
    with store.open(store.events()[0]) as event:
        ids = np.arange(event.num_edges)
        ends = np.stack([event.read_edges(name, ids) for name in ("src", "dst")])
        tile = np.repeat(np.arange(event.num_tiles), np.diff(event.node_ptr))
        parts = {ranks: group(event.tile_graph(), ranks, options.grouping)[tile] for ranks in options.ranks}
        graphs = [Graph(case.name, event.num_nodes, ends, parts)]
    if options.nodes:
        rng = np.random.default_rng(options.seed)
        # A node's share of edges falls as a power of its number, in both directions.
        weight = (1 + np.arange(options.nodes)) ** -0.7
        ends = rng.choice(options.nodes, (2, 10 * options.nodes), p=weight / weight.sum())
        ends = rng.permutation(options.nodes)[ends]
        topology = Topology(ends, options.nodes)
        parts = {ranks: Metis(0)(topology, ranks) for ranks in options.ranks}
        graphs.append(Graph(f"power law, {options.nodes:,} nodes", options.nodes, ends, parts))
    return graphs


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "cagnet", case="large")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--nodes", type=int, default=100_000, help="of the power-law graph; 0: none (default 100000)")
    parser.add_argument("--columns", type=int, default=64, help="f (default 64)")
    parser.add_argument("--grouping", default="contiguous")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--transport", choices=("mpi", "gloo", "threads"), default="mpi" if find_mpiexec() else "gloo")
    parser.add_argument("--timeout", type=float, default=600.0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    results = measuring.Results("cagnet", options)
    right = True
    for graph in graphs_of(options):
        rows: list[Row] = []
        num_edges = graph.edge_index.shape[1]
        for ranks in options.ranks:
            for name in forms_of(ranks):
                how: dict[str, Any] = {"transport": options.transport, "timeout": options.timeout, "domain_size": ranks}
                found = run_ranks(measured, ranks, graph, name, options.columns, options.repeats, **how)
                row = {
                    "graph": graph.name, "ranks": ranks, "form": name,
                    "mb": statistics.mean(rank["bytes"] for rank in found) / MB,
                    "formula": formula(name, graph.num_nodes, num_edges, options.columns, ranks),
                    "seconds": statistics.median(slowest([rank["seconds"] for rank in found])),
                    "apart": max(rank["apart"] for rank in found),
                }  # fmt: skip
                rows.append(row)
                results.add(**row)
        show(results, graph, num_edges, rows)
        right &= all(row["apart"] < 1e-5 for row in rows)
    results.end()
    return int(not right)


def show(results: measuring.Results, graph: Graph, num_edges: int, rows: Sequence[Row]) -> None:
    halo = {row["ranks"]: row["mb"] for row in rows if row["form"] == "halo"}
    columns: Columns = {
        "ranks": ranks_of,
        "form": lambda row: row["form"],
        "MB": lambda row: f"{row['mb']:.3g}",
        "x halo": lambda row: f"{row['mb'] / halo[row['ranks']]:.3g}" if halo[row["ranks"]] else "",
        "formula MB": lambda row: f"{row['formula']:.3g}" if row["formula"] else "",
        "seconds": lambda row: f"{row['seconds']:.3g}",
    }
    note = "MB: sent by a rank on average, a layer forward and back. All shares are those of the whole product."
    results.show(f"{graph.name}: {graph.num_nodes:,} nodes, {num_edges:,} edges", columns, rows, note)


if __name__ == "__main__":
    measuring.run(__file__)
