"""Small events for self-tests, made of whole numbers only: the same bits on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from domainpar.measure.ring import NUM_LAYERS, REACH, ring_edges
from domainpar.tracking.events.graph import EventGraph, Hits, IntArray
from domainpar.tracking.events.store import EventStore, event_file_name, write_event, write_manifest

NUM_TILES = 24
NUM_FEATURES, NUM_EDGE_FEATURES = 3, 4


def ring_event(num_tracks: int, seed: int = 0) -> EventGraph:
    """Straight tracks through round layers: hit i of a layer belongs to track i, candidates are its neighbours.

    Args:
        num_tracks: Hits of a layer.
        seed: Seed of the features, which are whole numbers over 1024.
    """
    layer, place = np.divmod(np.arange(NUM_LAYERS * num_tracks), num_tracks)
    edge_index = ring_edges(num_tracks)
    label = (np.arange(edge_index.shape[1]) % (2 * REACH + 1) == REACH).astype(np.uint8)
    label[-2:] = 0  # a self-loop and a repeated edge
    generator = np.random.default_rng(seed)

    def drawn(rows: int, columns: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return (generator.integers(-1024, 1025, (rows, columns)) / 1024).astype(np.float32)

    hits = Hits(
        event_id=f"toy{seed:03d}",
        hit_id=np.arange(len(layer)) + 1,
        position=None,
        volume=np.full(len(layer), 8, np.int32),
        layer=(2 * layer + 2).astype(np.int32),
        module=place.astype(np.int32),
    )
    return EventGraph(
        hits=hits,
        features=drawn(len(layer), NUM_FEATURES),
        feature_names=tuple(f"node_{number}" for number in range(NUM_FEATURES)),
        edge_index=edge_index,
        edge_features=drawn(edge_index.shape[1], NUM_EDGE_FEATURES),
        edge_feature_names=tuple(f"edge_{number}" for number in range(NUM_EDGE_FEATURES)),
        label=label,
    )


def tiles_of(graph: EventGraph, num_tiles: int) -> IntArray:
    """Tile of each node: wedges of equal numbers of tracks."""
    place = graph.hits.module.astype(np.int64)
    return place * num_tiles // (int(place.max()) + 1)


def tiles_for(num_ranks: int) -> int:
    """Enough tiles for every rank to own one. As many as possible have the same: hashes depend on it."""
    return max(NUM_TILES, num_ranks)


@contextmanager
def toy_store(*graphs: EventGraph, num_ranks: int = 1) -> Iterator[EventStore]:
    """A store of some events, with a tile for each rank, in a temporary directory of this rank's own."""
    num_tiles = tiles_for(num_ranks)
    with TemporaryDirectory(prefix="domainpar-") as name:
        directory = Path(name)
        records = [
            write_event(directory / event_file_name(graph.hits.event_id), graph, tiles_of(graph, num_tiles), num_tiles)
            for graph in graphs
        ]
        write_manifest(directory, [replace(record, split="train") for record in records], {})
        yield EventStore(directory)
