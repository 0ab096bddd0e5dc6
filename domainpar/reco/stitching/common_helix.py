"""How well one helix goes through the hits of two pieces."""

from __future__ import annotations

import numpy as np

from domainpar.events.graph import FloatArray, IntArray
from domainpar.reco.helix import Helices, fit_helices
from domainpar.reco.stitching.options import StitchOptions
from domainpar.reco.stitching.pieces import PT_IS_RADIUS, Pieces


def mismatch(pieces: Pieces, pairs: IntArray, options: StitchOptions) -> FloatArray:
    """How far the hits of each pair (inner, outer) are from their common helix, float64 [n].

    Mean squares in units of what they may be off, in the transverse plane and along z, added up. Infinite for hits that
    no helix goes through.
    """
    places, counts = pieces.hits_of(pairs.reshape(-1))
    position, pair = pieces.position[places], np.repeat(np.arange(len(counts)) // 2, counts)
    helices = fit_helices(position, pair, len(pairs), PT_IS_RADIUS)
    away, off = _distances(position, helices, pair)
    inner, outer = pieces.table[pairs[:, 0]], pieces.table[pairs[:, 1]]
    lever = np.hypot(*(outer["last"] - inner["first"])[:, :2].T)
    bend = options.scattering / np.maximum(np.minimum(inner["pt"], outer["pt"]), 1e-3) * lever
    squares = (away / (options.position + bend)[pair]) ** 2 + (off / (options.along + bend)[pair]) ** 2
    mean = np.bincount(pair, squares, len(pairs)) / np.bincount(pair, minlength=len(pairs))
    return np.where(helices.fitted, mean, np.inf)


def _distances(position: FloatArray, helices: Helices, track: IntArray) -> tuple[FloatArray, FloatArray]:
    """Distance of each hit from the helix of its track, in the transverse plane and, across the flight, along z."""
    rho, phi, d = (column[track] for column in (helices.charge / helices.pt, helices.phi, -helices.d0))
    sine, cosine, slope = np.sin(phi), np.cos(phi), np.sinh(helices.eta)[track]
    x, y = position[:, 0] - d * sine, position[:, 1] + d * cosine
    ahead, left = x * cosine + y * sine, y * cosine - x * sine
    value = left + 0.5 * rho * (x * x + y * y)
    away = 2 * value / (1 + np.sqrt(np.maximum(1 + 2 * rho * value, 0)))
    angle = np.arctan2(rho * ahead, 1 + rho * left)
    with np.errstate(divide="ignore", invalid="ignore"):
        arc = np.where(np.abs(angle) > 1e-6, angle / rho, ahead / (1 + rho * left))
    off = (position[:, 2] - helices.z0[track] - slope * arc) / np.sqrt(1 + slope**2)
    return away, off
