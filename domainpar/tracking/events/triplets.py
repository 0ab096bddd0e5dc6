"""Triplets of hits: two edges, one after the other, that one track could leave.

A pair of hits far from the beam has little that distinguishes it from chance. Three hits have two quantities that are
small along any track, wherever it began: its turn in the transverse plane over the way, and the change of its angle to
that plane.
How small depends on where the three layers lie and how finely they measure, and is counted for each three of them.

    a ------ b ------ c        turn: sine of the angle between a b and b c seen along the beam, over their mean length
       d1        d2            bend: |theta of b c - theta of a b|, tan theta = dz / d
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from domainpar.common.compiling import compiled
from domainpar.tracking.events.graph import Hits
from domainpar.tracking.events.joining import grouped
from partitioners.topology import BoolArray, FloatArray, IntArray

BIN_EDGES = np.geomspace(1e-6, 10.0, 141)
"""Edges of the bins in which turns (1/mm) and bends (rad) are counted; what is below falls in the first."""

SHARE = 0.97
"""Share of the triplets of tracks that the largest turn lets through, and the largest bend."""

ENOUGH = 30
"""Triplets of three layers from which their largest turn and bend follow; of fewer, those of all layers decide."""


@dataclass(frozen=True, eq=False)
class TripletCounts:
    """Triplets of tracks by their layers, counted in bins; `together` adds them up, exactly.

    Attributes:
        keys: Volume and layer of the three, ascending by rows, int64 [T, 6].
        counts: How many, by set (all, and those of which an edge points away from the beam), quantity (turn, bend) and
            bin, int64 [T, 2, 2, bins].
    """

    keys: IntArray
    counts: IntArray

    @classmethod
    def of(cls, hits: Hits, edges: IntArray, astray: BoolArray) -> Self:
        """Count those of some edges.

        Args:
            hits: The hits, with positions.
            edges: Segments of tracks, `src` and `dst` outward, int64 [2, E].
            astray: Whether each points away from the beam, [E].
        """
        order = np.argsort(edges[0], kind="stable")
        first, last = (np.searchsorted(edges[0][order], edges[1], side=side) for side in ("left", "right"))
        onward = last - first
        inner = np.repeat(np.arange(edges.shape[1]), onward)
        place = np.arange(len(inner)) - np.repeat(np.cumsum(onward) - onward, onward)
        outer = order[np.repeat(first, onward) + place]
        src, dst = edges
        values = _turns_and_bends(*_directions(hits, edges), inner, outer)
        bins = np.searchsorted(BIN_EDGES[1:-1], values, side="right")
        layers = np.stack([hits.volume, hits.layer], axis=1).astype(np.int64)
        rows = np.concatenate([layers[src[inner]], layers[dst[inner]], layers[dst[outer]]], axis=1)
        keys, three = np.unique(rows, axis=0, return_inverse=True)
        three = three.reshape(-1)
        counts = np.zeros((len(keys), 2, 2, len(BIN_EDGES) - 1), np.int64)
        far = (astray[inner] | astray[outer]).astype(np.int64)
        for of_set, weight in enumerate((np.ones_like(far), far)):
            for quantity in (0, 1):
                np.add.at(counts[:, of_set, quantity], (three, bins[:, quantity]), weight)
        return cls(keys, counts)

    @classmethod
    def nothing(cls) -> Self:
        """Those of no event."""
        return cls(np.empty((0, 6), np.int64), np.empty((0, 2, 2, len(BIN_EDGES) - 1), np.int64))

    @classmethod
    def together(cls, parts: Sequence[Self]) -> Self:
        """Those of all parts."""
        keys, row = np.unique(np.concatenate([part.keys for part in parts]), axis=0, return_inverse=True)
        counts = np.zeros((len(keys), 2, 2, len(BIN_EDGES) - 1), np.int64)
        np.add.at(counts, row.reshape(-1), np.concatenate([part.counts for part in parts]))
        return cls(keys, counts)


@dataclass(frozen=True, eq=False)
class Triplets:
    """Largest turn and bend of a track at three layers.

    Attributes:
        keys: Volume and layer of the three, int64 [T, 6].
        most: Largest turn in 1/mm and bend in rad, float64 [T, 2].
    """

    keys: IntArray
    most: FloatArray

    @classmethod
    def of(cls, triplet_counts: TripletCounts) -> Self:
        """Those that let `SHARE` of the triplets through: of those away from the beam, where there are enough.

        No three layers have more than all together: few triplets may be among the odd ones.
        """
        every, far = triplet_counts.counts[:, 0], triplet_counts.counts[:, 1]
        of_set = np.where((far[:, 0].sum(axis=1) >= ENOUGH)[:, None, None], far, every)
        pooled = (far if far.any() else every).sum(axis=0)
        few = of_set[:, 0].sum(axis=1) < ENOUGH
        of_set[few] = pooled
        return cls(triplet_counts.keys, np.minimum(_reached(of_set), _reached(pooled)))

    def confirmed(self, hits: Hits, edges: IntArray, certain: BoolArray) -> BoolArray:
        """Whether each edge is certain, or is followed or preceded by one that could be of the same track, bool [E]."""
        layers, ends = np.unique(self.keys.reshape(-1, 2), axis=0, return_inverse=True)
        three = np.full((len(layers) + 1,) * 3, -1, np.int64)  # the last is for hits of other layers
        three[tuple(ends.reshape(-1, 3).T)] = np.arange(len(self.keys))
        of_hits = np.concatenate([layers, np.stack([hits.volume, hits.layer], axis=1).astype(np.int64)])
        _, number = np.unique(of_hits, axis=0, return_inverse=True)
        number = number.reshape(-1)
        place = np.full(number.max(initial=0) + 1, len(layers))
        place[number[: len(layers)]] = np.arange(len(layers))
        layer = place[number[len(layers) :]]
        return np.asarray(_confirmed(edges, *_directions(hits, edges), layer, three, self.most, certain.copy()))


def _reached(counts: IntArray) -> FloatArray:
    """Upper edge of the bin up to which `SHARE` of all counts lie; counts along the last axis."""
    reached = np.cumsum(counts, axis=-1) >= SHARE * counts.sum(axis=-1, keepdims=True)
    return np.asarray(BIN_EDGES[1:][np.argmax(reached, axis=-1)])


# --- in compiled code ------------------------------------------------------------------------------------------------


def _directions(hits: Hits, edges: IntArray) -> tuple[FloatArray, FloatArray]:
    """dx, dy and length in mm of each edge in the transverse plane, [E, 3], and its angle to that plane, [E]."""
    assert hits.position is not None
    x, y, z = hits.position.astype(np.float64).T
    src, dst = edges
    dx, dy = x[dst] - x[src], y[dst] - y[src]
    length = np.maximum(np.hypot(dx, dy), 1e-6)
    return np.stack([dx, dy, length], axis=1), np.arctan((z[dst] - z[src]) / length)


@compiled
def _turn_and_bend(way: Any, theta: Any, inner: int, outer: int) -> Any:
    """Turn and bend from one edge to the next; an edge that goes back has an infinite turn."""
    lengths = way[inner, 2] * way[outer, 2]
    along = way[inner, 0] * way[outer, 0] + way[inner, 1] * way[outer, 1]
    turn = np.inf
    if along > 0:
        sine = (way[inner, 0] * way[outer, 1] - way[inner, 1] * way[outer, 0]) / lengths
        turn = abs(sine) / (0.5 * (way[inner, 2] + way[outer, 2]))
    return turn, abs(theta[outer] - theta[inner])


@compiled
def _turns_and_bends(way: Any, theta: Any, inner: Any, outer: Any) -> Any:
    values = np.empty((len(inner), 2))
    for t in range(len(inner)):
        values[t, 0], values[t, 1] = _turn_and_bend(way, theta, inner[t], outer[t])
    return values


@compiled
def _confirmed(edges: Any, way: Any, theta: Any, layer: Any, three: Any, most: Any, confirmed: Any) -> Any:
    num_hits = len(layer)
    first_in, arriving = grouped(edges[1], num_hits)
    first_out, leaving = grouped(edges[0], num_hits)
    steepest = np.max(most[:, 1]) if len(most) else 0.0
    for hit in range(num_hits):
        for inner in arriving[first_in[hit] : first_in[hit + 1]]:
            for outer in leaving[first_out[hit] : first_out[hit + 1]]:
                # The first test leaves few: most pairs of edges at a hit point elsewhere.
                if abs(theta[outer] - theta[inner]) > steepest or (confirmed[inner] and confirmed[outer]):
                    continue
                row = three[layer[edges[0, inner]], layer[hit], layer[edges[1, outer]]]
                if row < 0:
                    continue
                turn, bend = _turn_and_bend(way, theta, inner, outer)
                if turn <= most[row, 0] and bend <= most[row, 1]:
                    confirmed[inner] = confirmed[outer] = True
    return confirmed
