"""Seeds: three hits on neighbouring surfaces that one particle from near the beam line could have left."""

from __future__ import annotations

from typing import Any

import numpy as np

from domainpar.common.compiling import compiled
from domainpar.tracking.events.motion import through_points
from domainpar.tracking.reco.ckf.crossing import STAGGER, TWO_PI

# How many standard deviations scattering and resolution may move a seed's hits.
WIDTH = 4.0
# Hits of a seed are at least this far from each other, in mm.
CLOSEST = 0.5
# An arc of half the curvature times the square of its chord, with some room.
SAGITTA = 0.52


@compiled
def _window(phi: Any, low: float, high: float, ranges: Any) -> int:
    """Ranges of a phi-sorted list within [low, high], which may reach over +-pi; returns how many, at most 3."""
    if high - low >= TWO_PI:
        ranges[0] = 0, len(phi)
        return 1
    count = 0
    # phi is cut at +-pi: the window, and its copies a turn away.
    for turn in range(-1, 2):
        first, last = np.searchsorted(phi, low + turn * TWO_PI), np.searchsorted(phi, high + turn * TWO_PI)
        if last > first:
            ranges[count] = first, last
            count += 1
    return count


@compiled
def _largest_r(a: Any, place: Any, z0: float) -> float:
    """Largest radius at which a track from the beam line through `a` meets a surface."""
    if place.is_barrel:
        return place.coordinate + STAGGER  # type: ignore[no-any-return]
    # A straight line from the near end of the luminous region is the flattest.
    away = abs(a.z) - z0 if a.z * place.coordinate > 0 else 0.0
    if away <= 0:
        return place.high  # type: ignore[no-any-return]
    return min(place.high, a.r * (abs(place.coordinate) + STAGGER - z0) / away + 1.0)  # type: ignore[no-any-return]


@compiled
def _reach(b: Any, ux: float, uy: float, slope: float, place: Any) -> float:
    """Transverse distance from a hit along (ux, uy) to a surface; negative if it is not met within its extent."""
    if place.is_barrel:
        along = b.x * ux + b.y * uy
        root = along * along - b.r * b.r + place.coordinate**2
        t = np.sqrt(root) - along if root > 0 else -1.0
        v = b.z + slope * t
    else:
        t = (place.coordinate - b.z) / slope
        v = np.hypot(b.x + ux * t, b.y + uy * t)
    slack = STAGGER + 0.02 * t
    return t if t > 1.0 and place.low - slack < v < place.high + slack else -1.0


@compiled
def _agrees(a: Any, b: Any, c: Any, places: Any, curvature: float, angle: float, d0: float, z0: float) -> bool:
    """Whether three hits lie on a helix of at most this curvature that passes the beam line nearby.

    `angle` is the scattering angle at the largest curvature; both fall as the momentum rises.
    """
    k, ab, bc = through_points(a, b, c)
    if min(ab, bc, np.hypot(c.x - a.x, c.y - a.y)) < CLOSEST:
        return False
    psi = np.arctan2(b.y - a.y, b.x - a.x) - 0.5 * k * ab
    sine, cosine = np.sin(psi), np.cos(psi)
    if abs(k) > curvature or abs(sine * a.x - cosine * a.y - 0.5 * k * a.r * a.r) > d0:
        return False
    slope = (c.z - a.z) / (ab + bc)
    if abs(a.z - slope * (cosine * a.x + sine * a.y)) > z0:
        return False
    share = ab / (ab + bc)
    off = b.z - a.z - (c.z - a.z) * share
    scattered = angle * max(abs(k) / curvature, 0.05) * np.sqrt(1 + slope * slope) * share * bc
    variance = scattered * scattered
    for hit, weight in ((a, 1 - share), (b, 1.0), (c, share)):
        variance += weight * weight * hit.var_v * (1.0 if places[hit.surface].is_barrel else slope * slope)
    return off * off < WIDTH * WIDTH * variance  # type: ignore[no-any-return]


@compiled
def _third_hits(i: int, j: int, surface: int, scene: Any, curvature: float, angle: float, d0: float, z0: float,
                ranges: Any, thirds: Any) -> int:  # fmt: skip
    """Rows of the hits that make a seed of the pair i, j, in `thirds`; returns their number, be it too large for it."""
    a, b, place = scene.hits[i], scene.hits[j], scene.places[surface]
    ab = np.hypot(b.x - a.x, b.y - a.y)
    ux, uy = (b.x - a.x) / ab, (b.y - a.y) / ab
    t = _reach(b, ux, uy, (b.z - a.z) / ab, place)
    if not t > 0:
        return 0
    x, y = b.x + ux * t, b.y + uy * t
    # Bending, scattering in b's surface, and how well two hits 0.1 mm off point.
    side = SAGITTA * curvature * t * (t + ab) + WIDTH * angle * t + 0.1 * (1 + t / ab)
    if place.is_barrel:
        side += 0.15 * STAGGER
    middle, half, first = np.arctan2(y, x), side / np.hypot(x, y), scene.ptr[surface]
    count = 0
    for n in range(_window(scene.phi[first : scene.ptr[surface + 1]], middle - half, middle + half, ranges)):
        for row in range(first + ranges[n, 0], first + ranges[n, 1]):
            if scene.free[row] and _agrees(a, b, scene.hits[row], scene.places, curvature, angle, d0, z0):
                if count < len(thirds):
                    thirds[count] = row
                count += 1
    return count


@compiled
def find_seeds(chain: Any, scene: Any, curvature: float, angle: float, d0: float, z0: float) -> Any:
    """Seeds on the three surfaces of `chain`: rows of the hit table, int64 [S, 3], by the innermost hit.

    Args:
        chain: The surfaces, outward, int64 [3].
        scene: Hits and surfaces.
        curvature: Largest curvature in 1/mm.
        angle: Scattering angle at one surface with that curvature, in rad.
        d0: Largest distance from the beam line in mm.
        z0: Largest |z| of leaving it in mm.
    """
    first, last = scene.ptr[chain[1]], scene.ptr[chain[1] + 1]
    ranges, ranges_c = np.empty((3, 2), np.int64), np.empty((3, 2), np.int64)
    seeds, thirds = np.empty((1024, 3), np.int64), np.empty(64, np.int64)
    count = 0
    for i in range(scene.ptr[chain[0]], scene.ptr[chain[0] + 1]):
        a = scene.hits[i]
        r = _largest_r(a, scene.places[chain[1]], z0)
        if not scene.free[i] or r <= a.r:
            continue
        half = SAGITTA * curvature * (r - a.r) + d0 * (1 / a.r - 1 / r)
        for n in range(_window(scene.phi[first:last], a.phi - half, a.phi + half, ranges)):
            for j in range(first + ranges[n, 0], first + ranges[n, 1]):
                b = scene.hits[j]
                # The straight line to the beam, with room for what bends and scatters.
                if not scene.free[j] or b.r <= a.r or abs(a.z - a.r * (b.z - a.z) / (b.r - a.r)) > 1.1 * z0 + 2.0:
                    continue
                # Filled as far as there is room; the number is that of all hits.
                more = _third_hits(i, j, chain[2], scene, curvature, angle, d0, z0, ranges_c, thirds)
                if more > len(thirds):
                    thirds = np.empty(2 * more, np.int64)
                    _third_hits(i, j, chain[2], scene, curvature, angle, d0, z0, ranges_c, thirds)
                if count + more > len(seeds):
                    seeds = np.concatenate((seeds, np.empty((len(seeds) + more, 3), np.int64)))
                for row in thirds[:more]:
                    seeds[count] = i, j, row
                    count += 1
    return seeds[:count].copy()
