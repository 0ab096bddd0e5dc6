"""Pairs of hits of two regions whose differences lie between bounds: the search that all candidate edges come from.

A region is a layer, a part of one, or a module. `Boxes` say which pairs of regions are joined, between which bounds
on five quantities of a pair of hits. Pairs of hits are of several kinds, by |z0| and |phi_slope|; each kind of a
pair of regions has bounds of its own: tight ones hold the many tracks from the beam, wide ones the few from elsewhere.

The hits of a region lie in the order of phi, so that a search begins and ends with a window of phi:

    for each pair of regions, for each hit `src` of the first:          phi1, r1, z1
        for the hits `dst` of the second with phi in the window:        |dphi| <= steepest slope x farthest dr
            kind of (|z0|, |phi_slope|)  ->  bounds of (pair, kind)  ->  an edge, if all five lie between them
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from domainpar.common.compiling import compiled
from domainpar.tracking.events.graph import Hits
from partitioners.topology import FloatArray, IntArray

QUANTITIES = ("phi_slope", "z0", "dphi", "deta", "dr")
"""Quantities of a pair of hits that have bounds: dphi / dr in rad/mm, z in mm where the line through both meets the
beam, dphi in rad, difference of pseudorapidity, dr in mm; each from `src` to `dst`, which has the larger radius."""

PHI_SLOPE, Z0, DPHI, DETA, DR = range(5)
TWO_PI = 2 * np.pi


def cylindrical(position: FloatArray) -> FloatArray:
    """r, phi in [-pi, pi), z and pseudorapidity of each hit, float64 [N, 4]."""
    x, y, z = position.astype(np.float64).T
    r = np.hypot(x, y)
    phi = np.arctan2(y, x)
    phi[phi >= np.pi] = -np.pi  # arctan2 gives pi itself, and the windows below are half open
    # A hit on the beam line has no pseudorapidity; a micrometre away it has a finite one.
    return np.stack([r, phi, z, np.arcsinh(z / np.maximum(r, 1e-3))], axis=1)


@dataclass(frozen=True, eq=False)
class Regions:
    """The regions of a detector, numbered.

    Attributes:
        keys: Volume, layer and part of each, by rows in ascending order, int64 [R, 3].
        by: What the part of a hit is: 0 (`layer`), its module, or its bin of pseudorapidity.
        width: Width of a bin of pseudorapidity; bin 0 begins at 0.
    """

    keys: IntArray
    by: Literal["layer", "module", "eta"] = "layer"
    width: float = 0.0

    @classmethod
    def keys_of(cls, hits: Hits, cylinder: FloatArray, by: str, width: float) -> IntArray:
        """Volume, layer and part of each hit, int64 [N, 3]."""
        part = np.zeros(len(hits), np.int64)
        if by == "module":
            part = np.asarray(hits.module, np.int64)
        elif by == "eta":
            part = np.floor(cylinder[:, 3] / width).astype(np.int64)
        return np.stack([np.asarray(hits.volume, np.int64), np.asarray(hits.layer, np.int64), part], axis=1)

    def assign(self, hits: Hits, cylinder: FloatArray) -> IntArray:
        """Region of each hit, -1 for one in none, int64 [N]."""
        keys = self.keys_of(hits, cylinder, self.by, self.width)
        known, number = np.unique(np.concatenate([self.keys, keys]), axis=0, return_inverse=True)
        place = np.full(len(known), -1, np.int64)
        number = number.reshape(-1)
        place[number[: len(self.keys)]] = np.arange(len(self.keys))
        return place[number[len(self.keys) :]]


@dataclass(frozen=True, eq=False)
class Boxes:
    """Which pairs of hits are joined: a pair whose quantities all lie strictly between the bounds of its box.

    Attributes:
        regions: The regions.
        z0_limits: Ascending limits of |z0| in mm between kinds; with none there is one kind.
        slope_limits: Likewise of |phi_slope| in rad/mm.
        src, dst: Region of the hit at the smaller radius, and of the other, int64 [B].
        kind: Kind of its pairs, int64 [B]: place among the limits of |z0|, times (number of limits of the slope + 1),
            plus place among those of the slope. No two boxes have the same regions and kind.
        low, high: Bounds on `QUANTITIES`, float64 [B, 5]; may be infinite.
    """

    regions: Regions
    z0_limits: FloatArray
    slope_limits: FloatArray
    src: IntArray
    dst: IntArray
    kind: IntArray
    low: FloatArray
    high: FloatArray

    @property
    def num_kinds(self) -> int:
        return (len(self.z0_limits) + 1) * (len(self.slope_limits) + 1)

    def join(self, hits: Hits, cylinder: FloatArray) -> IntArray:
        """Find the pairs.

        Args:
            hits: The hits.
            cylinder: Theirs, of `cylindrical`.

        Returns:
            `src` and `dst` of each pair as rows of the hits, and the box that it lies in, int64 [3, E]: in the order in
            which the boxes first name pairs of regions, then by phi of `src`, then of `dst`.
        """
        return self._search(hits, cylinder, keep=True)[0]

    def count(self, hits: Hits, cylinder: FloatArray) -> IntArray:
        """How many pairs lie in each box, int64 [B]; arguments as of `join`."""
        return self._search(hits, cylinder, keep=False)[1]

    def _search(self, hits: Hits, cylinder: FloatArray, keep: bool) -> tuple[IntArray, IntArray]:
        """Edges, or none, and counts of boxes."""
        region = self.regions.assign(hits, cylinder)
        rows = np.lexsort((cylinder[:, 1], region))
        first = np.searchsorted(region[rows], np.arange(len(self.regions.keys) + 1))
        pairs, box_of_kind, bounds = self._pairs
        filled = np.flatnonzero((np.diff(first)[pairs] > 0).all(axis=1))
        arrays = (cylinder, rows, first, self.low, self.high, self.z0_limits, self.slope_limits, keep)
        edges, counts = _join(pairs[filled], box_of_kind[filled], bounds[filled], *arrays)
        return edges, counts

    @property
    def _pairs(self) -> tuple[IntArray, IntArray, FloatArray]:
        """Pairs of regions [P, 2], box of each kind of theirs [P, K] (-1: none), and bounds that hold for all of them.

        The bounds of a pair are the largest |phi_slope|, the smallest and the largest dphi and dr, float64 [P, 5].
        """
        codes, at, pair = np.unique(
            self.src * len(self.regions.keys) + self.dst, return_index=True, return_inverse=True
        )
        order = np.argsort(at, kind="stable")  # as the boxes name them first
        place = np.empty(len(codes), np.int64)
        place[order] = np.arange(len(codes))
        pair = place[pair]
        box_of_kind = np.full((len(codes), self.num_kinds), -1, np.int64)
        box_of_kind[pair, self.kind] = np.arange(len(self.kind))
        bounds = np.tile([0.0, np.inf, -np.inf, np.inf, -np.inf], (len(codes), 1))
        steepest = np.maximum(np.abs(self.low[:, PHI_SLOPE]), np.abs(self.high[:, PHI_SLOPE]))
        steepest = np.minimum(steepest, np.append(self.slope_limits, np.inf)[self.kind % (len(self.slope_limits) + 1)])
        np.maximum.at(bounds[:, 0], pair, steepest)
        for column, quantity, spare in ((1, DPHI, 1e-12), (3, DR, 0.0)):  # a window must not round away an angle
            np.minimum.at(bounds[:, column], pair, self.low[:, quantity] - spare)
            np.maximum.at(bounds[:, column + 1], pair, self.high[:, quantity] + spare)
        return np.stack([self.src[at[order]], self.dst[at[order]]], axis=1), box_of_kind, bounds


def kinds(values: FloatArray, z0_limits: FloatArray, slope_limits: FloatArray) -> IntArray:
    """Kind of pairs of hits with these quantities (see `Boxes`), int64 [E]."""
    of_z0 = np.searchsorted(z0_limits, np.abs(values[:, Z0]), side="right")
    of_slope = np.searchsorted(slope_limits, np.abs(values[:, PHI_SLOPE]), side="right")
    return of_z0 * (len(slope_limits) + 1) + of_slope


# --- in compiled code ------------------------------------------------------------------------------------------------


@compiled
def wrapped(angle: float) -> float:
    """An angle in (-3 pi, 3 pi) brought into [-pi, pi)."""
    if angle >= np.pi:
        return angle - TWO_PI
    return angle + TWO_PI if angle < -np.pi else angle


@compiled
def longer(edges: Any) -> Any:
    """The same edges with room for twice as many."""
    room = np.empty((len(edges), 2 * edges.shape[1]), np.int64)
    for row in range(len(edges)):  # number by number: for arrays numba compiles the words of an error too, for 3 s
        for e in range(edges.shape[1]):
            room[row, e] = edges[row, e]
    return room


@compiled
def grouped(ends: Any, num_hits: int) -> Any:
    """First place of each hit's segments in a list grouped by hits, [num_hits + 1], and that list, in stable order."""
    first = np.zeros(num_hits + 1, np.int64)
    for hit in ends:
        first[hit + 1] += 1
    first = np.cumsum(first)
    listed, place = np.empty(len(ends), np.int64), first.copy()
    for s in range(len(ends)):
        listed[place[ends[s]]] = s
        place[ends[s]] += 1
    return first, listed


@compiled
def quantities(cylinder: Any, edge_index: Any) -> Any:
    """The `QUANTITIES` of pairs of hits, `dst` at the larger radius, float64 [E, 5]."""
    values = np.empty((edge_index.shape[1], 5))
    for e in range(edge_index.shape[1]):
        src, dst = edge_index[0, e], edge_index[1, e]
        dr = cylinder[dst, 0] - cylinder[src, 0]
        dphi = wrapped(cylinder[dst, 1] - cylinder[src, 1])
        values[e, 0] = dphi / dr
        values[e, 1] = cylinder[src, 2] - cylinder[src, 0] * (cylinder[dst, 2] - cylinder[src, 2]) / dr
        values[e, 2], values[e, 3], values[e, 4] = dphi, cylinder[dst, 3] - cylinder[src, 3], dr
    return values


@compiled
def _place(limits: Any, value: float) -> int:
    """Number of ascending limits that a value has reached."""
    place = 0
    while place < len(limits) and value >= limits[place]:
        place += 1
    return place


@compiled
def _join(pairs: Any, box_of_kind: Any, bounds: Any, cylinder: Any, rows: Any, first: Any, low: Any, high: Any,
          z0_limits: Any, slope_limits: Any, keep: bool) -> Any:  # fmt: skip
    """`src`, `dst` and box of each edge, int64 [3, E], if they are kept; and the number of edges in each box, [B]."""
    edges, counts = np.empty((3, 1024), np.int64), np.zeros(len(low), np.int64)
    count = 0
    for p in range(len(pairs)):
        inner = rows[first[pairs[p, 0]] : first[pairs[p, 0] + 1]]
        outer = rows[first[pairs[p, 1]] : first[pairs[p, 1] + 1]]
        phi = cylinder[outer, 1]
        largest_r = np.max(cylinder[outer, 0])
        for src in inner:
            r1, phi1, z1 = cylinder[src, 0], cylinder[src, 1], cylinder[src, 2]
            farthest = min(largest_r - r1, bounds[p, 4])
            if farthest <= 0:
                continue
            window = min(bounds[p, 0] * farthest * (1 + 1e-9) + 1e-12, np.pi)
            window_low, window_high = max(bounds[p, 1], -window), min(bounds[p, 2], window)
            # The window may reach over +-pi at either end: then part of it lies a turn away.
            for turn in range(-1, 2):
                phi_low, phi_high = phi1 + window_low + turn * TWO_PI, phi1 + window_high + turn * TWO_PI
                if phi_low >= np.pi or phi_high < -np.pi:
                    continue
                for j in range(np.searchsorted(phi, phi_low), np.searchsorted(phi, phi_high)):
                    dst = outer[j]
                    dr = cylinder[dst, 0] - r1
                    # Refuses every dr <= 0, so that edges run outward and the divisions below are safe.
                    if not (dr > 0 and bounds[p, 3] < dr < bounds[p, 4]):
                        continue
                    dphi = wrapped(phi[j] - phi1)
                    z0 = z1 - r1 * (cylinder[dst, 2] - z1) / dr
                    kind = _place(z0_limits, abs(z0)) * (len(slope_limits) + 1) + _place(slope_limits, abs(dphi / dr))
                    box = box_of_kind[p, kind]
                    if box < 0 or not (
                        low[box, 0] * dr < dphi < high[box, 0] * dr
                        and low[box, 1] < z0 < high[box, 1]
                        and low[box, 2] < dphi < high[box, 2]
                        and low[box, 3] < cylinder[dst, 3] - cylinder[src, 3] < high[box, 3]
                        and low[box, 4] < dr < high[box, 4]
                    ):
                        continue
                    counts[box] += 1
                    if not keep:
                        continue
                    if count == edges.shape[1]:
                        edges = longer(edges)
                    edges[0, count], edges[1, count], edges[2, count] = src, dst, box
                    count += 1
    return edges[:, :count].copy(), counts
