"""Ways to cut an event, and a store on several ranks in words: sizes, memory and cuts, for `prepare --report`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path

import numpy as np

from domainpar.common.text_table import text_table
from domainpar.tracking.events.store import EventRecord, EventStore, StoredEvent, WholeEvent
from partitioners import BY_POSITION, PARTITIONERS, TileGraph, Topology, get_partitioner, group, number_along_phi
from partitioners.quality import Quality, TruthCut, measure, measure_truth
from partitioners.topology import FloatArray, IntArray

# `random` cuts worse than any of them.
COMPARED = tuple(name for name in PARTITIONERS if name != "random")
GROUPINGS = ("contiguous", "metis")
NUM_PARTS = (2, 4, 8, 16, 32)
STORED = "stored"
"""The tiles of the store, whichever partitioner made them."""

BINS = 8
BAR = 40

Memory = Callable[[IntArray, IntArray], IntArray]
"""Predicted bytes of each part, given its nodes with ghosts and its local edges."""


@dataclass(frozen=True, eq=False)
class Tiling:
    """Tiles of an event.

    Attributes:
        partitioner: What made them; `STORED` of those of the store.
        edge_index: Edges of the event, [2, E].
        tiles: The tiles.
        tile_of_node: Tile of each node, [N].
        label, particle_id: Of each edge and each node, where they are known and read.
    """

    partitioner: str
    edge_index: IntArray
    tiles: TileGraph
    tile_of_node: IntArray
    label: IntArray | None = None
    particle_id: IntArray | None = None


@dataclass(frozen=True, eq=False)
class Cut:
    """One way to cut one event.

    Attributes:
        tiling: Its tiles.
        grouping: How they are gathered into parts.
        part_of_node: Part of each node, [N].
        quality: Sizes of the parts, and what is between them.
    """

    tiling: Tiling
    grouping: str
    part_of_node: IntArray
    quality: Quality

    @classmethod
    def of(cls, tiling: Tiling, grouping: str, num_parts: int, seed: int = 0) -> Cut:
        """Gather tiles into so many parts."""
        part = group(tiling.tiles, num_parts, grouping, seed)[tiling.tile_of_node]
        return cls(tiling, grouping, part, measure(tiling.edge_index, part, num_parts))

    @property
    def num_parts(self) -> int:
        """Its parts."""
        return len(self.quality.owned_nodes)

    @cached_property
    def truth(self) -> TruthCut | None:
        """True segments and tracks that it crosses."""
        tiling = self.tiling
        if tiling.label is None:
            return None
        return measure_truth(tiling.edge_index, self.part_of_node, tiling.label, tiling.particle_id)


def print_report(directory: str | Path, memory: Memory, network: str) -> None:
    """Print what a store holds, and what each partitioner, grouping and number of parts would cut.

    Args:
        directory: The store.
        memory: Predicts the memory of a training step.
        network: The network that it predicts for, in words.

    Raises:
        StoreError: If the store or an event cannot be read.
    """
    store = EventStore(directory)
    print(describe_store(store, memory, network), compare_cuts(store), sep="\n\n")


def describe_store(store: EventStore, memory: Memory, network: str, num_parts: int = 8) -> str:
    """Histograms of nodes and edges per event, and of nodes, edges and predicted memory per rank.

    Args:
        store: The store; every event is read.
        memory: Predicts the memory of a training step.
        network: The network that it predicts for, in words.
        num_parts: Ranks that share an event; tiles are grouped as they are stored, contiguously.

    Raises:
        StoreError: If an event cannot be read.
    """
    records = store.events()
    parts = [_stored_parts(store, record, num_parts) for record in records]
    nodes = np.concatenate([q.owned_nodes + q.incident_ghosts for q in parts]) if parts else np.zeros(0, np.int64)
    edges = np.concatenate([q.incident_edges for q in parts]) if parts else np.zeros(0, np.int64)
    megabytes = memory(nodes, edges) / 2**20
    return "\n".join(
        [
            _summary(store, records),
            histogram("nodes per event", np.array([record.num_nodes for record in records])),
            histogram("edges per event", np.array([record.num_edges for record in records])),
            f"With {num_parts} ranks on an event, tiles as stored, grouped contiguously:",
            histogram("nodes per rank, ghosts included", nodes),
            histogram("local edges per rank", edges),
            histogram(f"predicted MiB per rank, one training step, {network}, bare process not counted", megabytes),
        ]
    )


def compare_cuts(
    store: EventStore,
    *,
    partitioners: Sequence[str] = COMPARED,
    groupings: Sequence[str] = GROUPINGS,
    num_parts: Sequence[int] = NUM_PARTS,
    seed: int = 0,
) -> str:
    """A table of what each partitioner, grouping and number of parts would cut, on the event of median size.

    Args:
        store: The store.
        partitioners: Partitioners to cut the event with, into as many tiles as it is stored in.
        groupings: Groupings of the tiles.
        num_parts: Numbers of parts.
        seed: Seed of what is random.

    Raises:
        StoreError: If the event cannot be read.
    """
    record = median_event(store)
    if record is None:
        return "The store has no events."
    with store.open(record) as event:
        rows = [
            _row(Cut.of(tiling, *way, seed))
            for tiling in tilings_of(event, partitioners, seed)  # one at a time: a full event's take their memory
            for way in product(groupings, num_parts)
        ]
    title = f"Event {record.event} ({record.num_nodes} nodes, {record.num_edges} edges, {record.num_tiles} tiles)"
    return "\n".join([title + _SELECTION_NOTE, *text_table(_HEADER, rows, words=2)])


def stored_tiling(event: StoredEvent) -> Tiling:
    """An event in the tiles that it is stored in."""
    ids = np.arange(event.num_edges)
    edge_index = np.stack([event.read_edges(name, ids) for name in ("src", "dst")])
    return Tiling(
        STORED, edge_index, event.tile_graph(), np.repeat(np.arange(event.num_tiles), np.diff(event.node_ptr))
    )


def tilings_of(event: StoredEvent, partitioners: Sequence[str], seed: int) -> Iterator[Tiling]:
    """An event in other tiles, as many as it is stored in; without those for which it lacks positions."""
    if not partitioners:
        return
    whole = WholeEvent(event)  # partitioners such as `contiguous` go by the order of the source
    topology = Topology(whole.edge_index, event.num_nodes, whole.nodes("position"))
    label, particle_id = whole.edges("label"), whole.nodes("particle_id")
    for name in partitioners:
        if topology.position is None and name in BY_POSITION:
            continue
        assignment = get_partitioner(name, seed)(topology, event.num_tiles)
        if topology.position is not None:
            assignment = number_along_phi(assignment, topology.position, event.num_tiles)
        tiles = event.tile_graph().from_assignment(topology.edge_index, assignment, event.num_tiles)
        yield Tiling(name, topology.edge_index, tiles, assignment, label, particle_id)


def median_event(store: EventStore) -> EventRecord | None:
    """The event whose number of edges is the median; None in an empty store."""
    records = sorted(store.events(), key=lambda record: (record.num_edges, record.event))
    return records[len(records) // 2] if records else None


def histogram(title: str, values: IntArray | FloatArray) -> str:
    """Bars of counts in equal bins, with smallest, median and largest value; a few values are listed as they are."""
    if len(values) <= 3:
        return f"{title}: {', '.join(f'{value:,.0f}' for value in values) or 'none'}"
    low, middle, high = (float(np.quantile(values, level)) for level in (0, 0.5, 1))
    head = f"{title}: smallest {low:,.0f}, median {middle:,.0f}, largest {high:,.0f}"
    if low == high:
        return f"{head} (all {len(values)} alike)"
    if np.issubdtype(values.dtype, np.integer) and high - low < BINS:  # narrower bins would hold no whole number
        counts = np.bincount(np.asarray(values, np.int64) - int(low))
        labels = [f"{int(low) + i:,}" for i in range(len(counts))]
    else:
        counts, borders = np.histogram(values, bins=BINS)
        digits = max(0, -math.floor(math.log10((high - low) / BINS)))
        labels = [f"{left:,.{digits}f} - {right:,.{digits}f}" for left, right in pairwise(borders)]
    width = max(map(len, labels))
    bars = [
        f"  {label:>{width}} | {'#' * int(np.ceil(BAR * count / counts.max()))} {count}"
        for label, count in zip(labels, counts)
    ]
    return "\n".join([head, *bars])


_SELECTION_NOTE = (
    ", the one of median size.\n"
    "cut: edges between parts. ghosts: per owned node. imbalance: largest part / mean part. neighbours: most of any "
    "part.\nsegments, tracks: true ones that the cut crosses (naive sectors lose them, an exact halo does not)."
)
_HEADER: tuple[str, ...] = (
    "partitioner", "grouping", "P", "cut %", "ghosts %", "node imb.", "edge imb.", "neighbours", "segments %",
    "tracks %",
)  # fmt: skip


def _row(cut: Cut) -> tuple[str, ...]:
    def percent(part: int, whole: int) -> str:
        return f"{100 * part / whole:.1f}" if whole else "-"

    quality = cut.quality
    return (
        cut.tiling.partitioner,
        cut.grouping,
        str(cut.num_parts),
        f"{100 * quality.cut_share:.1f}",
        f"{100 * quality.incident_ghost_ratio:.1f}",
        f"{quality.node_imbalance:.2f}",
        f"{quality.edge_imbalance:.2f}",
        str(int(quality.neighbours.max())),
        percent(cut.truth.segments_cut, cut.truth.segments) if cut.truth else "-",
        percent(cut.truth.tracks_cut, cut.truth.tracks) if cut.truth else "-",
    )


def _summary(store: EventStore, records: Sequence[EventRecord]) -> str:
    splits = ", ".join(f"{len(store.events(split))} {split}" for split in ("train", "val", "test"))
    unlabelled = sum(not record.has_labels for record in records)
    without = f"; {unlabelled} without labels" if unlabelled else ""
    tiles = sorted({record.num_tiles for record in records})
    shown = f"{tiles[0]} to {tiles[-1]}" if len(tiles) > 1 else (str(tiles[0]) if tiles else "no")
    size = sum(record.bytes for record in records) / 2**20
    return (
        f"{store.path}: {len(records)} events ({splits}{without}), {size:,.1f} MiB, {shown} tiles each.\n"
        f"Node features: {', '.join(store.feature_names) or 'none'}. "
        f"Edge features: {', '.join(store.edge_feature_names) or 'none'}."
    )


def _stored_parts(store: EventStore, record: EventRecord, num_parts: int) -> Quality:
    with store.open(record) as event:
        return Cut.of(stored_tiling(event), "contiguous", num_parts).quality
