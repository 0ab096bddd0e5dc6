"""The candidate segments of one part that a track may take, each pair of hits once, pointing outward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from domainpar.events.graph import surface_numbers
from domainpar.events.store import StoredEvent
from domainpar.plan import BoolArray, IntArray, PartitionPlan
from domainpar.reco.tracks.options import logit

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LocalHits:
    """What track building looks at of the hits of one part, owned ones and ghosts, in the plan's row order.

    Attributes:
        ids: Global id, int64 [num_local].
        row: Row in the user's order, int64 [num_local]: it breaks ties, so that no tile and no rank does.
        distance: Square of the distance from the origin in mm^2, [num_local]; None without positions.
        surface: Volume and layer as one number, int64 [num_local]; the same for all hits where there are none.
    """

    ids: IntArray
    row: IntArray
    distance: Floats | None
    surface: IntArray

    @classmethod
    def read(cls, event: StoredEvent, plan: PartitionPlan) -> LocalHits:
        """Read them of a stored event."""
        ids = plan.local_ids
        distance = None
        if event.has_positions:
            x, y, z = event.read_nodes("position", ids).astype(np.float64).T
            distance = x * x + y * y + z * z
        volume, layer = (event.read_nodes(name, ids) for name in ("volume", "layer"))
        return cls(ids, event.read_nodes("original_row", ids), distance, surface_numbers(volume, layer))

    def outward(self, first: IntArray, second: IntArray) -> BoolArray:
        """Whether `second` lies further out than `first`; by the user's order where both are equally far."""
        if self.distance is None:
            return np.ones(len(first), np.bool_)
        here, there = self.distance[first], self.distance[second]
        outward: BoolArray = (here < there) | ((here == there) & (self.row[first] < self.row[second]))
        return outward


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments that exceed a score.

    Attributes:
        inner, outer: Local rows of the two hits, int64 [S], never the same one. Outward from the origin; where hits
            have no positions, as the edge ran.
        logit: What the network says of each, float64 [S].
        position: Place of the edge in the user's order, int64 [S].
        owned: Whether this part owns the edge, bool [S]: of the two copies of a cut segment one does.
    """

    inner: IntArray
    outer: IntArray
    logit: Floats
    position: IntArray
    owned: BoolArray

    def __len__(self) -> int:
        return len(self.inner)

    def take(self, which: IntArray | BoolArray) -> Segments:
        """Some of them."""
        return Segments(*(values[which] for values in vars(self).values()))

    def above(self, score: float) -> Segments:
        """Those that exceed a score."""
        return self.take(self.logit > logit(score))


def passing_segments(
    logits: npt.NDArray[np.floating], plan: PartitionPlan, event: StoredEvent, hits: LocalHits, score: float
) -> Segments:
    """The local edges of one part that exceed a score, as segments.

    Of several edges between two hits, also of opposite ones, the best stands for all; of equal ones the first in the
    user's order. Self-loops are left out. Both parts that hold a cut edge make the same of it.

    Args:
        logits: Logits of the local edges, [num_edges].
        plan: This part's plan, `incident`.
        event: The stored event.
        hits: Its local hits.
        score: What a segment must exceed.
    """
    src, dst = plan.edge_rows
    values = logits.astype(np.float64)
    kept = np.flatnonzero((values > logit(score)) & (src != dst))
    src, dst, values = src[kept], dst[kept], values[kept]
    outward = hits.outward(src, dst)
    inner, outer = np.where(outward, src, dst), np.where(outward, dst, src)
    position = event.read_edges("original_position", plan.edge_ids[kept])
    segments = Segments(inner, outer, values, position, plan.edge_owned[kept])
    return segments.take(_best_of_each_pair(segments))


def _best_of_each_pair(segments: Segments) -> BoolArray:
    """Which segments to keep."""
    low, high = np.minimum(segments.inner, segments.outer), np.maximum(segments.inner, segments.outer)
    num_hits = int(high.max(initial=-1)) + 1
    kept: BoolArray = _keep_best(low, high, segments.logit, segments.position, num_hits)
    return kept


@numba.njit(cache=True)
def _keep_best(low: Any, high: Any, logits: Any, position: Any, num_hits: int) -> Any:
    """Of the segments with the same two hits the one with the largest logit, then with the smallest position."""
    first = np.zeros(num_hits + 1, np.int64)
    for hit in low:
        first[hit + 1] += 1
    first = np.cumsum(first)
    by_low, place = np.empty(len(low), np.int64), first.copy()
    for s in range(len(low)):
        by_low[place[low[s]]] = s
        place[low[s]] += 1
    kept = np.ones(len(low), np.bool_)
    seen = np.full(
        num_hits, -1, np.int64
    )  # the best segment to each hit; older than this hit's own where it is not its
    for hit in range(num_hits):
        for i in range(first[hit], first[hit + 1]):
            s = by_low[i]
            other = seen[high[s]]
            if other < 0 or low[other] != hit:
                seen[high[s]] = s
            elif logits[s] > logits[other] or (logits[s] == logits[other] and position[s] < position[other]):
                kept[other] = False
                seen[high[s]] = s
            else:
                kept[s] = False
    return kept
