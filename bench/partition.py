"""Which tile shape, and which grouping of tiles into parts?

    python bench/partition.py                                    two simulated events
    python bench/partition.py --data DIR --event 1012 1009       real events
    python bench/partition.py --hits 5000 --tiles 16 --parts 2 4          seconds, to see that it runs

Prints a table of tile shapes and one of groupings, each figure the mean over the events, and adds a JSON line for
every event, shape, grouping and number of parts. Tiles are numbered along phi first, as in the store.

Tiles: milliseconds to cut | edges whose ends lie in two tiles | other tiles a tile shares edges with | distinct (tile
of `dst`, `src` node) pairs per node, the partial sums at `src` | largest tile / mean tile, in incoming edges and in
nodes.
Parts: milliseconds to group | milliseconds of `build_plan` on the part with most edges, what others ask of it at hand |
cut edges / edges | ghosts / owned nodes over all parts, on the worst part, and under the `incoming` policy (the
other columns are `incident`) | largest / mean part in owned edges, local edges and owned nodes | parts a part receives
from | local edges that touch no ghost, overall and on the worst part | tiles that touch no ghost | true segments cut |
particles with a true segment cut.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import cases
import flags
import measuring
import numpy as np
from measuring import Columns, Row, alike, mean
from rich.progress import track

from domainpar.plan import LocalEdges, build_plan, select_edges
from domainpar.tracking.events.graph import EventGraph
from domainpar.tracking.events.stored_order import StoredOrder, stored_order
from partitioners import (
    GROUPINGS,
    PARTITIONERS,
    Partitioner,
    PhiEta,
    TileGraph,
    Topology,
    get_partitioner,
    group,
    number_along_phi,
)
from partitioners.quality import imbalance, measure, measure_truth
from partitioners.topology import IntArray


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    results = measuring.Results("partition", options)
    source = cases.source_of(options)
    for name in source.names:
        event = source.read(name)
        results.console.print(f"event {name}: {event.num_nodes:,} nodes, {event.num_edges:,} edges")
        how: dict[str, Any] = {"console": results.console, "transient": True, "disable": not sys.stdout.isatty()}
        how["total"] = len(shapes(options)) * (1 + len(options.groupings) * len(options.parts))
        for row in track(rows_of(name, event, options), "cutting", **how):
            results.add(**row)
    show(results)
    results.end()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "partition", case="large", events=2, partitioner=None)
    parser.add_argument("--shapes", nargs="+", choices=PARTITIONERS, default=list(PARTITIONERS), help="of tiles")
    parser.add_argument("--groupings", nargs="+", choices=GROUPINGS, default=["contiguous", "metis"])
    parser.add_argument("--parts", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=3, help="timings are medians of this many, after one more")
    parser.set_defaults(width=180, tiles=256)
    return parser.parse_args(argv)


def shapes(options: argparse.Namespace) -> dict[str, Partitioner]:
    """Partitioners by what a table calls them; `phi-eta` in several grids, its own choice first."""
    tiles = options.tiles
    partitioners: dict[str, Partitioner] = {}
    for name in options.shapes:
        if name != "phi-eta":
            partitioners[f"{name} {tiles}"] = get_partitioner(name, options.seed)
            continue
        own = PhiEta().grid(tiles)[0]
        for wedges in dict.fromkeys([own, *(tiles // slices for slices in (2, 4, 8, 16) if tiles % slices == 0)]):
            partitioners[f"phi-eta {wedges}x{tiles // wedges}"] = PhiEta(wedges)
    return partitioners


def rows_of(name: str, event: EventGraph, options: argparse.Namespace) -> Iterator[Row]:
    """For each way to tile: the tiles; then for each grouping and number of parts: seconds and what is cut."""
    position = event.hits.position
    assert position is not None
    topology, edge_index = Topology(event.edge_index, event.num_nodes, position), event.edge_index
    for shape, partitioner in shapes(options).items():
        seconds = measuring.timed(lambda cut=partitioner: cut(topology, options.tiles), options.repeats)
        tile = number_along_phi(partitioner(topology, options.tiles), position, options.tiles)
        yield {"case": name, "shape": shape, "tiling_seconds": seconds, **tile_row(edge_index, tile, options.tiles)}
        tiles = TileGraph.from_assignment(edge_index, tile, options.tiles)
        order = stored_order(edge_index, tile, options.tiles)
        for grouping in options.groupings:
            for parts in options.parts:
                grouped = (tiles, parts, grouping, options.seed)
                seconds = measuring.timed(lambda grouped=grouped: group(*grouped), options.repeats)
                part_of_tile = group(*grouped)
                names = {"case": name, "shape": shape, "grouping": grouping, "parts": parts}
                plan = plan_seconds(order, part_of_tile, parts, options.repeats)
                row = part_row(event, tile, part_of_tile, parts)
                yield {**names, "grouping_seconds": seconds, "plan_seconds": plan, **row}


def plan_seconds(order: StoredOrder, part_of_tile: IntArray, parts: int, repeats: int) -> measuring.Spread:
    """Seconds of `build_plan` for the part with most edges, in stored order, without reading, asking and waiting."""
    owner = np.repeat(part_of_tile, np.diff(order.node_ptr))
    touching = np.bincount(owner[order.dst], minlength=parts) + np.bincount(owner[order.src], minlength=parts)
    part = int(touching.argmax())
    edges = select_edges(np.stack([order.src, order.dst]), owner, part, "incident")
    asked = asked_of(edges, owner, part, parts)
    return measuring.timed(lambda: build_plan(edges, owner, part, parts, "incident", lambda wanted: asked), repeats)


def asked_of(edges: LocalEdges, owner: IntArray, part: int, parts: int) -> list[IntArray]:
    """The nodes of a part that each other part has an edge at, ascending: what those ask for under `incident`."""
    near = np.concatenate([edges.src, edges.dst])
    far = owner[np.concatenate([edges.dst, edges.src])]
    cut = (owner[near] == part) & (far != part)
    return [np.unique(near[cut & (far == other)]) for other in range(parts)]


def tile_row(edge_index: IntArray, tile: Any, num_tiles: int) -> Row:
    """Quality of tiles, before grouping."""
    joining, touched, src_pairs = tile_counts(edge_index, tile, num_tiles)
    return {
        "joining_share": joining / max(edge_index.shape[1], 1),
        "tiles_touched": float(touched.mean()),
        "src_pairs_per_node": src_pairs / max(len(tile), 1),
        "tile_edge_imbalance": imbalance(np.bincount(tile[edge_index[1]], minlength=num_tiles)),
        "tile_node_imbalance": imbalance(np.bincount(tile, minlength=num_tiles)),
    }


def part_row(event: EventGraph, tile: Any, part_of_tile: Any, num_parts: int) -> Row:
    """Quality of parts: cut edges, ghosts, balance."""
    edge_index, part = event.edge_index, part_of_tile[tile]
    quality = measure(edge_index, part, num_parts)
    free = tiles_without_ghosts(edge_index, tile, part_of_tile)
    shares = {}
    if event.label is not None and event.hits.particle_id is not None:
        truth = measure_truth(edge_index, part, event.label, event.hits.particle_id)
        shares["segments_cut_share"] = truth.segments_cut / max(truth.segments, 1)
        shares["tracks_cut_share"] = truth.tracks_cut / max(truth.tracks, 1)
    return {
        "cut_share": quality.cut_share,
        "ghost_ratio": quality.incident_ghost_ratio,
        "ghost_ratio_worst": float((quality.incident_ghosts / np.maximum(quality.owned_nodes, 1)).max()),
        "ghosts_worst": int(quality.incident_ghosts.max()),
        "incoming_ghost_ratio": float(quality.incoming_ghosts.sum() / max(quality.owned_nodes.sum(), 1)),
        "edge_imbalance": quality.edge_imbalance,
        "incident_imbalance": quality.incident_imbalance,
        "node_imbalance": quality.node_imbalance,
        "neighbours": float(quality.neighbours.mean()),
        "neighbours_worst": int(quality.neighbours.max()),
        "ghost_free_share": float(quality.inner_edges.sum() / max(quality.incident_edges.sum(), 1)),
        "ghost_free_worst": float((np.maximum(quality.inner_edges, 1) / np.maximum(quality.incident_edges, 1)).min()),
        "ghost_free_tiles": float(free.mean()),
        **shares,
    }


def tile_counts(edge_index: IntArray, tile: IntArray, num_tiles: int) -> tuple[int, IntArray, int]:
    """Counts of the edges between tiles.

    Returns:
        Edges that join two tiles; the other tiles that share an edge with each tile, int64 [K]; and the distinct
        (tile of `dst`, `src` node) pairs, which are the partial sums at `src`, and the rows that tiles gather.
    """
    src_tile, dst_tile = tile.astype(np.int64)[edge_index]
    apart = src_tile != dst_tile
    # Pairs of tiles as one number, each way.
    one_way = np.unique(src_tile[apart] * num_tiles + dst_tile[apart])
    both_ways = np.union1d(one_way, one_way % num_tiles * num_tiles + one_way // num_tiles)
    touched = np.bincount(both_ways // num_tiles, minlength=num_tiles)
    return int(apart.sum()), touched, len(np.unique(dst_tile * len(tile) + edge_index[0]))


def tiles_without_ghosts(edge_index: IntArray, tile: IntArray, part_of_tile: IntArray) -> Any:
    """Whether each tile touches no ghost, and so can be computed before ghosts arrive, bool [K]."""
    src_tile, dst_tile = tile[edge_index]
    cut = part_of_tile[src_tile] != part_of_tile[dst_tile]
    free = np.ones(len(part_of_tile), bool)
    free[src_tile[cut]] = free[dst_tile[cut]] = False
    return free


def show(results: measuring.Results) -> None:
    """Two tables, each figure the mean over events."""
    tiles, parts = ([row for row in results.rows if ("grouping" in row) == of_parts] for of_parts in (False, True))
    events = len({row["case"] for row in tiles})
    results.show(f"Tiles, mean of {events} events", TILE_COLUMNS, alike(tiles, "shape"))
    results.show(f"Parts, mean of {events} events", PART_COLUMNS, alike(parts, "shape", "grouping", "parts"))


TILE_COLUMNS: Columns = {
    "shape": lambda rows: rows[0]["shape"],
    "ms": mean("tiling_seconds", "{:.0f}"),
    "edges joining": mean("joining_share", "{:.1%}"),
    "tiles touched": mean("tiles_touched", "{:.1f}"),
    "src pairs / node": mean("src_pairs_per_node", "{:.2f}"),
    "edge imb.": mean("tile_edge_imbalance", "{:.2f}"),
    "node imb.": mean("tile_node_imbalance", "{:.2f}"),
}
PART_COLUMNS: Columns = {
    "shape": lambda rows: rows[0]["shape"],
    "grouping": lambda rows: rows[0]["grouping"],
    "parts": lambda rows: str(rows[0]["parts"]),
    "ms": mean("grouping_seconds", "{:.1f}"),
    "plan ms": mean("plan_seconds", "{:.1f}"),
    "cut": mean("cut_share", "{:.1%}"),
    "ghosts": mean("ghost_ratio", "{:.1%}"),
    "worst": mean("ghost_ratio_worst", "{:.0%}"),
    "incoming": mean("incoming_ghost_ratio", "{:.1%}"),
    "edge imb.": mean("edge_imbalance", "{:.3f}"),
    "local": mean("incident_imbalance", "{:.3f}"),
    "node": mean("node_imbalance", "{:.2f}"),
    "neighbours": mean("neighbours", "{:.1f}"),
    "no ghost": mean("ghost_free_share", "{:.1%}"),
    "least": mean("ghost_free_worst", "{:.0%}"),
    "tiles": mean("ghost_free_tiles", "{:.0%}"),
    "segments": mean("segments_cut_share", "{:.1%}"),
    "tracks": mean("tracks_cut_share", "{:.0%}"),
}


if __name__ == "__main__":
    measuring.run(__file__)
