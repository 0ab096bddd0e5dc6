"""Pairs of pieces that continue each other, found in windows of pseudorapidity."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from domainpar.events.graph import IntArray
from domainpar.reco.stitching.options import StitchOptions
from domainpar.reco.stitching.pieces import Pieces


def find_pairs(pieces: Pieces, options: StitchOptions) -> IntArray:
    """Pairs (inner, outer) of pieces whose helices bend alike and meet each other's nearest hits, int64 [n, 2].

    One of each pair is `fresh`. Where the pieces overlap in distance from the origin, they lie side by side.
    """
    limits = np.array([options.eta, options.reach, options.beside, options.position, options.along, options.scattering])
    found: IntArray = _find(pieces.table, pieces.fresh, pieces.ptr, pieces.position, limits)
    return found


@numba.njit(cache=True, error_model="numpy")
def _find(table: Any, fresh: Any, ptr: Any, position: Any, limits: Any) -> Any:
    found = np.empty((256, 2), np.int64)
    count = 0
    for i in range(len(table)):
        for j in range(i + 1, len(table)):
            if table[j].eta - table[i].eta > limits[0]:
                break
            a, b = (i, j) if table[i].begin <= table[j].begin else (j, i)
            if not ((fresh[a] or fresh[b]) and _continues(table[a], table[b], limits)):
                continue
            if _side_by_side(position[ptr[a] : ptr[a + 1]], position[ptr[b] : ptr[b + 1]], limits[2]):
                if count == len(found):
                    found = np.concatenate((found, np.empty_like(found)))
                found[count] = a, b
                count += 1
    return found[:count]


@numba.njit(cache=True, error_model="numpy")
def _continues(inner: Any, outer: Any, limits: Any) -> bool:
    """Whether the two helices bend alike and meet the nearest hits of each other."""
    _, reach, beside, position, along, scattering = limits
    apart = outer.begin > inner.end
    gap = np.hypot(outer.first[0] - inner.last[0], outer.first[1] - inner.last[1]) if apart else 0.0
    # A straight line through the beam line meets the hits of two particles that fly back to back.
    ahead = np.sum((outer.first - inner.first)[:2] * (inner.last - inner.first)[:2])
    if gap > reach or ahead < -beside * inner.lever:
        return False
    kink = scattering / max(min(inner.pt, outer.pt), 1e-3)
    # Not the curvatures: between the pieces the field may have changed.
    charge_over_pt = abs(inner.rho / inner.bend - outer.rho / outer.bend)
    if charge_over_pt > _known_to(inner, position, kink) + _known_to(outer, position, kink):
        return False
    if not _meets(inner, outer.first, gap, position + kink * inner.lever, along + kink * inner.lever):
        return False
    return not apart or _meets(outer, inner.last, gap, position + kink * outer.lever, along + kink * outer.lever)


@numba.njit(cache=True, error_model="numpy")
def _known_to(piece: Any, position: float, kink: float) -> float:
    """What 1/pT of a piece may be off, in 1/GeV: its sagitta by half of what hits may be, and by half of a kink's."""
    return float(4 * (position + kink * piece.lever / 4) / piece.lever**2 / piece.bend)


@numba.njit(cache=True, error_model="numpy")
def _meets(piece: Any, hit: Any, gap: float, across: float, along: float) -> bool:
    """Whether a hit this far beyond a piece lies on its helix, whose own hits may be off by so much."""
    grows = 1 + gap / piece.lever
    sine, cosine = np.sin(piece.phi), np.cos(piece.phi)
    x, y = hit[0] - piece.d * sine, hit[1] + piece.d * cosine
    ahead, left = x * cosine + y * sine, y * cosine - x * sine
    value = left + 0.5 * piece.rho * (x * x + y * y)
    away = 2 * value / (1 + np.sqrt(max(1 + 2 * piece.rho * value, 0.0)))
    if abs(away) > across * grows**2:
        return False
    angle = np.arctan2(piece.rho * ahead, 1 + piece.rho * left)
    arc = angle / piece.rho if abs(angle) > 1e-6 else ahead / (1 + piece.rho * left)
    off = (hit[2] - piece.z0 - piece.slope * arc) / np.sqrt(1 + piece.slope**2)
    return bool(abs(off) <= along * grows)


@numba.njit(cache=True, error_model="numpy")
def _side_by_side(inner: Any, outer: Any, beside: float) -> bool:
    """Whether each hit of the outer piece that lies before the inner one's end has a hit of it beside it."""
    end = np.sum(inner[-1] ** 2)
    for i in range(len(outer)):
        if np.sum(outer[i] ** 2) > end:
            break
        nearest = np.inf
        for j in range(len(inner)):
            nearest = min(nearest, np.sum((outer[i] - inner[j]) ** 2))
        if nearest > beside**2:
            return False
    return True
