"""Tracks grown from segments, the best first: two of them are joined where one helix goes through the hits of both.
Along other segments, tracks that are grown may share hits.

So a wrong segment joins two particles only where both lie on one helix, and no score has to be cut high. A particle
leaves one hit on a module, and its hits on one surface lie beside each other, where modules overlap: what is joined
must look like that. A vertex is not needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from domainpar.common.compiling import compiled
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.graph import IntArray
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.kalman import chi2_of, room
from domainpar.tracking.reco.segments import long_enough, root_of, roots

BESIDE = 25.0
"""Largest distance of two hits of a track on one surface, in mm."""

MOST_HITS = 64
"""Hits of a track at most: hits are ordered outward, so that it never turns back."""

FEWEST_HITS = 4
"""Fewest hits whose chi2 means something: a helix goes through any three."""


def link_greedily(inner: IntArray, outer: IntArray, hits: TrackHits, max_chi2: float) -> IntArray:
    """Join hits along segments, in their order, where one helix goes through all that are joined.

    Args:
        inner, outer: The hits of each segment, int64 [S].
        hits: The hits; they have positions.
        max_chi2: Largest chi2 per degree of freedom (`kalman.chi2_of`) of `FEWEST_HITS` hits and more; fewer are joined
            as they are.

    Returns:
        The smallest hit of what each hit was joined to, int64 [N]; itself where that is nothing.
    """
    about = hits.table, hits.distance, hits.surface, hits.places, Field.of(hits.field), room()
    return np.asarray(_grow(inner, outer, *about, max_chi2))


def refine(track_id: IntArray, hits: TrackHits, max_chi2: float, min_hits: int) -> IntArray:
    """Take tracks apart and grow each anew from its own hits, the nearest joined first.

    Outliers fall off, and what was joined wrongly becomes two tracks or more.

    Args:
        track_id: Track of each hit, -1 for none, int64 [N].
        hits: The hits; they have positions.
        max_chi2: As of `link_greedily`.
        min_hits: What has fewer is no track.

    Returns:
        Track of each hit, int64 [N]; any names, -1 for none.
    """
    outward = hits.outward(track_id)
    # Next neighbours, and those beyond one and two outliers.
    pairs = [(outward[:-step], outward[step:]) for step in (1, 2, 3)]
    inner, outer = (np.concatenate(ends) for ends in zip(*pairs))
    together = track_id[inner] == track_id[outer]
    inner, outer = inner[together], outer[together]
    apart = sum((hits.table[name][inner] - hits.table[name][outer]) ** 2 for name in "xyz")
    nearest = np.argsort(apart, kind="stable")
    return long_enough(link_greedily(inner[nearest], outer[nearest], hits, max_chi2), min_hits)


def share(track_id: IntArray, inner: IntArray, outer: IntArray, hits: TrackHits, max_chi2: float) -> IntArray:
    """Give tracks the hits of others that lie on their helix too, along segments, in their order.

    A segment leads from a hit of the track to one of another track. Each track takes hits for itself, whatever others
    take, if it has at least `FEWEST_HITS` of its own.

    Args:
        track_id: Track of each hit, numbered from 0, -1 for none, int64 [N].
        inner, outer: The hits of each segment, int64 [S].
        hits: The hits; they have positions.
        max_chi2: As of `link_greedily`, of all hits of a track.

    Returns:
        Row of each hit that is shared, and the further track that it lies on, ascending, int64 [M, 2].
    """
    # Both ways along a segment before the next one.
    near, hit = np.stack([inner, outer], axis=1).ravel(), np.stack([outer, inner], axis=1).ravel()
    track = track_id[near]
    offered = np.flatnonzero((track >= 0) & (track_id[hit] >= 0) & (track != track_id[hit]))
    # A track decides once about a hit: at the first segment that leads to it.
    _, first = np.unique(track[offered] * len(hits) + hit[offered], return_index=True)
    offered = offered[np.sort(first)]
    offered = offered[np.argsort(track[offered], kind="stable")]
    by_track = np.argsort(track_id, kind="stable")
    numbers = np.arange(track_id.max(initial=-1) + 2)
    about = hits.table, hits.distance, hits.surface, hits.places, Field.of(hits.field), room()
    first_own, first_offer = np.searchsorted(track_id[by_track], numbers), np.searchsorted(track[offered], numbers)
    taken = offered[_share(by_track, first_own, hit[offered], first_offer, *about, max_chi2)]
    return np.stack([hit[taken], track[taken]], axis=1)[np.lexsort((track[taken], hit[taken]))]


@compiled
def _grow(
    inner: Any, outer: Any, hits: Any, distance: Any, surface: Any, places: Any, field: Any, room: Any, max_chi2: float
) -> Any:
    num_hits = len(hits)
    parent, last, size = np.arange(num_hits), np.arange(num_hits), np.ones(num_hits, np.int64)
    following = np.full(num_hits, -1)  # the hits of a track as a list that begins with its root
    members, away = np.empty(MOST_HITS, np.int64), np.empty(MOST_HITS)
    for s in range(len(inner)):
        first, second = root_of(parent, inner[s]), root_of(parent, outer[s])
        together = size[first] + size[second]
        if first == second or together > MOST_HITS:
            continue
        count = 0
        for root in (first, second):
            hit = root
            while hit >= 0:
                members[count], away[count] = hit, distance[hit]
                hit = following[hit]
                count += 1
        if not _beside(members[: size[first]], members[size[first] : count], hits, surface):
            continue
        outward = members[np.argsort(away[:count], kind="mergesort")]
        if count >= FEWEST_HITS and not chi2_of(room[0], outward, hits, places, field, max_chi2) <= max_chi2:
            continue
        if first > second:
            first, second = second, first
        parent[second] = first
        following[last[first]] = second
        last[first], size[first] = last[second], together
    return roots(parent)


@compiled
def _share(own: Any, first_own: Any, hit: Any, first_hit: Any, hits: Any, distance: Any, surface: Any, places: Any,
           field: Any, room: Any, max_chi2: float) -> Any:  # fmt: skip
    """Whether a track takes each hit that is offered to it, given own hits and offers one track after the other."""
    taken = np.zeros(len(hit), np.bool_)
    members = np.empty(MOST_HITS, np.int64)
    for track in range(len(first_own) - 1):
        count = first_own[track + 1] - first_own[track]
        if not FEWEST_HITS <= count <= MOST_HITS:
            continue
        members[:count] = own[first_own[track] : first_own[track + 1]]
        for i in range(first_hit[track], first_hit[track + 1]):
            if count == MOST_HITS:
                break
            members[count] = hit[i]
            if not _beside(members[:count], members[count : count + 1], hits, surface):
                continue
            outward = members[np.argsort(distance[members[: count + 1]], kind="mergesort")]
            if chi2_of(room[0], outward, hits, places, field, max_chi2) <= max_chi2:
                taken[i] = True
                count += 1
    return taken


@compiled
def _beside(ours: Any, theirs: Any, hits: Any, surface: Any) -> bool:
    """Whether hits of both on one surface lie beside each other, on different modules; 0 is no surface."""
    for i in ours:
        for j in theirs:
            if surface[i] == surface[j] and surface[i] != 0:
                a, b = hits[i], hits[j]
                if a.module == b.module and a.module != 0:
                    return False
                if (a.x - b.x) ** 2 + (a.y - b.y) ** 2 + (a.z - b.z) ** 2 > BESIDE**2:
                    return False
    return True
