"""Tracks of an event against its truth, and the sums over events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from domainpar.events.store import StoredEvent
from domainpar.events.targets import check_target
from domainpar.reco.performance.ceiling import EdgeCeiling, edge_ceiling
from domainpar.reco.performance.counts import TrackCounts, count_tracks, total
from domainpar.reco.performance.matching import TrackCuts
from domainpar.reco.performance.truth import truth_of
from domainpar.reco.scores import EventScores


def judge_tracks(event: StoredEvent, scores: EventScores, cuts: TrackCuts, border_sectors: int) -> dict[str, Any]:
    """Count the tracks of each finder, and the segments that candidate edges hold, against the truth of an event.

    Args:
        event: The stored event.
        scores: Its scores and tracks.
        cuts: Which particles and tracks count, and how they match.
        border_sectors: Also count against the distance to the borders of this many sectors.

    Returns:
        `tracks` by finder, and `segments`, as JSON values. Or `uncounted`, a sentence: the event has no truth, or does
        not know of its particles what the cuts ask; its tracks are worth having all the same.

    Raises:
        StoreError: If the event is damaged.
    """
    truth = truth_of(event, border_sectors)
    if truth is None:
        return {"uncounted": "they do not tell the particle of each hit"}
    try:
        if cuts.target:
            check_target(truth.particles, cuts.target)
    except ValueError as error:
        return {"uncounted": str(error).removesuffix(".")}
    passing = scores.edge_scored & (scores.edge_logit > 0)
    segments = edge_ceiling(truth, scores.edge_index, cuts.target, np.asarray(passing, np.bool_))
    return {
        "tracks": {finder: count_tracks(ids, truth, cuts).to_json() for finder, ids in scores.tracks.items()},
        "segments": None if segments is None else asdict(segments),
    }


def sum_tracks(judgements: Sequence[Mapping[str, Any]]) -> dict[str, TrackCounts]:
    """Counts of each finder that found tracks in all of some events, given `judge_tracks` of each, in their order.

    Perfect scores, for one, are known of events with labels only: sums over different events could not be compared.
    """
    by_event = [judgement["tracks"] for judgement in judgements]
    finders = [finder for finder in by_event[0] if all(finder in tracks for tracks in by_event)]
    return {finder: total(TrackCounts.from_json(tracks[finder]) for tracks in by_event) for finder in finders}


def left_out(judgements: Sequence[Mapping[str, Any]]) -> list[str]:
    """Finders that `sum_tracks` leaves out, each in a sentence."""
    having = Counter(finder for judgement in judgements for finder in judgement["tracks"])
    return [
        f"{finder} is left out of the table: {having[finder]} of {len(judgements)} events have it"
        for finder in sorted(having)
        if having[finder] < len(judgements)
    ]


def sum_segments(judgements: Sequence[Mapping[str, Any]]) -> EdgeCeiling | None:
    """The segments of some events; None if any of them could not tell."""
    segments = [judgement["segments"] for judgement in judgements]
    if not segments or None in segments:
        return None
    first, *others = (EdgeCeiling(**counts) for counts in segments)
    return sum(others, first)
