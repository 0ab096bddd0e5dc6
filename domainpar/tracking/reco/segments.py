"""The segments between hits that track builders look at, and how tracks are numbered."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.common.compiling import compiled
from domainpar.tracking.events.graph import FloatArray, IntArray
from domainpar.tracking.events.joining import grouped
from domainpar.tracking.reco.hit_table import TrackHits

NO_TRACK = -1


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments that exceed a score, in the user's order of edges: of equally good ones the first counts.

    Attributes:
        inner, outer: Rows of the two hits, int64 [S], never the same one. Outward from the origin; where hits have no
            positions, as the edge ran.
        logit: Logit of each, float64 [S].
    """

    inner: IntArray
    outer: IntArray
    logit: npt.NDArray[np.float64]

    @classmethod
    def of(cls, edge_index: IntArray, logits: FloatArray, hits: TrackHits, score_cut: float) -> Segments:
        """The edges that exceed a score, as segments; self-loops are left out.

        Of several edges between two hits, also of opposite ones, the best stands for all.

        Args:
            edge_index: `src` and `dst` of each edge as rows of the hits, int64 [2, E].
            logits: Logit of each edge, [E].
            hits: The N hits; of those equally far out the first is the inner one.
            score_cut: Score that a segment must exceed, from 0 to below 1.
        """
        src, dst = edge_index
        # Exact: cuts are compared in float64, whatever the network computed in.
        values = logits.astype(np.float64)
        kept = np.flatnonzero((values > logit_of(score_cut)) & (src != dst))
        inner, outer, values = src[kept], dst[kept], values[kept]
        low, high = np.minimum(inner, outer), np.maximum(inner, outer)
        if hits.position is not None:
            x, y, z = hits.position.astype(np.float64).T
            distance = x * x + y * y + z * z
            outward = distance[low] <= distance[high]
            inner, outer = np.where(outward, low, high), np.where(outward, high, low)
        best = _best_of_each_pair(low, high, values, len(hits))
        return cls(inner[best], outer[best], values[best])

    def best_first(self) -> tuple[IntArray, IntArray]:
        """Their inner and outer hits, the best segment first, int64 [S] each."""
        order = np.argsort(-self.logit, kind="stable")
        return self.inner[order], self.outer[order]


def logit_of(score: float) -> float:
    """The logit of a score from 0 to below 1; -inf of 0."""
    return math.log(score) - math.log1p(-score) if score > 0 else -math.inf


def number_tracks(tracks: IntArray) -> IntArray:
    """Number tracks from 0, in the order of their first hits, int64 [N]; -1 stays.

    Args:
        tracks: Name of each hit's track, any number from 0, in the order that decides; -1 for none.
    """
    names, first, track = np.unique(tracks, return_index=True, return_inverse=True)
    number = np.full(len(names), NO_TRACK, np.int64)
    order = np.argsort(first)
    order = order[names[order] >= 0]
    number[order] = np.arange(len(order))
    return number[track]


def long_enough(component: IntArray, min_hits: int) -> IntArray:
    """The component of each hit, int64 [N]; -1 where that has too few hits."""
    return np.where(np.bincount(component)[component] >= min_hits, component, NO_TRACK)


@compiled
def _best_of_each_pair(low: Any, high: Any, logits: Any, num_hits: int) -> Any:
    """Whether each segment is the one with the largest logit of those with the same two hits, the first of equals."""
    first, listed = grouped(low, num_hits)
    kept = np.ones(len(low), np.bool_)
    best = np.full(num_hits, -1, np.int64)  # segment to each hit; stale where it does not start at the hit in turn
    for hit in range(num_hits):
        for s in listed[first[hit] : first[hit + 1]]:
            other = best[high[s]]
            if other < 0 or low[other] != hit:
                best[high[s]] = s
            elif logits[s] > logits[other]:
                kept[other] = False
                best[high[s]] = s
            else:
                kept[s] = False
    return kept


@compiled
def components(first: Any, second: Any, num_hits: int) -> Any:
    """The smallest hit that each hit is connected to along pairs of hits, int64 [num_hits]; itself where nothing is."""
    parent = np.arange(num_hits)
    for i in range(len(first)):
        a, b = root_of(parent, first[i]), root_of(parent, second[i])
        # A root is never larger than what hangs below it, so it is the smallest of its component.
        parent[max(a, b)] = min(a, b)
    return roots(parent)


@compiled
def root_of(parent: Any, hit: int) -> int:
    """The root of a hit in a forest of union and find."""
    while parent[hit] != hit:
        parent[hit] = parent[parent[hit]]  # halving the path keeps later searches short
        hit = parent[hit]
    return int(hit)


@compiled
def roots(parent: Any) -> Any:
    """The root of each hit, in the place of its parent; no parent is larger than its children."""
    for hit in range(len(parent)):
        parent[hit] = parent[parent[hit]]  # what is smaller already points at its root
    return parent
