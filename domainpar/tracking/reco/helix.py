"""A helix through the hits of each track: momentum, direction, charge and distance from the beam line.

For hits of which nothing else need be known, whatever detector, unit or particles they are of: `reco.perigee` fits by
the errors and the material of the surfaces. A circle in the transverse plane (V. Karimaki, Nucl. Instrum. Meth. A 305
(1991) 187: explicit, and a straight line is no special case) and a straight line of z over the arc length. Positive
charges turn clockwise seen from +z.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from domainpar.common.compiling import compiled
from domainpar.tracking.events.detector import GEV_PER_TESLA_MM
from domainpar.tracking.events.field import Field, field_at
from domainpar.tracking.events.graph import FloatArray, IntArray
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.kalman import MIN_FITTED_HITS

STEPS = 4
"""Steps from hit to hit in which a map of the field is followed."""


def fit_helices(hits: TrackHits, track_id: IntArray, num_tracks: int, rows: IntArray | None = None) -> FloatArray:
    """Fit all tracks of an event, each by its own hits in whatever order; all hits count alike.

    Each track takes the mean of the field over its hits, and in a map the mean along its way, weighted as a circle's
    curvature weighs it.

    Args:
        hits, track_id, num_tracks, rows: As of `TrackHits.by_track`.

    Returns:
        Charge times pT in GeV, infinite for hits exactly on a line; pseudorapidity; phi, d0 and z0 as `reco.perigee`
        defines them; float64 [num_tracks, 5]. NaN without three hits apart from each other in the transverse plane.

    Raises:
        ValueError: As `TrackHits.by_track`.
    """
    rows, ptr, _ = hits.by_track(track_id, num_tracks, rows)
    curvature, phi, d0, z0, slope, mean_bz = _fit_all(hits.positions[rows], Field.of(hits.field), ptr).T
    with np.errstate(divide="ignore"):  # a straight line has curvature 0
        pt = -GEV_PER_TESLA_MM * (mean_bz / curvature)
    return np.column_stack([pt, np.arcsinh(slope), phi, d0, z0])


# --- one track -------------------------------------------------------------------------------------------------------
# A circle is kappa |p|^2 + n.p + delta = 0 with n = (-sin phi, cos phi), the left of the direction phi at the point
# closest to the origin: negative kappa turns left.


@compiled
def _fit_all(position: Any, field: Any, ptr: Any) -> Any:
    """(curvature, phi, d0, z0, slope, what bends in T) of each track, float64 [T, 6]; NaN without a fit. Left turns
    have positive curvature."""
    fits = np.full((len(ptr) - 1, 6), np.nan)
    for track in range(len(ptr) - 1):
        hits = slice(ptr[track], ptr[track + 1])
        if ptr[track + 1] - ptr[track] < MIN_FITTED_HITS:
            continue
        fitted, rho, phi, d = _fit_circle(position[hits])
        if fitted:
            z0, slope = _fit_line(position[hits], rho, phi, d)
            fits[track] = -rho, phi, -d, z0, slope, _mean_bending(position[hits], slope, field)
    return fits


@compiled
def _mean_bending(position: Any, slope: float, field: Any) -> float:
    """What bends a track through hits ordered outward, in T: a field along z of this would give it the same curvature.

    In a map, where B changes much between hits, the track's way is followed in steps; its curvature is that of the
    parabola closest to it at the hits.
    """
    count = len(position)
    if field.bz.shape[0] == 1:
        bz = np.empty(count)
        for i in range(count):
            bz[i] = field_at(field, 0.0, position[i, 2])[0]
        return float(np.mean(bz))
    along, away, angle = np.zeros(count), np.zeros(count), 0.0
    for i in range(count - 1):
        x, y, z = position[i]
        dx, dy, dz = position[i + 1] - position[i]
        length = max(np.hypot(dx, dy), 1e-9)
        step = length / STEPS
        along[i + 1], away[i + 1] = along[i] + length, away[i]
        for k in range(STEPS):
            share = (k + 0.5) / STEPS
            x_here, y_here = x + share * dx - field.x, y + share * dy - field.y
            r = max(np.hypot(x_here, y_here), 1e-9)
            bz_here, br_here = field_at(field, r, z + share * dz)
            bend = bz_here - slope * br_here * (x_here * dx + y_here * dy) / (r * length)
            away[i + 1] += (angle + 0.5 * bend * step) * step
            angle += bend * step
    along -= np.mean(along)
    square = along * along - np.mean(along * along)
    square -= along * (np.sum(square * along) / np.sum(along * along))
    return float(2 * np.sum(square * away) / np.sum(square * square))


@compiled
def _fit_circle(position: Any) -> Any:
    """(whether there is one, rho, phi, d) of the circle closest to hits ordered outward; rho > 0 turns right.

    Karimaki's formulae minimise the squares of kappa |p|^2 + n.p + delta, which is the distance from the
    circle only for an origin near it: so they are applied about one of the hits, and the circle is moved back.
    """
    middle = len(position) // 2
    x0, y0 = position[middle, 0], position[middle, 1]
    # About one of the hits, so that numbers stay small.
    x, y = position[:, 0] - x0, position[:, 1] - y0
    r2 = x * x + y * y
    share = 1 / len(position)
    mean_x, mean_y, mean_r2 = np.sum(share * x), np.sum(share * y), np.sum(share * r2)
    x, y, r2 = x - mean_x, y - mean_y, r2 - mean_r2
    cxx, cxy, cyy = np.sum(share * x * x), np.sum(share * x * y), np.sum(share * y * y)
    cxr, cyr, crr = np.sum(share * x * r2), np.sum(share * y * r2), np.sum(share * r2 * r2)
    q1, q2 = crr * cxy - cxr * cyr, crr * (cxx - cyy) - cxr * cxr + cyr * cyr
    # Two points, or many at one place, leave the circle open.
    if not np.hypot(2 * q1, q2) > 1e-12 * crr * (cxx + cyy):
        return False, 0.0, 0.0, 0.0
    phi = 0.5 * np.arctan2(2 * q1, q2)
    sine, cosine = np.sin(phi), np.cos(phi)
    # Outward: as the last hits lie from the first.
    if cosine * (position[-1, 0] - position[0, 0]) + sine * (position[-1, 1] - position[0, 1]) < 0:
        sine, cosine = -sine, -cosine
    kappa = (sine * cxr - cosine * cyr) / crr
    delta = -kappa * mean_r2 + sine * mean_x - cosine * mean_y
    # Back from (x0, y0) to the beam line: value and gradient of the equation there.
    gx, gy = -sine - 2 * kappa * x0, cosine - 2 * kappa * y0
    value = kappa * (x0 * x0 + y0 * y0) + sine * x0 - cosine * y0 + delta
    steepness = np.sqrt(max(gx * gx + gy * gy - 4 * kappa * value, 1e-300))
    return True, 2 * kappa / steepness, np.arctan2(-gx, gy), 2 * value / (np.hypot(gx, gy) + steepness)


@compiled
def _fit_line(position: Any, rho: float, phi: float, d: float) -> Any:
    """(z, dz/ds) of the straight line of z over the arc length s from the circle's point closest to the beam line."""
    sine, cosine = np.sin(phi), np.cos(phi)
    arc, z = np.empty(len(position)), position[:, 2]
    for i in range(len(position)):
        x, y = position[i, 0] - d * sine, position[i, 1] + d * cosine
        ahead, left = x * cosine + y * sine, y * cosine - x * sine
        angle = np.arctan2(rho * ahead, 1 + rho * left)
        # The quotient is lost to rounding where the circle is nearly straight.
        arc[i] = angle / rho if abs(angle) > 1e-6 else ahead / (1 + rho * left)
    share = 1 / len(arc)
    mean_arc, mean_z = np.sum(share * arc), np.sum(share * z)
    spread = np.sum(share * (arc - mean_arc) ** 2)
    slope = np.sum(share * (arc - mean_arc) * (z - mean_z)) / spread if spread > 0 else 0.0
    return mean_z - slope * mean_arc, slope
