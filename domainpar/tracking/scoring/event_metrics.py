"""Scores and tracks of events against their truth, and the sums over the events of each split."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from domainpar.common.models import plain
from domainpar.common.words import several
from domainpar.tracking.config.infer import CountedTrackFlags, MatchingFlags, TrackFlags
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.own_events import InMaps
from domainpar.tracking.events.store import EventRecord, StoredEvent, WholeEvent
from domainpar.tracking.events.targets import check_target
from domainpar.tracking.reco.ckf.detector_layout import why_not_followed
from domainpar.tracking.reco.event_scores import Scores
from domainpar.tracking.reco.field_check import field_warning, ratios_of_halves
from domainpar.tracking.reco.performance.counts import TrackCounts, count_tracks, total
from domainpar.tracking.reco.performance.lost import TrackEdges, TrueSegments, count_segments
from domainpar.tracking.reco.performance.matching import TrackCuts
from domainpar.tracking.reco.performance.rates import CKF, NETWORK, PERFECT_SCORES
from domainpar.tracking.reco.performance.truth import EventTruth, truth_of
from domainpar.tracking.reco.tracks import TrackOptions
from domainpar.tracking.reco.truth_check import Frame, mistakes, rows_of_tracks, summary
from domainpar.tracking.scoring.event_tracks import hits_of
from domainpar.tracking.scoring.scorer import EventEvaluator, Outcome
from domainpar.tracking.scoring.tuning import given_cuts, key_of
from domainpar.tracking.training.edge_counting import count_event
from domainpar.tracking.training.label_loss import count_labels
from domainpar.tracking.training.metrics import EdgeCounts, label_metrics, metrics_over
from domainpar.tracking.training.tasks import EDGES, Tasks
from partitioners import Sectors

Performance = Mapping[str, Mapping[str, TrackCounts]]
"""Counts by split and finder."""

DEFAULT_BORDERS = 8
"""Sectors whose borders efficiency is shown against where there are none: what others would have cut."""

FILTERED = {"edges": "edges", "passing": "kept", "targets": "targets", "found": "targets_kept"}
"""Counts of what a filter keeps, as those of edges that pass, and their names in metrics."""


def track_options(config: TrackFlags, tuned: Mapping[str, Any]) -> TrackOptions | None:
    """How tracks are built; None for none. Cuts are those of flags, else as they were `tuned`, else the defaults."""
    if config.tracks is None:
        return None
    options = TrackOptions(
        method=config.tracks,
        refine=config.refine,
        stitch=config.stitch,
        extend=config.extend,
        shared_hits=config.shared_hits,
    )
    cuts = tuned.get(key_of(options), {}).get("cuts", {})
    return replace(options, **{**cuts, **given_cuts(config)})


def track_cuts(config: MatchingFlags) -> TrackCuts:
    """Which particles and tracks count."""
    target = config.trained_for(None).track_target
    assert target is not None
    return TrackCuts(config.min_track_length, config.matching_fraction, target.value)


def evaluator(
    config: CountedTrackFlags,
    conditions: dict[str, Any] | None,
    tasks: Tasks,
    records: Sequence[EventRecord],
    in_maps: InMaps,
    options: TrackOptions | None,
    sectors: Sectors | None = None,
    filters: bool = False,
) -> EventEvaluator:
    """Counts the edges, labels and tracks of each of these events against its truth, where it has one.

    It also looks for each in the maps. `options` are those of the tracks; None without. `sectors`: those that events
    were cut into. `filters`: whether edges without a score were left out by a filter.
    """
    score_cut = 0.0 if options is None else options.floor
    cuts, borders = track_cuts(config), config.border_sectors or sectors
    if borders is None:  # no more than an event has tiles to make sectors of
        borders = min([DEFAULT_BORDERS, *(record.num_tiles for record in records)])

    def evaluate(event: StoredEvent, scores: Scores) -> dict[str, Any]:
        in_stored_order = scores.ranked_logit[event.read_edges("original_position", np.arange(event.num_edges))]
        counts = count_event(event, in_stored_order, conditions) if tasks.edge_weight else None
        left = count_event(event, np.where(in_stored_order > -np.inf, 1, -1), conditions) if filters else None
        evaluation: dict[str, Any] = {
            "edges": None if counts is None else asdict(counts),
            "filter": None if left is None else asdict(left),
            "tracks": None,
            "uncounted": None,
            "against_truth": None,
        }
        evaluation["labels"] = count_labels(event, scores.readings, tasks.labels) or None
        evaluation["in_map"] = in_maps.hold(event)
        # The field in words, and the halves of the tracks of the first finder in it.
        finders, evaluation["field"] = [finder for finder in (NETWORK, CKF) if finder in scores.tracks], None
        if finders and event.has_positions:
            hits = hits_of(WholeEvent(event))
            halves = ratios_of_halves(hits, scores.tracks[finders[0]].track_id).tolist()
            evaluation["field"] = {"name": str(Field.of(hits.field)), "halves": halves}
        evaluation["unfitted"] = why_not_followed(event) if scores.tracks else None
        return evaluation | (_evaluate_tracks(event, scores, cuts, borders, score_cut) if config.tracks else {})

    return evaluate


def _evaluate_tracks(
    event: StoredEvent, scores: Scores, cuts: TrackCuts, border_sectors: Sectors, score_cut: float
) -> dict[str, Any]:
    """Count the tracks of each finder, and the segments that candidate edges hold, against the truth of an event.

    Returns:
        `tracks` by finder, and `segments`, as JSON values. Or `uncounted`, a sentence: the event has no truth, or does
        not know of its particles what the cuts ask; its tracks are kept.
    """
    if isinstance(truth := truth_to_count(event, cuts, border_sectors), str):
        return {"uncounted": truth}
    rows = [
        rows_of_tracks(truth, found.track_id, found.shared_hits, found.fits, cuts).tolist()
        for found in map(scores.tracks.get, (NETWORK, CKF))
        if found is not None and found.fits is not None
    ]
    scored, tracks = scores.edge_scored, scores.tracks
    segments = count_segments(truth, scores.edge_index, cuts.target, scored & (scores.edge_logit > 0))
    edges = {NETWORK: TrackEdges.of(scores.edge_index, scores.edge_logit, scored, score_cut, scores.built_track_id)}
    if (label := WholeEvent(event).edges("label")) is not None:
        built = tracks[PERFECT_SCORES].built_track_id
        edges[PERFECT_SCORES] = TrackEdges(scores.edge_index, scored & (label > 0), built)
    return {
        "tracks": {
            finder: plain(count_tracks(found.track_id, truth, cuts, found.shared_hits, edges.get(finder)))
            for finder, found in tracks.items()
        },
        "segments": None if segments is None else asdict(segments),
        "against_truth": {"rows": rows[0], "frame": Frame.of(truth.field, event.settings)} if rows else None,
    }


def truth_to_count(event: StoredEvent, cuts: TrackCuts, border_sectors: Sectors | None) -> EventTruth | str:
    """The truth of an event; why there is none, or what the cuts ask of its particles is not known, in a sentence."""
    if (truth := truth_of(event, border_sectors)) is None:
        return "they do not tell the particle of each hit"
    try:
        if cuts.target:
            check_target(truth.particles, cuts.target)
    except ValueError as error:
        return str(error).removesuffix(".")
    return truth


def about_tracks(
    config: MatchingFlags, options: TrackOptions | None, performance: Performance
) -> dict[str, Any] | None:
    """The tracks in `scores.json`: how they were built, and their counts by split and finder; None without tracks."""
    if options is None:
        return None
    values = options.to_json()
    return {
        "method": values.pop("method"),
        "options": values,
        "target": config.track_target,
        "border_sectors": next((one.border_sectors for found in performance.values() for one in found.values()), None),
        "matching_style": config.matching_style,
        **counts_of_tracks(performance),
    }


def counts_of_tracks(performance: Performance) -> dict[str, Any]:
    """The counts of finders as `scores.json` has them, and who they are."""
    finders = {finder for of_split in performance.values() for finder in of_split}
    return {"found_by": sorted(finders), "performance": {split: plain(each) for split, each in performance.items()}}


@dataclass(frozen=True)
class EventMetrics:
    """The evaluations of events, summed over those of each split."""

    records: Sequence[EventRecord]  # the events, in the order of the store
    outcomes: Mapping[str, Outcome]  # the outcome of each, by name
    tasks: Tasks = EDGES  # what the network was trained on

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Metrics of edges and of labels of each split, and the true segments that its candidate edges hold."""
        metrics = {
            split: metrics_over([EdgeCounts(**evaluation["edges"]) for evaluation in evaluations])
            for split, evaluations in self._by_split("edges").items()
        }
        for split, evaluations in self._by_split("filter").items():
            of = {name: sum(evaluation["filter"][name] for evaluation in evaluations) for name in FILTERED}
            metrics.setdefault(split, {})["filter"] = {FILTERED[name]: count for name, count in of.items()}
        for split, evaluations in self._by_split("labels").items():
            counts = {
                task: [
                    evaluation["labels"][task.name] for evaluation in evaluations if task.name in evaluation["labels"]
                ]
                for task in self.tasks.labels
            }
            labels = {task.name: label_metrics(task, np.sum(of, axis=0)) for task, of in counts.items() if of}
            metrics.setdefault(split, {"events": len(evaluations)})["labels"] = labels
        for split, evaluations in self._by_split("tracks").items():
            segments = [evaluation["segments"] for evaluation in evaluations]
            # An event without positions cannot tell its segments: the sum would be over other events than the tracks'.
            if split in metrics and None not in segments:
                metrics[split]["segments"] = asdict(
                    functools.reduce(operator.add, (TrueSegments(**of) for of in segments))
                )
        return metrics

    def performance(self) -> dict[str, dict[str, TrackCounts]]:
        """Counts of the tracks in each split, of each finder that found some in all of its events.

        Perfect scores, for one, are known of events with labels only: sums over different events could not be compared.
        """
        performance = {}
        for split, evaluations in self._by_split("tracks").items():
            by_event = [evaluation["tracks"] for evaluation in evaluations]
            finders = [finder for finder in by_event[0] if all(finder in tracks for tracks in by_event)]
            performance[split] = {
                finder: total(TrackCounts.read(tracks[finder]) for tracks in by_event) for finder in finders
            }
        return performance

    def field_mismatch(self) -> list[str]:
        """That the field does not fit the tracks, of the first event's field, where it does not."""
        evaluated = [outcome.evaluation["field"] for outcome in self.outcomes.values() if outcome.evaluation]
        known = [of for of in evaluated if of is not None]
        return field_warning([np.array(of["halves"]) for of in known], known[0]["name"]) if known else []

    def against_truth(self) -> list[str]:
        """The parameters of the first finder's tracks against those of the targets that they match, and what is wrong
        where they do not agree; of all events in one frame."""
        evaluated = [
            of for outcome in self.outcomes.values() if (of := (outcome.evaluation or {}).get("against_truth"))
        ]
        rows = np.array([row for of in evaluated for row in of["rows"]], float)
        if not len(rows):
            return []
        wrong = [f"WARNING: {text}" for text in mistakes(rows, Frame(*evaluated[0]["frame"]))]
        return [f"fits against the truth: {summary(rows)}", *wrong]

    def not_counted(self) -> list[str]:
        """Tracks that are in no table, or have no parameters, and why; a sentence each."""
        lines = []
        for name, what, how in (("uncounted", "tracks", "counted"), ("unfitted", "parameters of tracks", "fitted")):
            reasons = Counter(outcome.evaluation[name] for outcome in self.outcomes.values() if outcome.evaluation)
            lines += [
                f"{what} of {several(count, 'event')} were not {how}: {why}" for why, count in reasons.items() if why
            ]
        for evaluations in self._by_split("tracks").values():
            having = Counter(finder for evaluation in evaluations for finder in evaluation["tracks"])
            lines += [
                f"{finder} is left out of the table: {count} of {len(evaluations)} events have it"
                for finder, count in sorted(having.items())
                if count < len(evaluations)
            ]
        return lines

    def _by_split(self, name: str) -> dict[str, list[dict[str, Any]]]:
        """The evaluations that have this part."""
        by_split: dict[str, list[dict[str, Any]]] = {}
        for split in ("train", "val", "test"):
            for record in self.records:
                evaluation = self.outcomes[record.event].evaluation
                if record.split == split and evaluation is not None and evaluation[name] is not None:
                    by_split.setdefault(split, []).append(evaluation)
        return by_split
