"""Which tile shape, and which grouping of tiles into parts?

    python bench/partition.py                                    two simulated events
    python bench/partition.py --data DIR --events 1012 1009      real events: TrackML CSV files, or graphs as .npz with
                                                                 edge_index, position and, for truth, label, particle_id

Prints a table of tile shapes and one of groupings, each figure the mean over the events, and appends a JSON line for
every event, shape, grouping and number of parts. Tiles are numbered along phi first, as in the store.

Tiles: seconds to cut | edges whose ends lie in two tiles | other tiles a tile shares edges with | distinct (tile of
`dst`, `src` node) pairs per node, the partial sums at `src` | largest tile / mean tile, in incoming edges and in nodes.
Parts: cut edges / edges | ghosts / owned nodes over all parts, on the worst part, and under the `incoming` policy (the
other columns are `incident`) | largest / mean part in owned edges, local edges and owned nodes | parts a part receives
from | local edges that touch no ghost, overall and on the worst part | tiles that touch no ghost | true segments cut |
particles with a true segment cut.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import measuring
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import partitioners
from partitioners import Metis, Partitioner, Phi, PhiEta, TileGraph, Topology, group, number_along_phi
from partitioners.quality import imbalance, measure, measure_tiles, measure_truth, tiles_without_ghosts

GROUPINGS = ("contiguous", "metis")
Row = dict[str, Any]
Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class Case:
    """One event to cut. `label` and `particle_id` are None without truth."""

    name: str
    topology: Topology
    label: partitioners.topology.IntArray | None
    particle_id: partitioners.topology.IntArray | None


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    about = {"bench": "partition", **measuring.provenance(), "seed": options.seed}
    console = Console(width=options.width)
    rows = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as out:
        for case in cases(options):
            console.print(f"event {case.name}: {case.topology.num_nodes:,} nodes, {case.topology.num_edges:,} edges")
            for row in watched(rows_of(case, options), options, console):
                rows.append(row)
                out.write(json.dumps({**about, **row}) + "\n")
    console.print(tile_table(rows), grouping_table(rows))
    console.print(f"JSON lines appended to {options.out}")


def watched(rows: Iterator[Row], options: argparse.Namespace, console: Console) -> Iterable[Row]:
    total = len(shapes(options.tiles, options.seed)) * (1 + len(GROUPINGS) * len(options.parts))
    return track(rows, "cutting", total=total, console=console, transient=True, disable=not console.is_terminal)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with TrackML CSV files or .npz graphs; default: simulate")
    parser.add_argument("--events", nargs="+", help="events in the folder; default: the first two")
    parser.add_argument("--hits", type=int, default=100_000, help="hits of a simulated event")
    parser.add_argument("--phi-slope", type=float, default=6e-4, help="cut on candidate edges in rad/mm")
    parser.add_argument("--z0", type=float, default=200.0, help="cut on candidate edges in mm")
    parser.add_argument("--tiles", type=int, default=256)
    parser.add_argument("--parts", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=3, help="timings are medians of this many, after one more")
    parser.add_argument("--seed", type=int, default=0, help="of METIS and of simulated events")
    parser.add_argument("--width", type=int, default=180, help="of the tables in characters")
    parser.add_argument("--out", type=Path, default=Path("bench/results/partition.jsonl"))
    return parser.parse_args(argv)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    if options.data is None:
        yield from simulated_cases(options)
    elif any(options.data.glob("*.npz")):
        yield from npz_cases(options.data, options.events)
    else:
        yield from trackml_cases(options)


def simulated_cases(options: argparse.Namespace) -> Iterator[Case]:
    from domainpar.events.simulate import simulate_event

    for seed in (options.seed, options.seed + 1):
        hits = simulate_event(seed, options.hits)
        yield case_of(f"simulated-{seed}", hits, options)


def trackml_cases(options: argparse.Namespace) -> Iterator[Case]:
    from domainpar.events.trackml import list_events, read_event

    for event in chosen(list_events(options.data), options.events):
        yield case_of(event, read_event(options.data, event), options)


def case_of(name: str, hits: Any, options: argparse.Namespace) -> Case:
    from domainpar.events.construct import Cuts, build_graph

    graph = build_graph(hits, Cuts(phi_slope=options.phi_slope, z0=options.z0))
    return Case(name, Topology(graph.edge_index, graph.num_nodes, hits.position), graph.label, hits.particle_id)


def npz_cases(folder: Path, wanted: Sequence[str] | None) -> Iterator[Case]:
    for name in chosen(sorted(path.stem for path in folder.glob("*.npz")), wanted):
        with np.load(folder / f"{name}.npz") as arrays:
            topology = Topology(arrays["edge_index"], len(arrays["position"]), arrays["position"])
            yield Case(name, topology, arrays.get("label"), arrays.get("particle_id"))


def chosen(known: Sequence[str], wanted: Sequence[str] | None) -> list[str]:
    """The events that were asked for, matched by the end of their names: 1012 finds event000001012."""
    if wanted is None:
        return list(known[:2])
    found = [name for end in wanted for name in known if name.endswith(end)]
    if len(found) != len(wanted):
        sys.exit(f"events {' '.join(wanted)} match {found} of {list(known)}; name each event once.")
    return found


def shapes(num_tiles: int, seed: int) -> dict[str, Partitioner]:
    wedges = [count for count in (num_tiles // 2, num_tiles // 4, num_tiles // 8, num_tiles // 16) if count]
    grids = {f"phi-eta {count}x{num_tiles // count}": PhiEta(count) for count in wedges if num_tiles % count == 0}
    return {f"phi {num_tiles}": Phi(), **grids, f"metis {num_tiles}": Metis(seed)}


def rows_of(case: Case, options: argparse.Namespace) -> Iterator[Row]:
    position = case.topology.position
    assert position is not None
    for shape, partitioner in shapes(options.tiles, options.seed).items():
        tile, seconds = timed(lambda cut=partitioner: cut(case.topology, options.tiles), options.repeats)
        tile = number_along_phi(tile, position, options.tiles)
        yield {"case": case.name, "shape": shape, "tiling_seconds": seconds, **tile_row(case, tile, options.tiles)}
        tiles = TileGraph.from_assignment(case.topology.edge_index, tile, options.tiles)
        for grouping in GROUPINGS:
            for parts in options.parts:
                part_of_tile, seconds = timed(
                    lambda tiles=tiles, parts=parts, grouping=grouping: group(tiles, parts, grouping, options.seed),
                    options.repeats,
                )
                names = {"case": case.name, "shape": shape, "grouping": grouping, "parts": parts}
                yield {**names, "grouping_seconds": seconds, **part_row(case, tile, part_of_tile, parts)}


def timed(call: Callable[[], Value], repeats: int) -> tuple[Value, float]:
    value, seconds = call(), []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return value, statistics.median(seconds)


def tile_row(case: Case, tile: Any, num_tiles: int) -> Row:
    quality = measure_tiles(case.topology.edge_index, tile, num_tiles)
    return {
        "joining_share": quality.joining_share,
        "tiles_touched": float(quality.tiles_touched.mean()),
        "src_pairs_per_node": quality.src_pairs_per_node,
        "tile_edge_imbalance": imbalance(quality.edge_counts),
        "tile_node_imbalance": imbalance(np.bincount(tile, minlength=num_tiles)),
    }


def part_row(case: Case, tile: Any, part_of_tile: Any, num_parts: int) -> Row:
    edge_index, part = case.topology.edge_index, part_of_tile[tile]
    quality = measure(edge_index, part, num_parts)
    free = tiles_without_ghosts(edge_index, tile, part_of_tile)
    return {
        "cut_share": quality.cut_share,
        "ghost_ratio": quality.incident_ghost_ratio,
        "ghost_ratio_worst": float((quality.incident_ghosts / np.maximum(quality.owned_nodes, 1)).max()),
        "ghosts_worst": int(quality.incident_ghosts.max()),
        "incoming_ghost_ratio": quality.incoming_ghost_ratio,
        "edge_imbalance": quality.edge_imbalance,
        "incident_imbalance": quality.incident_imbalance,
        "node_imbalance": quality.node_imbalance,
        "neighbours": float(quality.neighbours.mean()),
        "neighbours_worst": int(quality.neighbours.max()),
        "ghost_free_share": float(quality.inner_edges.sum() / max(quality.incident_edges.sum(), 1)),
        "ghost_free_worst": float(quality.incident_ghost_free.min()),
        "ghost_free_tiles": float(free.mean()),
        **truth_row(case, part),
    }


def truth_row(case: Case, part: Any) -> Row:
    if case.label is None or case.particle_id is None:
        return {}
    truth = measure_truth(case.topology.edge_index, part, case.label, case.particle_id)
    return {
        "segments_cut_share": truth.segments_cut / max(truth.segments, 1),
        "tracks_cut_share": truth.tracks_cut / max(truth.tracks, 1),
    }


TILE_COLUMNS = (
    ("seconds", "tiling_seconds", "{:.2f}"),
    ("edges joining", "joining_share", "{:.1%}"),
    ("tiles touched", "tiles_touched", "{:.1f}"),
    ("src pairs / node", "src_pairs_per_node", "{:.2f}"),
    ("edge imb.", "tile_edge_imbalance", "{:.2f}"),
    ("node imb.", "tile_node_imbalance", "{:.2f}"),
)
PART_COLUMNS = (
    ("ms", "grouping_milliseconds", "{:.1f}"),
    ("cut", "cut_share", "{:.1%}"),
    ("ghosts", "ghost_ratio", "{:.1%}"),
    ("worst", "ghost_ratio_worst", "{:.0%}"),
    ("incoming", "incoming_ghost_ratio", "{:.1%}"),
    ("edge imb.", "edge_imbalance", "{:.3f}"),
    ("local", "incident_imbalance", "{:.3f}"),
    ("node", "node_imbalance", "{:.2f}"),
    ("neighbours", "neighbours", "{:.1f}"),
    ("no ghost", "ghost_free_share", "{:.1%}"),
    ("worst", "ghost_free_worst", "{:.0%}"),
    ("tiles", "ghost_free_tiles", "{:.0%}"),
    ("segments", "segments_cut_share", "{:.1%}"),
    ("tracks", "tracks_cut_share", "{:.0%}"),
)


def tile_table(rows: Sequence[Row]) -> Table:
    tiles = [row for row in rows if "grouping" not in row]
    return table("Tiles", ("shape",), TILE_COLUMNS, tiles)


def grouping_table(rows: Sequence[Row]) -> Table:
    parts = [{**row, "grouping_milliseconds": 1e3 * row["grouping_seconds"]} for row in rows if "grouping" in row]
    return table("Parts", ("shape", "grouping", "parts"), PART_COLUMNS, parts)


def table(title: str, keys: Sequence[str], columns: Sequence[tuple[str, str, str]], rows: Sequence[Row]) -> Table:
    """One line for each value of the keys, in order of appearance; each figure is the mean over events."""
    events = len({row["case"] for row in rows})
    drawn = Table(title=f"{title}, mean of {events} events")
    for heading in (*keys, *(heading for heading, _, _ in columns)):
        drawn.add_column(heading, no_wrap=True, justify="left" if heading in keys else "right")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    for names, members in groups.items():
        figures = (mean_of(members, name, form) for _, name, form in columns)
        drawn.add_row(*map(str, names), *figures, end_section="parts" in keys and names[-1] == rows[-1]["parts"])
    return drawn


def mean_of(rows: Sequence[Row], name: str, form: str) -> str:
    values = [row[name] for row in rows if name in row]
    return form.format(statistics.mean(values)) if values else "-"


if __name__ == "__main__":
    main()
