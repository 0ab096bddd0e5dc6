"""Pieces of tracks joined where one track goes through the hits of both, the best pair first: no scores, no truth.

A track is in pieces where a hit is missing, or no candidate edge joins two of its layers; and where a particle leaves
several double hits in a row, the second ones make a track of their own, side by side with the first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from domainpar.common.compiling import compiled
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.graph import IntArray
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.kalman import (
    MIN_FITTED_HITS,
    approach,
    bend_at,
    chi2_of,
    filter_hits,
    pass_material,
    residual,
    room,
)
from domainpar.tracking.reco.segments import number_tracks

# Chosen on simulated events.
SAME_ETA = 0.02
"""Largest difference in pseudorapidity of two pieces, beside `SIGMAS` of both."""

SIGMAS = 5.0
"""Standard deviations by which two pieces may differ."""

LOSS = 0.03
"""Share of its momentum by which a flight may slow between them."""

REACH = 400.0
"""Longest gap between two pieces, in mm of the transverse plane."""

BESIDE = 25.0
"""Where pieces overlap in distance from the origin, the hits of the outer one must each have a hit of the inner one
within this many mm."""

MAX_CHI2 = 8.0
"""Largest chi2 per degree of freedom (`kalman.chi2_of`) of the hits of a pair."""


def stitch(track_id: IntArray, hits: TrackHits) -> IntArray:
    """Join pieces of tracks that one track goes through, end to end or side by side.

    A pair is joined if both bend alike, each meets the other's nearest hit, and one track goes through the hits of
    both. Pieces that overlap in distance from the origin must also have their hits beside each other there: so lie the
    hits of a particle on modules that overlap. The best pairs are joined first, each piece with one other; what they
    became is fitted again and may be joined further, until nothing fits: stitching again changes nothing. Neither the
    names of tracks nor the order of hits matter.

    Args:
        track_id: Track of each hit, -1 for none, [N].
        hits: The hits; they have positions.

    Returns:
        Track of each hit, int64 [N]: 0, 1, ... by their first hit, or -1 for none. The same hits are on tracks as
        before, and tracks of fewer than three hits, or that cannot be fitted, are what they were.

    Raises:
        ValueError: If shapes do not agree, an id is below -1, or a position is not finite.
    """
    track_id = np.array(track_id, np.int64)
    if len(track_id) and track_id.min() < -1:
        raise ValueError(f"a track id is {track_id.min()}; tracks are numbered from 0, and -1 means no track.")
    if track_id.shape != (len(hits),):
        raise ValueError(f"track ids have shape {track_id.shape} for {len(hits)} hits; give one to each hit.")
    on = hits.take(np.flatnonzero(track_id >= 0))  # the position of a hit on no track may be anything
    track = track_id[track_id >= 0]
    pieces = _fitted(np.arange(len(on)), track, on)
    while len(pairs := _best_pairs(pieces, on)):
        both = [pieces.hits_of(members) for members in pairs.T]
        inner, outer = pieces.table["track"][pairs].T
        order = np.argsort(outer)
        track[both[1]] = inner[order][np.searchsorted(outer[order], track[both[1]])]
        joined = _fitted(np.concatenate(both), track, on)
        pieces = pieces.without(pairs).with_more(joined)
    track_id[track_id >= 0] = track
    return number_tracks(track_id)


# --- pieces ----------------------------------------------------------------------------------------------------------

PIECE_DTYPE = np.dtype(
    [(name, "f8") for name in ("eta", "spread", "begin", "end")]
    + [(name, "i8") for name in ("track", "first", "last")]
    + [("fresh", "?")]
)
"""A piece: its pseudorapidity where it begins, with `SIGMAS` of that; the distances of its first and last hit from the
origin in mm; its track; the places of these hits among `Pieces.rows`; whether it was not there in an earlier round."""


class Pieces(NamedTuple):
    """Tracks that can be fitted, by pseudorapidity: names of tracks and the order of hits must not decide anything.

    Attributes:
        rows: Hits of all pieces, outward in each, int64 [n].
        table: One row a piece, `PIECE_DTYPE` [P].
        ends: The state of each at its first hit and at its last, fitted to all its hits, `STATE_DTYPE` [P, 2].
    """

    rows: IntArray
    table: npt.NDArray[np.void]
    ends: npt.NDArray[np.void]

    def hits_of(self, members: IntArray) -> IntArray:
        """Rows of all hits of some pieces."""
        table = self.table[members]
        return np.concatenate([self.rows[first : last + 1] for first, last in zip(table["first"], table["last"])])

    def without(self, members: IntArray) -> Pieces:
        """The others, none of them fresh."""
        table, ends = (np.delete(of, members.ravel(), axis=0) for of in (self.table, self.ends))
        table["fresh"] = False
        return Pieces(self.rows, table, ends)

    def with_more(self, more: Pieces) -> Pieces:
        """These and more."""
        table = np.concatenate([self.table, more.table])
        for name in ("first", "last"):
            table[name][len(self.table) :] += len(self.rows)
        order = np.lexsort((table["begin"], table["eta"]))
        return Pieces(
            np.concatenate([self.rows, more.rows]), table[order], np.concatenate([self.ends, more.ends])[order]
        )


def _fitted(rows: IntArray, track: IntArray, hits: TrackHits) -> Pieces:
    """The tracks of some hits, given the track of every hit; those that cannot be fitted are left out."""
    rows = rows[hits.outward(track[rows], rows)]
    first = np.flatnonzero(np.diff(track[rows], prepend=-1))
    last = np.append(first[1:], len(rows)) - 1
    enough = last - first + 1 >= MIN_FITTED_HITS
    table = np.zeros(np.count_nonzero(enough), PIECE_DTYPE)
    table["first"], table["last"] = first[enough], last[enough]
    ends = room((len(table), 2))
    _fit_ends(table, rows, hits.table, hits.places, Field.of(hits.field), ends)
    slope, variance = ends["slope"][:, 0], ends["cov"][:, 0, 4, 4]
    has_fit = np.isfinite(slope) & np.isfinite(ends["k"]).all(axis=1) & (variance > 0)
    table["eta"] = np.arcsinh(slope)
    table["spread"] = SIGMAS * np.sqrt(np.where(has_fit, variance, 0.0) / (1 + slope * slope))
    table["begin"], table["end"] = (np.sqrt(hits.distance[rows[table[name]]]) for name in ("first", "last"))
    table["track"], table["fresh"] = track[rows[table["first"]]], True
    table, ends = table[has_fit], ends[has_fit]
    order = np.lexsort((table["begin"], table["eta"]))
    return Pieces(rows, table[order], ends[order])


@compiled
def _fit_ends(table: Any, rows: Any, hits: Any, places: Any, field: Any, ends: Any) -> None:
    """Set the states of pieces at both their ends; NaN where they cannot be fitted."""
    for i in range(len(table)):
        outward = rows[table[i].first : table[i].last + 1]
        chi2_of(ends[i, 1], outward, hits, places, field, np.inf)
        ends[i, 0] = ends[i, 1]
        filter_hits(ends[i, 0], outward[::-1], hits, places, -1, field, np.inf)


# --- pairs -----------------------------------------------------------------------------------------------------------


def _best_pairs(pieces: Pieces, hits: TrackHits) -> IntArray:
    """Pairs (inner, outer) to join, each piece in one at most and the best first, int64 [n, 2]."""
    pairs, chi2 = _find(*pieces, hits.table, hits.distance, hits.places, Field.of(hits.field), room())
    gap = np.maximum(pieces.table["begin"][pairs[:, 1]] - pieces.table["end"][pairs[:, 0]], 0)
    # Of pieces that fit alike the nearest, or the one between would be passed over.
    order = np.lexsort((pairs[:, 1], pairs[:, 0], chi2 + MAX_CHI2 * gap / REACH))
    # Greedy: a piece that a better pair has taken is not free for a worse one.
    free = np.ones(len(pieces.table), bool)
    taken = []
    for inner, outer in pairs[order].tolist():
        if free[inner] and free[outer]:
            free[inner] = free[outer] = False
            taken.append((inner, outer))
    return np.array(taken, np.int64).reshape(-1, 2)


@compiled
def _find(rows: Any, table: Any, ends: Any, hits: Any, distance: Any, places: Any, field: Any, room: Any) -> Any:
    """Pairs (inner, outer) of pieces on one track, of which one is fresh, int64 [n, 2], and chi2 of each."""
    pairs, chi2s = np.empty((256, 2), np.int64), np.empty(256)
    count = 0
    widest = np.max(table.spread) if len(table) else 0.0
    for i in range(len(table)):
        for j in range(i + 1, len(table)):
            apart = table[j].eta - table[i].eta - SAME_ETA - table[i].spread
            if apart > widest:
                break  # pieces are sorted by eta: all others are further away
            if apart > table[j].spread or not (table[i].fresh or table[j].fresh):
                continue
            a, b = (i, j) if table[i].begin <= table[j].begin else (j, i)
            inner, outer = rows[table[a].first : table[a].last + 1], rows[table[b].first : table[b].last + 1]
            if not _continues(ends[a, 1], ends[b, 0], inner, outer, hits, distance, places, field, room):
                continue
            if not _side_by_side(inner, outer, hits, distance):
                continue
            both = np.concatenate((inner, outer))
            both = both[np.argsort(distance[both], kind="mergesort")]
            chi2 = chi2_of(room[0], both, hits, places, field, MAX_CHI2)
            if not chi2 <= MAX_CHI2:
                continue
            if count == len(pairs):
                # The number of pairs is not known before: room doubles.
                pairs, chi2s = np.concatenate((pairs, np.empty_like(pairs))), np.concatenate((chi2s, chi2s))
            pairs[count, 0], pairs[count, 1], chi2s[count] = a, b, chi2
            count += 1
    return pairs[:count], chi2s[:count]


@compiled
def _continues(
    end: Any, begin: Any, inner: Any, outer: Any, hits: Any, distance: Any, places: Any, field: Any, room: Any
) -> bool:
    """Whether two pieces bend alike, and the inner one leads to the first hit of the outer one."""
    near, last, first = hits[inner[0]], hits[inner[-1]], hits[outer[0]]
    if distance[outer[0]] > distance[inner[-1]] and np.hypot(first.x - last.x, first.y - last.y) > REACH:
        return False
    # A straight line through the beam line meets the hits of two particles that fly back to back.
    along_x, along_y = last.x - near.x, last.y - near.y
    if (first.x - near.x) * along_x + (first.y - near.y) * along_y < -BESIDE * np.hypot(along_x, along_y):
        return False
    if (end.k - begin.k) ** 2 > SIGMAS * SIGMAS * (end.cov[2, 2] + begin.cov[2, 2]) + (LOSS * end.k) ** 2:
        return False
    room[0] = end
    state = room[0]
    pass_material(state, places[last.surface], 1)
    approach(state, first.x, first.y, 1.0, field)
    return residual(state, first, bend_at(field, state))[0] < 2 * SIGMAS * SIGMAS  # type: ignore[no-any-return]


@compiled
def _side_by_side(inner: Any, outer: Any, hits: Any, distance: Any) -> bool:
    """Whether each hit of the outer piece that lies before the inner one's end has a hit of it beside it."""
    for i in outer:
        # Hits go outward: all others lie further out, too.
        if distance[i] > distance[inner[-1]]:
            break
        nearest = np.inf
        for j in inner:
            a, b = hits[i], hits[j]
            nearest = min(nearest, (a.x - b.x) ** 2 + (a.y - b.y) ** 2 + (a.z - b.z) ** 2)
        if nearest > BESIDE**2:
            return False
    return True
