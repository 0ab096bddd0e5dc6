"""The tracks of one event by every finder, and the files of them that other programs read; on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from domainpar import faults
from domainpar.compiling import clock
from domainpar.events.detector import field_of_surfaces
from domainpar.events.graph import FloatArray, IntArray, surface_numbers
from domainpar.events.store import StoredEvent, WholeEvent
from domainpar.reco.classical.finder import find_tracks
from domainpar.reco.scores import CEILING, CLASSICAL, NETWORK, EventScores
from domainpar.reco.stitching import stitch
from domainpar.reco.track_files import DATASETS, write_acorn, write_csv
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
        whole = WholeEvent(event)
        if self.options is not None:
            faults.reach("tracks")
            scores = with_tracks(whole, scores, self.options)
        if self.classical:
            scores = replace(scores, tracks={**scores.tracks, CLASSICAL: _classical_tracks(whole)})
        if self.format == "acorn":
            dataset = DATASETS[self.split_of[event.event_id]]
            write_acorn(self.directory, dataset, whole.hits, scores, whole.edges("label"))
        if self.format == "csv":
            write_csv(self.directory, scores)
        return scores


def with_tracks(whole: WholeEvent, scores: EventScores, options: TrackOptions) -> EventScores:
    """Scores with the tracks that they, and perfect ones, give.

    In naive mode an edge between two sectors has no score, and only stitching joins tracks of two sectors.

    Raises:
        Problem: If a walk is asked for where hits have no positions.
    """
    place = whole.event.place
    if options.method == "walk" and not whole.event.has_positions:
        raise place.problem("a walk goes outward, but its hits have no positions", "take --tracks cc or junction")
    began = clock()
    hits = whole.hits
    surface, field = surface_numbers(hits.volume, hits.layer), field_of_surfaces(hits.volume, hits.layer)
    edge_index = scores.edge_index[:, scores.edge_scored]

    def build(logits: FloatArray) -> IntArray:
        tracks = build_tracks(edge_index, logits[scores.edge_scored], surface, hits.position, options)
        return tracks if hits.position is None or not options.stitch else stitch(tracks, hits.position, field=field)

    tracks = {NETWORK: build(scores.edge_logit)}
    seconds = {**scores.seconds, "tracks": clock() - began}
    if (label := whole.edges("label")) is not None:
        tracks[CEILING] = build(np.where(label > 0, CERTAIN, -CERTAIN))
    return replace(scores, tracks=tracks, seconds=seconds)


def _classical_tracks(whole: WholeEvent) -> IntArray:
    hits, place = whole.hits, whole.event.place
    if hits.position is None:
        raise place.problem("--classical follows helices, but its hits have no positions", "leave it out")
    try:
        return find_tracks(hits.position, hits.volume, hits.layer, hits.module)
    except ValueError as error:
        raise place.of(error) from error
