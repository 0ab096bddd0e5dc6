"""What is lost on the way from hits to matched tracks: true segments, and target particles, each for one reason.

Edge metrics count against the graph. Losses of graph construction are seen here only.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from domainpar.tracking.events.graph import BoolArray, FloatArray, IntArray
from domainpar.tracking.events.truth_order import segments_of
from domainpar.tracking.reco.performance.matching import STYLES, Overlaps, TrackCuts, find_overlaps
from domainpar.tracking.reco.performance.truth import EventTruth

SEGMENT = (
    "a segment is a pair of hits of one target particle on two surfaces that follow each other along it, surfaces "
    "ordered by their hit nearest to the production vertex (to the origin where that is unknown)"
)
"""The unit of `TrueSegments`, in a sentence for the user."""

REASONS: Mapping[str, str] = {
    "hits": "it left too few hits for a track that counts",
    "edges": "candidate edges join too few of its hits to be matched",
    "score": "candidate edges with a score above the cut join too few of its hits to be matched",
    "builder": "such edges join enough, and no track that was built holds most of its hits",
    "quality": "the track that held most of its hits was dropped for its quality",
    "finder": "no track holds most of its hits",
    "matching": "a track holds most of its hits, and does not match: others are on it, or it is too short",
}
"""Why a target particle is lost: the first that applies. `finder` stands for `edges` to `quality` where tracks were not
built from edges, or the truth has no positions, by which the edges between hits that follow each other are known."""


FEW_SEGMENTS = 0.9
"""Share of the segments of targets among the candidate edges, below which more tracks are lost than is usual."""


@dataclass(frozen=True)
class TrueSegments:
    """True segments of target particles. `+` gives the counts of both sets of events together.

    Attributes:
        segments: All of them (see `SEGMENT`).
        in_graph: Those that at least one candidate edge joins, in either direction.
        passing: Those that at least one candidate edge that passes the cut joins.
    """

    segments: int
    in_graph: int
    passing: int

    def __add__(self, other: TrueSegments) -> TrueSegments:
        return TrueSegments(*map(operator.add, astuple(self), astuple(other)))

    @property
    def construction_efficiency(self) -> float | None:
        """Share of the segments that are candidate edges; None without segments."""
        return self.in_graph / self.segments if self.segments else None

    @property
    def cumulative_efficiency(self) -> float | None:
        """Share of the segments that are candidate edges and pass; None without segments."""
        return self.passing / self.segments if self.segments else None


def count_segments(
    truth: EventTruth, edge_index: IntArray, target: Mapping[str, Any], passing: BoolArray | None = None
) -> TrueSegments | None:
    """Count the true segments of target particles, and those that are candidate edges.

    Args:
        truth: The truth of the event.
        edge_index: `src` and `dst` of each candidate edge as rows of its hits, [2, E].
        target: Conditions on target particles; empty: every particle is a target.
        passing: Whether each edge passes the cut on the scores, [E]; by default all do.

    Returns:
        None for an event without positions: what follows what is then unknown.

    Raises:
        ValueError: If the event does not know its targets.
    """
    if truth.places is None:
        return None
    ids, particle_of_hit = np.unique(truth.particle_id, return_inverse=True)
    place = np.where(truth.targets_among(ids, target)[particle_of_hit], truth.places, -1)
    # Several edges between two hits are one segment.
    pair = np.min(edge_index, axis=0) * len(truth) + np.max(edge_index, axis=0)
    joined = _steps(truth, place, edge_index) == 1
    return TrueSegments(
        segments=len(segments_of(truth.particle_id, place)[0]),
        in_graph=len(np.unique(pair[joined])),
        passing=len(np.unique(pair[joined if passing is None else joined & passing])),
    )


def _steps(truth: EventTruth, place: IntArray, edge_index: IntArray) -> IntArray:
    """Places from one end of each edge to the other along one particle, int64 [E]; -1 where there is no such way."""
    src, dst = edge_index
    of_one = (place[src] >= 0) & (place[dst] >= 0) & (truth.particle_id[src] == truth.particle_id[dst])
    return np.where(of_one, np.abs(place[src] - place[dst]), -1)


# --- particles -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TrackEdges:
    """The candidate edges that the tracks of an event were built from.

    Attributes:
        edge_index: `src` and `dst` of each as rows of its hits, [2, E].
        passing: Whether each has a score above the cut of the track builder, bool [E].
        built: Track of each hit before those of too little quality were dropped, -1 for none, [N]; None where none
            were.
    """

    edge_index: IntArray
    passing: BoolArray
    built: IntArray | None = None

    @classmethod
    def of(
        cls,
        edge_index: IntArray,
        logit: FloatArray,
        scored: BoolArray,
        score_cut: float,
        built: IntArray | None,
    ) -> TrackEdges:
        """Those whose scores are above a cut, given their logits, and which of them have a score, [E] each."""
        from domainpar.tracking.reco.segments import logit_of  # compiled code is loaded when edges are counted only

        return cls(edge_index, scored & (logit.astype(np.float64) > logit_of(score_cut)), built)


def reasons_of_losses(
    overlaps: Overlaps, truth: EventTruth, cuts: TrackCuts, edges: TrackEdges | None = None
) -> dict[str, IntArray]:
    """Why each particle is lost, if it is: its place in `REASONS`, by style of matching, int64 [P] each.

    Args:
        overlaps: The tracks and particles of the event.
        truth: Its truth.
        cuts: What counts as a match.
        edges: What the tracks were built from; None for a finder without edges.
    """
    most_held = _holds_most(overlaps, cuts)
    joined: list[IntArray] = []
    dropped = np.zeros(overlaps.num_particles, bool)
    if edges is not None and truth.places is not None:
        steps = _steps(truth, truth.places, edges.edge_index)
        true = (steps == 0) | (steps == 1)
        joined = [_most_joined(overlaps, edges.edge_index[:, kept]) for kept in (true, true & edges.passing)]
        if edges.built is not None:
            dropped = _holds_most(find_overlaps(edges.built, truth.particle_id), cuts)
    numbers = {name: number for number, name in enumerate(REASONS)}
    reasons = {}
    for style in STYLES:

        def too_few(hits: IntArray, style: str = style) -> BoolArray:
            few: BoolArray = hits < cuts.min_hits
            return few if style == "atlas" else few | ~cuts.agree(hits, overlaps.particle_hits)

        cases = {
            "hits": too_few(overlaps.particle_hits),
            **dict(zip(("edges", "score"), map(too_few, joined))),
            "matching": most_held,
            "quality": dropped,
        }
        otherwise = numbers["builder" if joined else "finder"]
        reasons[style] = np.select([*cases.values()], [numbers[name] for name in cases], otherwise)
    return reasons


def _holds_most(overlaps: Overlaps, cuts: TrackCuts) -> BoolArray:
    """Whether a track, of any length, has as many of each particle's hits as have to agree, bool [P]."""
    complete = cuts.agree(overlaps.shared, overlaps.hits_of_particles)
    return np.bincount(overlaps.particle[complete], minlength=overlaps.num_particles) > 0


def _most_joined(overlaps: Overlaps, true_edges: IntArray) -> IntArray:
    """Hits in the largest component that true edges make of those of each particle, int64 [P]."""
    from domainpar.tracking.reco.segments import components  # compiled code is loaded when edges are counted only

    particle, (src, dst) = overlaps.particle_of_hit, true_edges
    component: IntArray = components(src, dst, len(particle))
    size, most = np.bincount(component, minlength=len(particle)), np.zeros(overlaps.num_particles, np.int64)
    np.maximum.at(most, particle[particle >= 0], size[component[particle >= 0]])
    return most
