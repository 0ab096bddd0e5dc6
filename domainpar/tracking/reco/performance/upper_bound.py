"""The true segments that candidate edges hold at all, and those that a cut on the scores keeps.

Edge metrics count against the graph. Losses of graph construction are seen here only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from domainpar.tracking.events.graph import BoolArray, IntArray
from domainpar.tracking.events.truth_order import places_along_particles, segments_of
from domainpar.tracking.reco.performance.truth import EventTruth

SEGMENT = (
    "a segment is a pair of hits of one target particle on two surfaces that follow each other along it, surfaces "
    "ordered by their hit nearest to the production vertex (to the origin where that is unknown)"
)
"""The unit of `EdgeUpperBound`, in a sentence for the user."""


@dataclass(frozen=True)
class EdgeUpperBound:
    """True segments of target particles. `+` gives the counts of both sets of events together.

    Attributes:
        segments: All of them (see `SEGMENT`).
        in_graph: Those that at least one candidate edge joins, in either direction.
        passing: Those that at least one candidate edge that passes the cut joins; None without scores.
    """

    segments: int
    in_graph: int
    passing: int | None = None

    def __add__(self, other: EdgeUpperBound) -> EdgeUpperBound:
        """The counts of the events of both.

        Raises:
            ValueError: If only one of them knows scores.
        """
        if (self.passing is None) != (other.passing is None):
            raise ValueError("segments with and without scores have no sum; count all events alike.")
        passing = None if self.passing is None or other.passing is None else self.passing + other.passing
        return EdgeUpperBound(self.segments + other.segments, self.in_graph + other.in_graph, passing)

    @property
    def construction_efficiency(self) -> float | None:
        """Share of the segments that are candidate edges; None without segments."""
        return self.in_graph / self.segments if self.segments else None

    @property
    def cumulative_efficiency(self) -> float | None:
        """Share of the segments that are candidate edges and pass; None without segments or scores."""
        return self.passing / self.segments if self.segments and self.passing is not None else None


def edge_upper_bound(
    truth: EventTruth, edge_index: IntArray, target: Mapping[str, Any], passing: BoolArray | None = None
) -> EdgeUpperBound | None:
    """Count the true segments of target particles, and those that are candidate edges.

    Args:
        truth: The truth of the event.
        edge_index: `src` and `dst` of each candidate edge as rows of its hits, [2, E].
        target: Conditions on target particles; empty: every particle is a target.
        passing: Whether each edge passes the cut on the scores, [E].

    Returns:
        None for an event without positions: what follows what is then unknown.

    Raises:
        ValueError: If the event does not know its targets.
    """
    if truth.position is None:
        return None
    place = _places_along_targets(truth, target)
    src, dst = np.minimum(*edge_index), np.maximum(*edge_index)
    joined = (place[src] >= 0) & (place[dst] >= 0) & (truth.particle_id[src] == truth.particle_id[dst])
    joined &= np.abs(place[src] - place[dst]) == 1
    # Several edges between two hits are one segment.
    pair = src * len(truth) + dst
    return EdgeUpperBound(
        segments=len(segments_of(truth.particle_id, place)[0]),
        in_graph=len(np.unique(pair[joined])),
        passing=None if passing is None else len(np.unique(pair[joined & passing])),
    )


def _places_along_targets(truth: EventTruth, target: Mapping[str, Any]) -> IntArray:
    """Place of each hit's surface along its particle, 0 for the first; -1 for hits of no target, int64 [N]."""
    assert truth.position is not None
    ids, particle_of_hit = np.unique(truth.particle_id, return_inverse=True)
    wanted = truth.targets_among(ids, target)[particle_of_hit]
    place = places_along_particles(truth.particle_id, truth.surface, truth.position, truth.particles)
    return np.where(wanted, place, -1)
