"""One Kalman filter: a track's point, direction, slope and curvature with their covariances, moved from hit to hit.

R. Fruehwirth, Nucl. Instrum. Meth. A 262 (1987) 444, with the five deviations (place across the flight, direction,
curvature, z, slope). Seeds begin with it, the CKF and `extend_tracks` follow with it, and it fits at the beam line.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.common.compiling import compiled
from domainpar.tracking.events.detector import CHARGE_SHARING, GEV_PER_TESLA_MM
from domainpar.tracking.events.field import forces
from domainpar.tracking.events.motion import HIGHLAND, advance, through_points, twisted

MIN_FITTED_HITS = 3
"""Hits of a track that is fitted, at least."""

HIT_WORTH = 14.0
"""Gain in quality of a track by a hit, less its chi^2: somewhat less than the gate, so that no hit is taken that a
track would be better without."""

AT_FIRST = (5.0, 0.1, GEV_PER_TESLA_MM / 0.15, 5.0, 0.1)
"""How little is known of a track before any hit: mm, rad, the curvature of 0.15 GeV, mm, and a share of
1 + slope^2."""

EVEN_FIELD = 120.0
"""mm along z over which the field half way stands for all of it."""

ENERGY_LOSS, PION = 0.045, 0.1396
"""GeV that a fast particle loses in a radiation length, beta^-3 times as much one that is slow; GeV of the mass."""

LOST = 1e10
"""Variance in mm^2 of a place across the flight from which on a filter knows nothing any more: rounding decides."""

UNMEASURED = 1e6
"""mm of error along an axis that a sensor does not measure."""

HIT_DTYPE = np.dtype(
    [(name, "f8") for name in ("x", "y", "z", "r", "phi", "var_u", "var_v", "thickness")]
    + [(name, "f8", 3) for name in ("u", "v", "w")]
    + [("module", "i8"), ("surface", "i8")]
)
"""A measurement: its place in mm, the variances in mm^2 along two axes u and v on its module, measured by one cell,
its sensor's thickness in mm (0: the errors go by no number of cells), the axes and their normal w."""

STATE_DTYPE = np.dtype(
    [(name, "f8") for name in ("x", "y", "psi", "sine", "cosine", "z", "slope", "k", "quality")]
    + [("cov", "f8", (5, 5)), ("column", "f8", 5)]
    + [(name, "i8") for name in ("num_hits", "surfaces", "holes", "pending", "barrel", "disk")]
)
"""A point of a track in mm, its direction psi, which `point` sets with sine and cosine, slope dz/ds over the transverse
arc length s, curvature k in 1/(mm T), positive when turning left; quality; covariances of (place across, direction, k,
z, slope), and room for a column of them; numbers of hits, of surfaces with hits, of surfaces without between them, and
of those since the last hit; the next barrel and disk of its way."""


@compiled
def bend_at(field: Any, state: Any) -> float:
    """What bends a state where it is, in T, as a field along z would (`events.field`)."""
    return forces(field, state.x, state.y, state.z, state.psi, state.slope)[0]  # type: ignore[no-any-return]


@compiled
def point(state: Any, psi: float) -> None:
    """Turn a state to a direction."""
    state.psi, state.sine, state.cosine = psi, np.sin(psi), np.cos(psi)


@compiled
def fly(state: Any, s: float, field: Any) -> None:
    """Move a state by the arc length s, back where it is negative, in the field half way along it.

    The transport of covariances is exact to s^2. Along a curve of curvature c a neighbour at the distance y turns by
    -c^2 y, and its way is shorter by c y.
    """
    slope, k, square = state.slope, state.k, 0.5 * s * s
    x, y = state.x + 0.5 * s * state.cosine, state.y + 0.5 * s * state.sine
    bend, twist, lean = forces(field, x, y, state.z + 0.5 * slope * s, state.psi, slope)
    turn, of_k = k * bend, twist * (1 + slope * slope)
    state.x, state.y, state.z, psi = advance(state.x, state.y, state.z, state.psi, slope, turn, s)
    point(state, psi)
    if twist != 0.0:
        state.slope, less = twisted(slope, k * twist * s)
        state.k /= less
        state.z += square * k * of_k
    a, e, h, g = 1 - square * turn * turn, -s * turn * turn, s * bend, s * k * lean
    u, v, w, t = -s * slope * turn, -square * slope * turn, square * of_k, s * of_k
    cov, f, i = state.cov, 0.5 * s * h, 0.5 * s * g
    yy, yp, yk, yz, ys = cov[0, 0], cov[0, 1], cov[0, 2], cov[0, 3], cov[0, 4]
    pp, pk, pz, ps, kk, kz, ks = cov[1, 1], cov[1, 2], cov[1, 3], cov[1, 4], cov[2, 2], cov[2, 3], cov[2, 4]
    zz, zs, ss = cov[3, 3], cov[3, 4], cov[4, 4]
    # The transport times the covariance, by rows: of the place across, the direction, z and the slope.
    y0, y1, y2 = a * yy + s * yp + f * yk + i * ys, a * yp + s * pp + f * pk + i * ps, a * yk + s * pk + f * kk + i * ks
    y3, y4 = a * yz + s * pz + f * kz + i * zs, a * ys + s * ps + f * ks + i * ss
    p0, p1, p2 = e * yy + a * yp + h * yk + g * ys, e * yp + a * pp + h * pk + g * ps, e * yk + a * pk + h * kk + g * ks
    p3, p4 = e * yz + a * pz + h * kz + g * zs, e * ys + a * ps + h * ks + g * ss
    z0, z1, z2 = (
        u * yy + v * yp + w * yk + yz + s * ys,
        u * yp + v * pp + w * pk + pz + s * ps,
        u * yk + v * pk + w * kk + kz + s * ks,
    )
    z3, z4 = u * yz + v * pz + w * kz + zz + s * zs, u * ys + v * ps + w * ks + zs + s * ss
    s2, s4 = t * kk + ks, t * ks + ss
    cov[0, 0], cov[1, 1] = a * y0 + s * y1 + f * y2 + i * y4, e * p0 + a * p1 + h * p2 + g * p4
    cov[3, 3], cov[4, 4] = u * z0 + v * z1 + w * z2 + z3 + s * z4, t * s2 + s4
    cov[0, 1] = cov[1, 0] = e * y0 + a * y1 + h * y2 + g * y4
    cov[0, 2] = cov[2, 0] = y2
    cov[0, 3] = cov[3, 0] = u * y0 + v * y1 + w * y2 + y3 + s * y4
    cov[0, 4] = cov[4, 0] = t * y2 + y4
    cov[1, 2] = cov[2, 1] = p2
    cov[1, 3] = cov[3, 1] = u * p0 + v * p1 + w * p2 + p3 + s * p4
    cov[1, 4] = cov[4, 1] = t * p2 + p4
    cov[2, 3] = cov[3, 2] = z2
    cov[2, 4] = cov[4, 2] = s2
    cov[3, 4] = cov[4, 3] = t * z2 + z4


@compiled
def approach(state: Any, x: float, y: float, near: float, field: Any) -> None:
    """Move a state to where it passes a point of the transverse plane, to `near` mm, over any distance either way."""
    for _ in range(60):
        s = (x - state.x) * state.cosine + (y - state.y) * state.sine
        # So written that NaN ends it as well.
        if not abs(s) > near:
            return
        most = EVEN_FIELD / max(abs(state.slope), 1.0)
        s = min(max(s, -most), most)
        fly(state, s, field)


@compiled
def pass_material(state: Any, place: Any, side: int) -> None:
    """Scatter in a surface, and lose energy there: 1 outward, -1 inward, where it has not been lost yet.

    A track that flies along a surface more than across it passes more of it: much, where a barrel ends.
    """
    square = 1 + state.slope * state.slope
    material = place.material
    if place.by_angle:
        material *= np.sqrt(square) / (1.0 if place.is_barrel else max(abs(state.slope), 0.3))
    # A straight line would not scatter at all, and a curl without end.
    pt = min(max(GEV_PER_TESLA_MM / abs(state.k), 0.1), 100.0)
    variance = HIGHLAND * HIGHLAND * material / (pt * pt)
    state.cov[1, 1] += variance
    state.cov[4, 4] += variance * square
    momentum = pt * np.sqrt(square)
    state.k *= 1 + side * ENERGY_LOSS * material * (1 + (PION / momentum) ** 2) ** 1.5 / momentum


@compiled
def _seen(state: Any, hit: Any) -> Any:
    """What a module sees of a track that is off by (across, along z): two factors for u, two for v; both variances."""
    sine, cosine = state.sine, state.cosine
    u, v, w = hit.u, hit.v, hit.w
    steep = cosine * w[0] + sine * w[1] + state.slope * w[2]
    if abs(steep) < 0.05:
        steep = 0.05 if steep >= 0 else -0.05
    along_u = (cosine * u[0] + sine * u[1] + state.slope * u[2]) / steep
    along_v = (cosine * v[0] + sine * v[1] + state.slope * v[2]) / steep
    w_across = cosine * w[1] - sine * w[0]
    u_across, u_up = cosine * u[1] - sine * u[0] - along_u * w_across, u[2] - along_u * w[2]
    v_across, v_up = cosine * v[1] - sine * v[0] - along_v * w_across, v[2] - along_v * w[2]
    var_u, var_v = hit.var_u, hit.var_v
    if hit.thickness > 0:
        var_u = _narrowed(var_u, hit.thickness * along_u, CHARGE_SHARING[0])
        var_v = _narrowed(var_v, hit.thickness * along_v, CHARGE_SHARING[1])
    return u_across, u_up, v_across, v_up, var_u, var_v


@compiled
def _narrowed(variance: float, span: float, sharing: float) -> float:
    """Variance of a position by cells, of `variance` by one cell: a track that spans several is measured better."""
    pitch_squared = 12 * variance
    cells = min(abs(span) / np.sqrt(pitch_squared), 1.0)
    return pitch_squared * ((1 - cells) ** 2 / 12 + cells * sharing**2 / 3)  # type: ignore[no-any-return]


@compiled
def residual(state: Any, hit: Any, bend: float) -> Any:
    """(chi^2 of two degrees of freedom, arc length to the hit, distance across, distance in z) of a hit nearby."""
    sine, cosine = state.sine, state.cosine
    dx, dy = hit.x - state.x, hit.y - state.y
    s = dx * cosine + dy * sine
    across, up = dy * cosine - dx * sine - 0.5 * state.k * bend * s * s, hit.z - state.z - state.slope * s
    cov = state.cov
    yy = cov[0, 0] + s * (2 * cov[0, 1] + s * cov[1, 1])
    yz = cov[0, 3] + s * (cov[0, 4] + cov[1, 3] + s * cov[1, 4])
    zz = cov[3, 3] + s * (2 * cov[3, 4] + s * cov[4, 4])
    a, b, c, d, var_u, var_v = _seen(state, hit)
    off_u, off_v = a * across + b * up, c * across + d * up
    uu, vv = a * a * yy + 2 * a * b * yz + b * b * zz + var_u, c * c * yy + 2 * c * d * yz + d * d * zz + var_v
    uv = a * c * yy + (a * d + b * c) * yz + b * d * zz
    chi2 = (vv * off_u * off_u - 2 * uv * off_u * off_v + uu * off_v * off_v) / (uu * vv - uv * uv)
    return chi2, s, across, up


@compiled
def take(state: Any, hit: Any, field: Any) -> float:
    """Move a state to a hit nearby and let the hit correct it, along one axis after the other; returns chi^2."""
    fly(state, (hit.x - state.x) * state.cosine + (hit.y - state.y) * state.sine, field)
    sine, cosine = state.sine, state.cosine
    across, up = (hit.y - state.y) * cosine - (hit.x - state.x) * sine, hit.z - state.z
    a, b, c, d, var_u, var_v = _seen(state, hit)
    cov, column, chi2, psi = state.cov, state.column, 0.0, state.psi
    for axis in range(2):
        if axis == 1:
            a, b, var_u = c, d, var_v
        for i in range(5):
            column[i] = a * cov[i, 0] + b * cov[i, 3]
        weight = 1 / (a * column[0] + b * column[3] + var_u)
        off = a * across + b * up
        chi2 += weight * off * off
        for i in range(5):
            for j in range(5):
                cov[i, j] -= weight * column[i] * column[j]
        off *= weight
        across, up = across - off * column[0], up - off * column[3]
        state.x -= sine * off * column[0]
        state.y += cosine * off * column[0]
        psi += off * column[1]
        state.k += off * column[2]
        state.z += off * column[3]
        state.slope += off * column[4]
    point(state, psi)
    state.quality += HIT_WORTH - chi2
    state.num_hits += 1
    return chi2


@compiled
def forget(state: Any) -> None:
    """Take away what is known of a state by hits: its place is left, and `AT_FIRST`."""
    state.cov[:] = 0.0
    for i in range(5):
        state.cov[i, i] = AT_FIRST[i] ** 2
    state.cov[4, 4] *= (1 + state.slope * state.slope) ** 2
    state.quality, state.num_hits, state.surfaces, state.holes, state.pending = 0.0, 0, 0, 0, 0


@compiled
def begin(state: Any, a: Any, b: Any, c: Any, field: Any) -> None:
    """Put a state on the first of three hits of a flight, whichever way it goes, on the circle through them."""
    curvature, ab, bc = through_points(a, b, c)
    state.x, state.y, state.z = a.x, a.y, a.z
    point(state, np.arctan2(b.y - a.y, b.x - a.x) - 0.5 * curvature * ab)
    state.slope = (c.z - a.z) / (ab + bc)
    bend = forces(field, b.x, b.y, b.z, state.psi + curvature * ab, state.slope)[0]
    # A map may bend little at a point, or not at all.
    state.k = curvature / (bend if abs(bend) > 0.1 else 0.1 if bend >= 0 else -0.1)
    forget(state)


@compiled
def filter_hits(state: Any, rows: Any, hits: Any, places: Any, side: int, field: Any, most: float) -> float:
    """Follow one hit after the other, outward (1) or inward (-1), from a state that goes through them about.

    A surface scatters once, between its last hit and the next one; where it is not known each hit does.

    Returns:
        chi^2 of two measurements a hit; infinite where it exceeds `most`, or is none.
    """
    forget(state)
    chi2 = 0.0
    for i in range(len(rows)):
        hit = hits[rows[i]]
        if i > 0:
            behind = hits[rows[i - 1]].surface
            if hit.surface != behind or np.isnan(places[behind].coordinate):
                pass_material(state, places[behind], side)
        approach(state, hit.x, hit.y, 1.0, field)
        is_known = state.cov[0, 0] < LOST
        chi2 += take(state, hit, field)
        # So written that NaN ends it as well.
        if not (is_known and chi2 <= most):
            return np.inf
    return chi2


@compiled
def chi2_of(state: Any, outward: Any, hits: Any, places: Any, field: Any, most: float) -> float:
    """chi^2 per degree of freedom of three hits or more, ordered outward, on one track, which `state` is on at last.

    Twice the hits are measured, and five parameters fitted. Infinite where it exceeds `most`, or no circle goes through
    the first, the middle and the last of the hits.
    """
    count = len(outward)
    begin(state, hits[outward[0]], hits[outward[count // 2]], hits[outward[count - 1]], field)
    freedom = 2 * count - 5
    return filter_hits(state, outward, hits, places, 1, field, most * freedom) / freedom  # type: ignore[no-any-return]


@compiled
def start(state: Any, a: Any, b: Any, c: Any, places: Any, side: int, field: Any) -> None:
    """Put a state on the last of three hits of a flight, outward (1) or inward (-1), filtered with all three."""
    begin(state, a, b, c, field)
    take(state, a, field)
    approach(state, b.x, b.y, 1.0, field)
    take(state, b, field)
    pass_material(state, places[b.surface], side)
    approach(state, c.x, c.y, 1.0, field)
    take(state, c, field)
    state.surfaces = 3


def room(shape: int | tuple[int, ...] = 1) -> npt.NDArray[np.void]:
    """Room for states, `STATE_DTYPE` of a shape, which the caller of a kernel owns: in compiled code a record keeps no
    array alive.

    Of an array that a kernel makes, numba frees the memory once the record is taken out, and uses it again.
    """
    return np.zeros(shape, STATE_DTYPE)
