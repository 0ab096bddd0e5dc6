"""Pieces joined, the best pair first, until none fits another."""

from __future__ import annotations

import numpy as np

from domainpar.events.graph import FloatArray, IntArray
from domainpar.reco.stitching.common_helix import mismatch
from domainpar.reco.stitching.options import StitchOptions
from domainpar.reco.stitching.pairs import find_pairs
from domainpar.reco.stitching.pieces import Pieces
from domainpar.reco.tracks import number_tracks


def stitch(
    track_id: IntArray,
    position: FloatArray,
    options: StitchOptions | None = None,
    field: float | FloatArray = 2.0,
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
        options: What pieces may differ by; the defaults if None.
        field: B_z in T, or a table of z in mm (increasing) and B_z, [K, 2].

    Returns:
        Track of each hit, int64 [N]: 0, 1, ... by their first hit, or -1 for none. The same hits are on tracks as
        before, and tracks without a helix are what they were.

    Raises:
        ValueError: If shapes do not agree, an id is below -1, or the position of a hit on a track is not finite.
    """
    options = options or StitchOptions()
    track_id, position = np.array(track_id, np.int64), np.asarray(position, np.float64)
    _check(track_id, position)
    pieces = Pieces.of(track_id, position, options.min_hits, field).by_eta()
    pairs = _best_pairs(pieces, options)
    while len(pairs):
        pieces = pieces.joined(*pairs.T)
        pairs = _best_pairs(pieces, options)
    track_id[pieces.rows] = np.repeat(pieces.track, np.diff(pieces.ptr))
    return number_tracks(track_id)


def _check(track_id: IntArray, position: FloatArray) -> None:
    if position.ndim != 2 or position.shape[1] != 3:
        raise ValueError(f"positions have shape {position.shape}; expected x, y, z of each hit, (N, 3).")
    if track_id.shape != (len(position),):
        raise ValueError(f"track ids have shape {track_id.shape} for {len(position)} hits; give one to each hit.")
    if len(track_id) and track_id.min() < -1:
        raise ValueError(f"a track id is {track_id.min()}; tracks are numbered from 0, and -1 means no track.")


def _best_pairs(pieces: Pieces, options: StitchOptions) -> IntArray:
    """Pairs (inner, outer) to join, each piece in one at most and the best first, int64 [n, 2]."""
    pairs = find_pairs(pieces, options)
    off = mismatch(pieces, pairs, options)
    inner, outer = pieces.table[pairs[:, 0]], pieces.table[pairs[:, 1]]
    gap = np.maximum(outer["begin"] - inner["end"], 0)
    fits = off <= np.where(gap > 0, options.residual, options.residual_beside)
    # Of pieces that fit alike the nearest, or the one between would be passed over.
    order = np.lexsort((pairs[:, 1], pairs[:, 0], off + options.residual * gap / options.reach))
    free = np.ones(len(pieces), bool)
    taken = []
    for inner, outer in pairs[order[fits[order]]].tolist():
        if free[inner] and free[outer]:
            free[inner] = free[outer] = False
            taken.append((inner, outer))
    return np.array(taken, np.int64).reshape(-1, 2)
