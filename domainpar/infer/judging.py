"""How good the scores and tracks of events are, and what is said of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from domainpar.config import InferConfig
from domainpar.config.texts import conditions_of
from domainpar.events.store import EventRecord, StoredEvent
from domainpar.reco.judging import TrackJudge, left_out, sum_segments, sum_tracks
from domainpar.reco.performance.counts import TrackCounts
from domainpar.reco.performance.cuts import TrackCuts
from domainpar.reco.scorer import Judge, Outcome
from domainpar.reco.scores import EventScores
from domainpar.reco.tracks import TrackOptions
from domainpar.training.metrics import EdgeCounts
from domainpar.training.trained import count_event, metrics_over
from domainpar.words import several

DEFAULT_BORDERS = 8
"""Sectors whose borders efficiency is shown against where there are none: what others would have cut."""


def track_options(config: InferConfig) -> TrackOptions | None:
    """How tracks are built; None for none."""
    if config.tracks is None:
        return None
    return TrackOptions(
        method=config.tracks,
        score_cut=config.score_cut,
        walk_min=config.walk_min,
        walk_add=config.walk_add,
        min_hits=config.min_hits,
        double_hits=config.double_hits,
        stitch=config.stitch,
    )


def track_target(config: InferConfig) -> dict[str, Any]:
    """Conditions of the particles one wants to find."""
    return conditions_of("--track-target", config.track_target) if config.track_target else {}


def judge_of(config: InferConfig, conditions: dict[str, Any] | None) -> Judge:
    """Counts the edges and tracks of each event against its truth, where it has one."""
    cuts = TrackCuts(config.min_track_length, config.matching_fraction, track_target(config))
    tracks = TrackJudge(cuts, config.border_sectors or config.sectors or DEFAULT_BORDERS)

    def judge(event: StoredEvent, scores: EventScores) -> dict[str, Any]:
        # An edge without a score never passes and ranks below all others: what naive mode cuts, it loses.
        logits = np.where(scores.edge_scored, scores.edge_logit, -np.inf)
        counts = count_event(event, logits[scores.original_position], conditions)
        edges = None if counts is None else asdict(counts)
        found = tracks.judge(event, scores) if config.tracks else {}
        return {"edges": edges, "tracks": found if "tracks" in found else None, "uncounted": found.get("uncounted")}

    return judge


def about_tracks(config: InferConfig, performance: dict[str, dict[str, TrackCounts]]) -> dict[str, Any] | None:
    """What `scores.json` says of tracks: how they were built, and their counts by split and finder."""
    options = track_options(config)
    if options is None:
        return None
    told = options.to_json()
    return {
        "method": told.pop("method"),
        "options": told,
        "found_by": sorted({finder for found in performance.values() for finder in found}),
        "target": config.track_target,
        "border_sectors": config.border_sectors or config.sectors or DEFAULT_BORDERS,
        "matching_style": config.matching_style,
        "performance": {
            split: {finder: counts.to_json() for finder, counts in found.items()}
            for split, found in performance.items()
        },
    }


def metrics_of_splits(records: Sequence[EventRecord], outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, Any]]:
    """Metrics of each split over those of its events that have a truth to count against."""
    edges = _by_split(records, outcomes, "edges")
    metrics = {split: metrics_over([EdgeCounts(**one) for one in found]) for split, found in edges.items()}
    for split, found in _by_split(records, outcomes, "tracks").items():
        segments = sum_segments(found)
        if segments is not None and split in metrics:
            metrics[split]["segments"] = asdict(segments)
    return metrics


def performance_of_splits(
    records: Sequence[EventRecord], outcomes: Mapping[str, Outcome]
) -> dict[str, dict[str, TrackCounts]]:
    """Counts of each finder's tracks over the events of each split that have a truth to count against."""
    return {split: sum_tracks(found) for split, found in _by_split(records, outcomes, "tracks").items()}


def not_counted(records: Sequence[EventRecord], outcomes: Mapping[str, Outcome]) -> list[str]:
    """Which tracks are in no table, and why."""
    reasons = Counter(outcome.judgement["uncounted"] for outcome in outcomes.values() if outcome.judgement)
    uncounted = [
        f"tracks of {several(count, 'event')} were not counted: {reason}" for reason, count in reasons.items() if reason
    ]
    found = _by_split(records, outcomes, "tracks")
    return uncounted + [line for judgements in found.values() for line in left_out(judgements)]


def _by_split(
    records: Sequence[EventRecord], outcomes: Mapping[str, Outcome], what: str
) -> dict[str, list[dict[str, Any]]]:
    """One part of the judgements of events, where there is one, in the order of the store."""
    found: dict[str, list[dict[str, Any]]] = {}
    for split in ("train", "val", "test"):
        for record in records:
            judgement = outcomes[record.event].judgement
            if record.split == split and judgement is not None and judgement[what] is not None:
                found.setdefault(split, []).append(judgement[what])
    return found
