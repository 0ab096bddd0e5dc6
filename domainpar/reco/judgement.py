"""Tracks of an event against its truth, and the sums over events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from domainpar.events.store import StoredEvent
from domainpar.events.targets import check_target
from domainpar.reco.performance.ceiling import EdgeCeiling, edge_ceiling
from domainpar.reco.performance.counts import TrackCounts, count_tracks, total
from domainpar.reco.performance.matching import TrackCuts
from domainpar.reco.performance.truth import EventTruth, truth_of
from domainpar.reco.scores import EventScores


@dataclass(frozen=True)
class TrackJudge:
    """Counts tracks, and the segments that candidate edges hold, against the truth of an event.

    Attributes:
        cuts: Which particles and tracks count, and how they match.
        border_sectors: Also count against the distance to the borders of this many sectors.
    """

    cuts: TrackCuts
    border_sectors: int

    def judge(self, event: StoredEvent, scores: EventScores) -> dict[str, Any]:
        """Counts of each finder's tracks and of the segments, as JSON values; on one rank.

        Returns:
            `tracks` by finder, and `segments`. Or `uncounted`, a sentence: the event has no truth, or does not know of
            its particles what the cuts ask; its tracks are worth having all the same.

        Raises:
            StoreError: If the event is damaged.
        """
        truth = truth_of(event, self.border_sectors)
        if truth is None:
            return {"uncounted": "they do not tell the particle of each hit"}
        try:
            if self.cuts.target:
                check_target(truth.particles, self.cuts.target)
        except ValueError as error:
            return {"uncounted": str(error).removesuffix(".")}
        counts = {finder: count_tracks(ids, truth, self.cuts) for finder, ids in scores.tracks.items()}
        return {
            "tracks": {finder: found.to_json() for finder, found in counts.items()},
            "segments": self._segments(truth, scores),
        }

    def _segments(self, truth: EventTruth, scores: EventScores) -> dict[str, Any] | None:
        passing = scores.edge_scored & (scores.edge_logit > 0)
        found = edge_ceiling(truth, scores.edge_index, self.cuts.target, np.asarray(passing, np.bool_))
        return None if found is None else asdict(found)


def sum_tracks(judgements: Sequence[Mapping[str, Any]]) -> dict[str, TrackCounts]:
    """Counts of each finder that found tracks in all of some events, given what `judge` said of each, in their order.

    Perfect scores, for one, are known of events with labels only: sums over different events could not be compared.
    """
    finders = [finder for finder in judgements[0]["tracks"] if all(finder in one["tracks"] for one in judgements)]
    return {finder: total(TrackCounts.from_json(one["tracks"][finder]) for one in judgements) for finder in finders}


def left_out(judgements: Sequence[Mapping[str, Any]]) -> list[str]:
    """Finders that `sum_tracks` leaves out, each in a sentence."""
    finders = {finder for one in judgements for finder in one["tracks"]}
    having = {finder: sum(finder in one["tracks"] for one in judgements) for finder in sorted(finders)}
    return [
        f"{finder} is left out of the table: {count} of {len(judgements)} events have it"
        for finder, count in having.items()
        if count < len(judgements)
    ]


def sum_segments(judgements: Sequence[Mapping[str, Any]]) -> EdgeCeiling | None:
    """The segments of some events; None if any of them could not tell."""
    found = [one["segments"] for one in judgements]
    if not found or None in found:
        return None
    first, *others = (EdgeCeiling(**one) for one in found)
    return sum(others, first)
