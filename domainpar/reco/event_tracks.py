"""The tracks of one event by every finder, and the files of them that other programs read; on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from domainpar import faults
from domainpar.compiling import clock
from domainpar.events.detector import field_of_surfaces
from domainpar.events.graph import FloatArray, IntArray, surface_numbers
from domainpar.events.store import StoredEvent
from domainpar.reco.classical.finder import find_tracks
from domainpar.reco.scores import CEILING, CLASSICAL, NETWORK, EventScores
from domainpar.reco.stitching import stitch
from domainpar.reco.track_files import DATASETS, TrackedEvent, write_acorn, write_csv
from domainpar.reco.tracks import TrackOptions, build_tracks

Format = Literal["zarr", "acorn", "csv"]

CERTAIN = 20.0  # as a logit: what a perfect network would say of a true segment


@dataclass(frozen=True)
class TrackFinders:
    """Finds the tracks of an event, and writes what other programs read.

    Attributes:
        options: How tracks are built from scores; None: not at all.
        directory: For files of other formats.
        format: Which; `zarr` for none.
        classical: Whether to look for helices as well.
        split_of: Split of each event by name.
    """

    options: TrackOptions | None
    directory: Path
    format: Format
    classical: bool
    split_of: Mapping[str, str]

    def __call__(self, event: StoredEvent, scores: EventScores) -> EventScores:
        """The scores with all tracks.

        Raises:
            Problem: If the event lacks positions, or has a layer that is none of TrackML's, where a finder needs them;
                or if its name cannot name a file of the format.
        """
        ids = event.ids_in_users_order()
        if self.options is not None:
            faults.reach("tracks")
            scores = with_tracks(event, scores, self.options, ids)
        if self.classical:
            scores = replace(scores, tracks={**scores.tracks, CLASSICAL: _classical_tracks(event, ids)})
        if self.format == "acorn":
            write_acorn(self.directory, _tracked(event, scores, ids), DATASETS[self.split_of[event.event_id]])
        if self.format == "csv":
            write_csv(self.directory, _tracked(event, scores, ids))
        return scores


def with_tracks(event: StoredEvent, scores: EventScores, options: TrackOptions, ids: IntArray) -> EventScores:
    """Scores with the tracks that they, and perfect ones, give; `ids` are those of the hits in the user's order.

    In naive mode an edge between two sectors has no score, and only stitching joins tracks of two sectors.

    Raises:
        Problem: If a walk is asked for where hits have no positions.
    """
    if options.method == "walk" and not event.has_positions:
        raise event.place.problem("a walk goes outward, but its hits have no positions", "take --tracks cc or junction")
    began = clock()
    position = event.read_nodes("position", ids) if event.has_positions else None
    volume, layer = (event.read_nodes(name, ids) for name in ("volume", "layer"))
    surface, field = surface_numbers(volume, layer), field_of_surfaces(volume, layer)
    edge_index = scores.edge_index[:, scores.edge_scored]

    def build(logits: FloatArray) -> IntArray:
        tracks = build_tracks(edge_index, logits[scores.edge_scored], surface, position, options)
        return tracks if position is None or not options.stitch else stitch(tracks, position, field=field)

    tracks = {NETWORK: build(scores.edge_logit)}
    seconds = {**scores.seconds, "tracks": clock() - began}
    if event.has_labels:
        label = scores.in_users_order(event.read_edges("label", np.arange(event.num_edges)))
        tracks[CEILING] = build(np.where(label > 0, CERTAIN, -CERTAIN))
    return replace(scores, tracks=tracks, seconds=seconds)


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
    label = event.read_edges("label", np.arange(event.num_edges)) if event.has_labels else None
    return TrackedEvent(
        event_id=event.event_id,
        hit_id=scores.hit_id,
        track_id=scores.tracks.get(NETWORK, np.full(event.num_nodes, -1, np.int64)),
        position=event.read_nodes("position", ids) if event.has_positions else None,
        edge_index=scores.edge_index,
        edge_score=scores.edge_score,
        label=None if label is None else scores.in_users_order(label),
        particle_id=event.read_nodes("particle_id", ids) if event.has_particle_ids else None,
        particles=event.particles(),
        seconds=scores.seconds.get("tracks", 0.0),
        **nodes,
    )
