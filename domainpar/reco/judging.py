"""Tracks of an event against its truth, and the sums over events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from domainpar.events.store import StoredEvent, StoreError
from domainpar.reco.performance.ceiling import EdgeCeiling, edge_ceiling
from domainpar.reco.performance.counting import count_tracks
from domainpar.reco.performance.counts import TrackCounts, total
from domainpar.reco.performance.cuts import TrackCuts
from domainpar.reco.performance.truth import EventTruth, truth_of
from domainpar.reco.scores import EventScores


@dataclass(frozen=True)
class TrackJudge:
    """Counts tracks, and the segments that candidate edges hold, against the truth of an event.

    Attributes:
        cuts: Which particles and tracks count, and how they match.
        border_sectors: Also count against the distance to the borders of so many sectors.
    """

    cuts: TrackCuts
    border_sectors: int

    def judge(self, event: StoredEvent, scores: EventScores) -> dict[str, Any] | None:
        """Counts of each finder's tracks and of the segments, as JSON values; on one rank.

        Returns:
            None if the event has no truth, or does not know of its particles what the cuts ask.

        Raises:
            StoreError: If the event is damaged.
        """
        truth = truth_of(event, self.border_sectors)
        if truth is None:
            return None
        try:
            counts = {finder: count_tracks(ids, truth, self.cuts) for finder, ids in scores.tracks.items()}
        except StoreError:
            raise
        except ValueError:  # an event of another source; its tracks are worth having all the same
            return None
        return {
            "tracks": {finder: found.to_json() for finder, found in counts.items()},
            "segments": self._segments(truth, scores),
        }

    def _segments(self, truth: EventTruth, scores: EventScores) -> dict[str, Any] | None:
        passing = scores.edge_scored & (scores.edge_logit > 0)
        found = edge_ceiling(truth, scores.edge_index, self.cuts.target, np.asarray(passing, np.bool_))
        return None if found is None else asdict(found)


def sum_tracks(judgements: Sequence[Mapping[str, Any]]) -> dict[str, TrackCounts]:
    """Counts of each finder over some events, given what `judge` said of each, in the order of the events."""
    finders = judgements[0]["tracks"] if judgements else {}
    return {finder: total(TrackCounts.from_json(one["tracks"][finder]) for one in judgements) for finder in finders}


def sum_segments(judgements: Sequence[Mapping[str, Any]]) -> EdgeCeiling | None:
    """The segments of some events; None if any of them could not tell."""
    found = [one["segments"] for one in judgements]
    if not found or None in found:
        return None
    first, *others = (EdgeCeiling(**one) for one in found)
    return sum(others, first)
