"""Pieces of tracks joined where they lie on one helix, the best pair first: hits alone, no scores, no truth.

A track is in pieces where a hit is missing, or no candidate edge joins two of its layers; and where a particle leaves
several double hits in a row, the second ones make a track of their own, side by side with the first.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.common.compiling import compiled
from domainpar.tracking.events.detector import GEV_PER_TESLA_MM
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.graph import FloatArray, IntArray
from domainpar.tracking.reco.helix import (
    ERRORS,
    SCATTERING,
    check_tracks,
    chi2,
    distance_from_helix,
    fit_helices,
)
from domainpar.tracking.reco.segments import number_tracks


@dataclass(frozen=True)
class StitchOptions:
    """Limits of stitching; the defaults were chosen on simulated events.

    Hits that are off by e over a lever arm l leave a helix off by e (1 + g / l)^2 in the transverse plane, and by
    e (1 + g / l) along z, a distance g beyond them. Here e is the error of the hits and what scattering adds,
    `scattering` l / pT.

    Attributes:
        min_hits: Tracks with fewer hits are left alone; a helix takes three.
        eta: Largest difference in pseudorapidity of two pieces whose hits are measured exactly.
        reach: Longest gap between two pieces, in mm of the transverse plane.
        beside: Where pieces overlap in distance from the origin, the hits of the outer one must each have a hit of the
            inner one within this many mm.
        scattering: Angle in rad by which a particle of 1 GeV may leave its helix (`helix.SCATTERING`).
        residual: Largest chi2 (`helix.chi2`) of the hits of a pair.
        residual_beside: The same where the pieces overlap: hits beside each other were scattered alike.

    Raises:
        ValueError: If a number is not positive and finite, or a helix would have too few hits.
    """

    min_hits: int = 3
    eta: float = 0.02
    reach: float = 400.0
    beside: float = 25.0
    scattering: float = SCATTERING
    residual: float = 0.08
    residual_beside: float = 0.04

    def __post_init__(self) -> None:
        if self.min_hits < 3:
            raise ValueError(f"stitching option min_hits is {self.min_hits}; a helix takes at least 3 hits.")
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"stitching option {name} is {value}; it must be a positive number.")


def stitch(
    track_id: IntArray,
    position: FloatArray,
    options: StitchOptions | None = None,
    field: float | FloatArray | Field = 2.0,
    error: FloatArray | None = None,
) -> IntArray:
    """Join pieces of tracks that lie on one helix, end to end or side by side.

    A pair is joined if the helices of both bend alike and meet each other's nearest hits, and one helix goes through
    the hits of both. Pieces that overlap in distance from the origin must also have their hits beside each other there:
    so lie the hits of a particle on modules that overlap. The best pairs are joined first, each piece with one other;
    what they became is fitted again and may be joined further, until nothing fits: stitching again changes nothing.
    Neither the names of tracks nor the order of hits matter.

    Args:
        track_id: Track of each hit, -1 for none, [N].
        position: x, y, z of each hit in mm, [N, 3].
        options: Limits; the defaults if None.
        field: As for `helix.fit_helices`.
        error: How far each hit may lie from its helix in mm, [N, 2]; `helix.ERRORS` if None.

    Returns:
        Track of each hit, int64 [N]: 0, 1, ... by their first hit, or -1 for none. The same hits are on tracks as
        before, and tracks without a helix are what they were.

    Raises:
        ValueError: If shapes do not agree, an id is below -1, or the position of a hit on a track is not finite.
    """
    options = options or StitchOptions()
    track_id, position = np.array(track_id, np.int64), np.asarray(position, np.float64)
    check_tracks(position, track_id)
    if len(track_id) and track_id.min() < -1:
        raise ValueError(f"a track id is {track_id.min()}; tracks are numbered from 0, and -1 means no track.")
    error = np.broadcast_to(ERRORS, (len(position), 2)) if error is None else error
    pieces = Pieces.of(track_id, position, error, options.min_hits, field).by_eta()
    pairs = _best_pairs(pieces, options)
    while len(pairs):
        pieces = pieces.joined(*pairs.T)
        pairs = _best_pairs(pieces, options)
    track_id[pieces.rows] = np.repeat(pieces.table["track"], np.diff(pieces.ptr))
    return number_tracks(track_id)


# --- pieces ----------------------------------------------------------------------------------------------------------

PT_IS_RADIUS = 1 / GEV_PER_TESLA_MM
"""The field in T in which a particle of charge 1 flies on a circle of as many mm as its pT has GeV."""

PIECE_DTYPE = np.dtype(
    [(name, np.float64) for name in ("rho", "phi", "d", "z0", "slope", "eta", "pt", "bend", "lever", "begin", "end")]
    + [(name, np.float64) for name in ("across", "along", "turn")]
    + [(name, np.float64, 3) for name in ("first", "last")]
    + [("track", np.int64), ("fresh", np.bool_)]
)
"""A piece: its helix, with rho in 1/mm positive for a turn to the right and d in mm positive where the beam line lies
to the left; pT in GeV, and what rho would be at 1 GeV; the transverse distance from its first to its last hit, the
distances of both from the origin, the largest error of its hits across and along, how far its pseudorapidity may be off
by the resolution of its hits, and both hits, in mm; its track, and whether it was not there in an earlier round."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """Tracks that have a helix, by pseudorapidity.

    Attributes:
        table: One row a piece, `PIECE_DTYPE` [P].
        ptr: First hit of each piece in the four arrays below, int64 [P + 1]; hits of a piece go outward.
        rows: These hits as rows of the event, int64 [n].
        position: Their x, y, z in mm, float64 [n, 3].
        error: How far each may lie from its helix in mm, float64 [n, 2].
        bz: What bends there, as |B_z| in T, float64 [n].
    """

    table: npt.NDArray[Any]
    ptr: IntArray
    rows: IntArray
    position: FloatArray
    error: FloatArray
    bz: FloatArray

    def __len__(self) -> int:
        return len(self.table)

    @classmethod
    def of(
        cls,
        track_id: IntArray,
        position: FloatArray,
        error: FloatArray,
        min_hits: int,
        field: float | FloatArray | Field,
    ) -> Pieces:
        """Fit the tracks that have enough hits.

        Args:
            track_id: Track of each hit, -1 for none, [N].
            position: x, y, z of each hit in mm, float64 [N, 3].
            error: How far each hit may lie from its helix in mm, float64 [N, 2].
            min_hits: Fewest hits of a piece.
            field: As for `helix.fit_helices`.

        Raises:
            ValueError: If the position of a hit on these tracks is not finite, or the field has another shape.
        """
        on = np.flatnonzero(track_id >= 0)
        _, number, counts = np.unique(track_id[on], return_inverse=True, return_counts=True)
        enough = counts[number] >= min_hits
        on, track = on[enough], track_id[on[enough]]
        return cls._fitted(on, track, position[on], error[on], np.abs(Field.of(field).bending(position[on])))

    def joined(self, inner: IntArray, outer: IntArray) -> Pieces:
        """The pieces after joining pairs of them, each in at most one: only what is new is fitted, and `fresh`."""
        track = self.table["track"].copy()
        track[outer] = track[inner]
        places = self.hits_of(np.concatenate([inner, outer]))[0]
        owner = np.repeat(track, np.diff(self.ptr))
        of_hits = self.position[places], self.error[places], self.bz[places]
        new = self._fitted(self.rows[places], owner[places], *of_hits)
        is_old = np.ones(len(self), bool)
        is_old[inner] = is_old[outer] = False
        old = self._take(np.flatnonzero(is_old))
        old.table["fresh"] = False
        return Pieces(
            table=np.concatenate([old.table, new.table]),
            ptr=np.concatenate([old.ptr, old.ptr[-1] + new.ptr[1:]]),
            rows=np.concatenate([old.rows, new.rows]),
            position=np.concatenate([old.position, new.position]),
            error=np.concatenate([old.error, new.error]),
            bz=np.concatenate([old.bz, new.bz]),
        ).by_eta()

    def hits_of(self, members: IntArray) -> tuple[IntArray, IntArray]:
        """Places in `rows` of all hits of some pieces, piece after piece, and how many each has."""
        counts = np.diff(self.ptr)[members]
        starts = self.ptr[:-1][members] - np.cumsum(counts) + counts
        return np.repeat(starts, counts) + np.arange(counts.sum()), counts

    @classmethod
    def _fitted(
        cls, rows: IntArray, track: IntArray, position: FloatArray, error: FloatArray, bz: FloatArray
    ) -> Pieces:
        """Pieces of these hits on these tracks; those through which no helix goes are left out."""
        outward = np.lexsort((np.sum(position**2, axis=1), track))
        rows, position, error, bz = rows[outward], position[outward], error[outward], bz[outward]
        names, counts = np.unique(track, return_counts=True)
        ptr = np.concatenate([[0], np.cumsum(counts)])
        helices = fit_helices(position, np.repeat(np.arange(len(counts)), counts), len(counts), PT_IS_RADIUS)
        table = np.zeros(len(counts), PIECE_DTYPE)
        table["rho"], table["phi"], table["d"] = helices.charge / helices.pt, helices.phi, -helices.d0
        table["z0"], table["eta"], table["slope"] = helices.z0, helices.eta, np.sinh(helices.eta)
        table["bend"] = GEV_PER_TESLA_MM * np.add.reduceat(bz, ptr[:-1]) / counts
        table["pt"] = helices.pt * table["bend"]
        table["across"], table["along"] = np.maximum.reduceat(error, ptr[:-1]).T
        table["first"], table["last"] = position[ptr[:-1]], position[ptr[1:] - 1]
        table["begin"], table["end"] = (np.linalg.norm(table[name], axis=1) for name in ("first", "last"))
        table["lever"] = np.hypot(*(table["last"] - table["first"])[:, :2].T)
        table["turn"] = np.maximum(table["along"] - ERRORS[1], 0) / np.maximum(table["lever"], 1e-9)
        table["track"], table["fresh"] = names, True
        pieces = cls(table=table, ptr=ptr, rows=rows, position=position, error=error, bz=bz)
        return pieces._take(np.flatnonzero(helices.fitted & (table["lever"] > 0)))

    def _take(self, members: IntArray) -> Pieces:
        places, counts = self.hits_of(members)
        ptr = np.concatenate([[0], np.cumsum(counts)])
        of_hits = self.position[places], self.error[places], self.bz[places]
        return Pieces(self.table[members], ptr, self.rows[places], *of_hits)

    def by_eta(self) -> Pieces:
        """The same, ordered by geometry alone: names of tracks and the order of hits must not decide anything."""
        return self._take(np.lexsort((self.table["begin"], self.table["eta"])))


# --- pairs -----------------------------------------------------------------------------------------------------------


def _best_pairs(pieces: Pieces, options: StitchOptions) -> IntArray:
    """Pairs (inner, outer) to join, each piece in one at most and the best first, int64 [n, 2]."""
    pairs = find_pairs(pieces, options)
    off = _mismatch(pieces, pairs, options)
    inner, outer = pieces.table[pairs[:, 0]], pieces.table[pairs[:, 1]]
    gap = np.maximum(outer["begin"] - inner["end"], 0)
    fits = off <= np.where(gap > 0, options.residual, options.residual_beside)
    # Of pieces that fit alike the nearest, or the one between would be passed over.
    order = np.lexsort((pairs[:, 1], pairs[:, 0], off + options.residual * gap / options.reach))
    # Greedy: a piece that a better pair has taken is not free for a worse one.
    free = np.ones(len(pieces), bool)
    taken = []
    for inner, outer in pairs[order[fits[order]]].tolist():
        if free[inner] and free[outer]:
            free[inner] = free[outer] = False
            taken.append((inner, outer))
    return np.array(taken, np.int64).reshape(-1, 2)


def _mismatch(pieces: Pieces, pairs: IntArray, options: StitchOptions) -> FloatArray:
    """Chi2 (`helix.chi2`) of the hits of each pair (inner, outer), float64 [n]."""
    places, counts = pieces.hits_of(pairs.reshape(-1))
    position, pair = pieces.position[places], np.repeat(np.arange(len(counts)) // 2, counts)
    outward = np.lexsort((np.sum(position**2, axis=1), pair))
    ptr = np.searchsorted(pair[outward], np.arange(len(pairs) + 1))
    error, bz = pieces.error[places][outward], pieces.bz[places][outward]
    return np.asarray(_chi2s(position[outward], error, bz, ptr, options.scattering))


@compiled
def _chi2s(position: Any, error: Any, bz: Any, ptr: Any, scattering: float) -> Any:
    off = np.empty(len(ptr) - 1)
    for pair in range(len(off)):
        hits = slice(ptr[pair], ptr[pair + 1])
        off[pair] = chi2(position[hits], error[hits], bz[hits], scattering)
    return off


def find_pairs(pieces: Pieces, options: StitchOptions) -> IntArray:
    """Pairs (inner, outer) of pieces whose helices bend alike and meet each other's nearest hits, int64 [n, 2].

    One of each pair is `fresh`. Where the pieces overlap in distance from the origin, they lie side by side.
    """
    limits = np.array([options.eta, options.reach, options.beside, options.scattering])
    pairs: IntArray = _find(pieces.table, pieces.ptr, pieces.position, limits)
    return pairs


@compiled
def _find(table: Any, ptr: Any, position: Any, limits: Any) -> Any:
    pairs = np.empty((256, 2), np.int64)
    count = 0
    widest = np.max(table.turn) if len(table) else 0.0
    for i in range(len(table)):
        reach = limits[0] + table[i].turn + widest
        for j in range(i + 1, len(table)):
            if table[j].eta - table[i].eta > reach:
                break  # pieces are sorted by eta: all others are further away
            if table[j].eta - table[i].eta > limits[0] + table[i].turn + table[j].turn:
                continue
            a, b = (i, j) if table[i].begin <= table[j].begin else (j, i)
            if not ((table[a].fresh or table[b].fresh) and _continues(table[a], table[b], limits)):
                continue
            if _side_by_side(position[ptr[a] : ptr[a + 1]], position[ptr[b] : ptr[b + 1]], limits[2]):
                if count == len(pairs):
                    # The number of pairs is not known before: room doubles.
                    pairs = np.concatenate((pairs, np.empty_like(pairs)))
                pairs[count] = a, b
                count += 1
    return pairs[:count]


@compiled
def _continues(inner: Any, outer: Any, limits: Any) -> bool:
    """Whether the two helices bend alike and meet the nearest hits of each other."""
    _, reach, beside, scattering = limits
    apart = outer.begin > inner.end
    gap = np.hypot(outer.first[0] - inner.last[0], outer.first[1] - inner.last[1]) if apart else 0.0
    # A straight line through the beam line meets the hits of two particles that fly back to back.
    ahead = np.sum((outer.first - inner.first)[:2] * (inner.last - inner.first)[:2])
    if gap > reach or ahead < -beside * inner.lever:
        return False
    kink = scattering / max(min(inner.pt, outer.pt), 1e-3)
    # Not the curvatures: between the pieces the field may have changed.
    charge_over_pt = abs(inner.rho / inner.bend - outer.rho / outer.bend)
    if charge_over_pt > _uncertainty(inner, kink) + _uncertainty(outer, kink):
        return False
    across, along = max(inner.across, outer.across), max(inner.along, outer.along)
    if not _meets(inner, outer.first, gap, across + kink * inner.lever, along + kink * inner.lever):
        return False
    return not apart or _meets(outer, inner.last, gap, across + kink * outer.lever, along + kink * outer.lever)


@compiled
def _uncertainty(piece: Any, kink: float) -> float:
    """Uncertainty of 1/pT of a piece in 1/GeV: of its sagitta half an error of a hit, and half a kink."""
    return float(4 * (piece.across + kink * piece.lever / 4) / piece.lever**2 / piece.bend)


@compiled
def _meets(piece: Any, hit: Any, gap: float, across: float, along: float) -> bool:
    """Whether a hit this far beyond a piece lies on its helix, whose own hits may be off by so much."""
    grows = 1 + gap / piece.lever
    away, off = distance_from_helix(hit, piece.rho, piece.phi, piece.d, piece.z0, piece.slope)
    return bool(abs(away) <= across * grows**2 and abs(off) <= along * grows)


@compiled
def _side_by_side(inner: Any, outer: Any, beside: float) -> bool:
    """Whether each hit of the outer piece that lies before the inner one's end has a hit of it beside it."""
    end = np.sum(inner[-1] ** 2)
    for i in range(len(outer)):
        # Hits go outward: all others lie further out, too.
        if np.sum(outer[i] ** 2) > end:
            break
        nearest = np.inf
        for j in range(len(inner)):
            nearest = min(nearest, np.sum((outer[i] - inner[j]) ** 2))
        if nearest > beside**2:
            return False
    return True
