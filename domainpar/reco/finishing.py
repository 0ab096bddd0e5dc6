"""What is done with the scores of an event before they are written: classical tracks, files for other programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from domainpar.events.graph import IntArray
from domainpar.events.store import StoredEvent
from domainpar.reco.classical.finder import find_tracks
from domainpar.reco.finding import CLASSICAL, NETWORK
from domainpar.reco.scores import EventScores
from domainpar.reco.track_files import DATASETS, TrackedEvent, write_acorn, write_csv

Format = Literal["zarr", "acorn", "csv"]


@dataclass(frozen=True)
class Finisher:
    """Finds classical tracks beside the network's, and writes what other programs read.

    Attributes:
        directory: Where files of other formats go.
        format: Which; `zarr` for none.
        classical: Whether to look for helices as well.
        split_of: Split of each event by name.
    """

    directory: Path
    format: Format
    classical: bool
    split_of: Mapping[str, str]

    def __call__(self, event: StoredEvent, scores: EventScores) -> EventScores:
        """Scores with all tracks; on one rank.

        Raises:
            Problem: If the event has no positions, or a layer that is none of TrackML's, and classical tracks are
                asked for; or if its name cannot name a file of the format.
        """
        ids = event.ids_in_users_order()
        if self.classical:
            scores = replace(scores, tracks={**scores.tracks, CLASSICAL: _classical_tracks(event, ids)})
        if self.format == "acorn":
            write_acorn(self.directory, _tracked(event, scores, ids), DATASETS[self.split_of[event.event_id]])
        if self.format == "csv":
            write_csv(self.directory, _tracked(event, scores, ids))
        return scores


def _classical_tracks(event: StoredEvent, ids: IntArray) -> IntArray:
    if not event.has_positions:
        raise event.place.problem("--classical follows helices, but its hits have no positions", "leave it out")
    position, volume, layer, module = (
        event.read_nodes(name, ids) for name in ("position", "volume", "layer", "module")
    )  # fmt: skip
    try:
        return find_tracks(position, volume, layer, module)
    except ValueError as error:
        raise event.place.of(error) from error


def _tracked(event: StoredEvent, scores: EventScores, ids: IntArray) -> TrackedEvent:
    nodes: dict[str, Any] = {name: event.read_nodes(name, ids) for name in ("volume", "layer", "module")}
    edges = np.empty(event.num_edges, np.int64)
    edges[scores.original_position] = np.arange(event.num_edges)
    return TrackedEvent(
        event_id=event.event_id,
        hit_id=scores.hit_id,
        track_id=scores.tracks.get(NETWORK, np.full(event.num_nodes, -1, np.int64)),
        position=event.read_nodes("position", ids) if event.has_positions else None,
        edge_index=scores.edge_index,
        edge_score=scores.edge_score,
        label=event.read_edges("label", edges) if event.has_labels else None,
        particle_id=event.read_nodes("particle_id", ids) if event.has_particle_ids else None,
        particles=event.particles(),
        seconds=scores.seconds.get("tracks", 0.0),
        **nodes,
    )
