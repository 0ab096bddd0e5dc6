"""One helix: how particles fly through a field and through material, for the simulation and for what follows tracks.

A particle has a point in mm, a direction psi in the transverse plane, a slope dz/ds over the arc length s there, and a
curvature in 1/mm, positive when it turns left. Positive charges turn right, seen from +z.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from domainpar.common.compiling import compiled

HIGHLAND = 0.0136
"""GeV: multiple scattering turns by this over the momentum, times the root of the radiation lengths, in each of the two
directions across the flight."""


@compiled
def advance(x: float, y: float, z: float, psi: float, slope: float, curvature: float, s: float) -> Any:
    """The point (x, y, z) and direction after the arc length s on a helix.

    The chord form is exact and has no division by the curvature: a straight line is not a special case.
    """
    half = 0.5 * curvature * s
    chord = s if abs(half) < 1e-9 else s * np.sin(half) / half
    return x + chord * np.cos(psi + half), y + chord * np.sin(psi + half), z + slope * s, psi + 2 * half


@compiled
def twisted(slope: float, turn: float) -> Any:
    """The slope after the radial field has turned a flight by this angle, and the factor of its transverse momentum."""
    return slope + turn * (1 + slope * slope), 1 - slope * turn


@compiled
def arc_to_radius(x: float, y: float, psi: float, curvature: float, radius: float, side: int) -> float:
    """Arc length to where the helix leaves a radius outward (side 1) or enters it (-1); negative if that lies behind,
    -1e9 if there is no such place within half a turn."""
    sine, cosine = np.sin(psi), np.cos(psi)
    out, aside = x * cosine + y * sine, 1 + curvature * (y * cosine - x * sine)
    gain = radius * radius - x * x - y * y
    # The chord c has gain = c^2 aside + 2 c out sqrt(1 - (c curvature / 2)^2): a quadratic equation of c^2.
    middle, most = gain * aside + 2 * out * out, aside * aside + (curvature * out) ** 2
    root = middle * middle - gain * gain * most
    if root < 0:
        return -1e9
    square = gain * gain / (middle + np.sqrt(root)) if out * side > 0 else (middle + np.sqrt(root)) / most
    sine_half = 0.5 * curvature * np.sqrt(max(square, 0.0))
    if not abs(sine_half) <= 1:
        return -1e9
    chord = np.sqrt(max(square, 0.0))
    arc = chord if abs(sine_half) < 1e-9 else chord * np.arcsin(sine_half) / sine_half
    return float(arc if (gain - square * aside) * out >= 0 else -arc)


@compiled
def through_points(a: Any, b: Any, c: Any) -> Any:
    """(curvature, arc from a to b, arc from b to c) of the circle through three points with x and y."""
    ab, bc, ac = np.hypot(b.x - a.x, b.y - a.y), np.hypot(c.x - b.x, c.y - b.y), np.hypot(c.x - a.x, c.y - a.y)
    curvature = 2 * ((b.x - a.x) * (c.y - b.y) - (b.y - a.y) * (c.x - b.x)) / (ab * bc * ac)
    # Chords to arcs.
    return curvature, ab * (1 + (curvature * ab) ** 2 / 24), bc * (1 + (curvature * bc) ** 2 / 24)
