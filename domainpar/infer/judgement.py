"""Scores and tracks of events against their truth, and the sums over the events of each split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from domainpar.config import InferConfig
from domainpar.config.texts import conditions_of
from domainpar.events.store import EventRecord, StoredEvent
from domainpar.reco.judgement import judge_tracks, left_out, sum_segments, sum_tracks
from domainpar.reco.performance.counts import TrackCounts
from domainpar.reco.performance.matching import TrackCuts
from domainpar.reco.scorer import Judge, Outcome
from domainpar.reco.scores import EventScores
from domainpar.reco.tracks import TrackOptions
from domainpar.training.metrics import EdgeCounts, count_event, metrics_over
from domainpar.words import several

DEFAULT_BORDERS = 8
"""Sectors whose borders efficiency is shown against where there are none: what others would have cut."""

Judgements = dict[str, list[dict[str, Any]]]
"""Of the events of each split that have a truth to count against, in the order of the store."""


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
    """Conditions on the particles that are to be found."""
    return conditions_of("--track-target", config.track_target) if config.track_target else {}


def judge_of(config: InferConfig, conditions: dict[str, Any] | None) -> Judge:
    """Counts the edges and tracks of each event against its truth, where it has one."""
    cuts = TrackCuts(config.min_track_length, config.matching_fraction, track_target(config))

    def judge(event: StoredEvent, scores: EventScores) -> dict[str, Any]:
        # An edge without a score never passes and ranks below all others: what naive mode cuts, it loses.
        logits = np.where(scores.edge_scored, scores.edge_logit, -np.inf)
        counts = count_event(event, logits[scores.original_position], conditions)
        judgement = judge_tracks(event, scores, cuts, _border_sectors(config)) if config.tracks else {}
        return {
            "edges": None if counts is None else asdict(counts),
            "tracks": judgement if "tracks" in judgement else None,
            "uncounted": judgement.get("uncounted"),
        }

    return judge


def about_tracks(config: InferConfig, performance: dict[str, dict[str, TrackCounts]]) -> dict[str, Any] | None:
    """The tracks in `scores.json`: how they were built, and their counts by split and finder; None without tracks."""
    options = track_options(config)
    if options is None:
        return None
    values = options.to_json()
    return {
        "method": values.pop("method"),
        "options": values,
        "found_by": sorted({finder for of_split in performance.values() for finder in of_split}),
        "target": config.track_target,
        "border_sectors": _border_sectors(config),
        "matching_style": config.matching_style,
        "performance": {
            split: {finder: counts.to_json() for finder, counts in of_split.items()}
            for split, of_split in performance.items()
        },
    }


def metrics_of_splits(records: Sequence[EventRecord], outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, Any]]:
    """Edge metrics of each split, and the true segments that its candidate edges hold."""
    edges = _by_split(records, outcomes, "edges")
    metrics = {split: metrics_over([EdgeCounts(**counts) for counts in events]) for split, events in edges.items()}
    for split, judgements in _by_split(records, outcomes, "tracks").items():
        segments = sum_segments(judgements)
        if segments is not None and split in metrics:
            metrics[split]["segments"] = asdict(segments)
    return metrics


def performance_of_splits(
    records: Sequence[EventRecord], outcomes: Mapping[str, Outcome]
) -> dict[str, dict[str, TrackCounts]]:
    """Counts of each finder's tracks in each split."""
    return {split: sum_tracks(judgements) for split, judgements in _by_split(records, outcomes, "tracks").items()}


def not_counted(records: Sequence[EventRecord], outcomes: Mapping[str, Outcome]) -> list[str]:
    """Tracks that are in no table, and why; a sentence each."""
    reasons = Counter(outcome.judgement["uncounted"] for outcome in outcomes.values() if outcome.judgement)
    lines = [f"tracks of {several(count, 'event')} were not counted: {why}" for why, count in reasons.items() if why]
    for judgements in _by_split(records, outcomes, "tracks").values():
        lines += left_out(judgements)
    return lines


def _border_sectors(config: InferConfig) -> int:
    return config.border_sectors or config.sectors or DEFAULT_BORDERS


def _by_split(records: Sequence[EventRecord], outcomes: Mapping[str, Outcome], name: str) -> Judgements:
    """One part of the judgements of events."""
    by_split: Judgements = {}
    for split in ("train", "val", "test"):
        for record in records:
            judgement = outcomes[record.event].judgement
            if record.split == split and judgement is not None and judgement[name] is not None:
                by_split.setdefault(split, []).append(judgement[name])
    return by_split
