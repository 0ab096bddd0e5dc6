"""A track while it is followed: its point, direction and curvature with covariances, moved and corrected by hits.

A Kalman filter (R. Fruehwirth, Nucl. Instrum. Meth. A 262 (1987) 444) of position, direction and curvature in the
transverse plane, and beside it one of z and slope: the field along z couples them little. Every surface scatters.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from domainpar.common.compiling import compiled
from domainpar.tracking.events.detector import GEV_PER_TESLA_MM
from domainpar.tracking.events.field import field_at, forces

HIT_WORTH = 14.0
"""Gain in quality of a track by a hit, less its chi^2: somewhat less than the gate, so that no hit is taken that a
track would be better without."""

# What curvature k to expect of any particle, in 1/(mm T): that of 0.15 GeV.
CURVATURE = GEV_PER_TESLA_MM / 0.15
# The field is taken to be even over this far in z, in mm.
EVEN_FIELD = 120.0
# Share of its curvature that a track may gain by losing energy in a surface of one radiation length.
LOSS = 0.15

STATE_DTYPE = np.dtype(
    [(name, "f8") for name in ("x", "y", "psi", "z", "slope", "k")]
    + [(name, "f8") for name in ("yy", "yp", "yk", "pp", "pk", "kk", "zz", "zs", "ss")]
    + [("quality", "f8"), ("num_hits", "i8"), ("surfaces", "i8"), ("holes", "i8"), ("pending", "i8")]
    + [("barrel", "i8"), ("disk", "i8")]
)
"""A point of a helix in mm, its direction psi, slope dz/ds over the transverse arc length s, curvature k in 1/(mm T),
positive when turning left; covariances, with y across the track and p its direction; quality; numbers of hits, of
surfaces with hits, of surfaces without between them, and of those since the last hit; the next barrel and disk of its
way."""


@compiled
def bend_at(field: Any, state: Any) -> float:
    """What bends a state where it is, in T, as a field along z would (`events.field`)."""
    return forces(field, state.x, state.y, state.z, state.psi, state.slope)[0]  # type: ignore[no-any-return]


@compiled
def fly(state: Any, s: float, field: Any) -> None:
    """Move a state by the arc length s, in the field half way along it."""
    z = state.z + 0.5 * state.slope * s
    if field.bz.shape[0] == 1:
        move(state, s, field_at(field, 0.0, z)[0])
        return
    x, y = state.x + 0.5 * s * np.cos(state.psi), state.y + 0.5 * s * np.sin(state.psi)
    bend, twist = forces(field, x, y, z, state.psi, state.slope)
    move(state, s, bend)
    turned = state.k * twist * s
    state.k *= 1 + state.slope * turned
    turned *= 1 + state.slope * state.slope
    # As uncertain as k: the two filters know nothing of each other otherwise.
    apart = twist * s * (1 + state.slope * state.slope)
    variance = state.kk * apart * apart
    state.zz += 0.25 * s * s * variance
    state.zs += 0.5 * s * variance
    state.ss += variance
    state.z += 0.5 * turned * s
    state.slope += turned


@compiled
def move(state: Any, s: float, bz: float) -> None:
    """Move a state by the arc length s in an even field along z, with its covariances."""
    half = 0.5 * state.k * bz * s
    chord = s if abs(half) < 1e-9 else s * np.sin(half) / half
    state.x += chord * np.cos(state.psi + half)
    state.y += chord * np.sin(state.psi + half)
    state.psi += 2 * half
    state.z += state.slope * s
    # To first order y becomes y + s p + f k, and the direction p + g k.
    f, g = 0.5 * bz * s * s, bz * s
    yy, yp, yk, pp, pk, kk = state.yy, state.yp, state.yk, state.pp, state.pk, state.kk
    state.yy = yy + 2 * s * yp + 2 * f * yk + s * s * pp + 2 * s * f * pk + f * f * kk
    state.yp = yp + s * pp + f * pk + g * (yk + s * pk + f * kk)
    state.yk = yk + s * pk + f * kk
    state.pp = pp + 2 * g * pk + g * g * kk
    state.pk = pk + g * kk
    state.zz += 2 * s * state.zs + s * s * state.ss
    state.zs += s * state.ss


@compiled
def approach(state: Any, hit: Any, field: Any) -> None:
    """Move a state to where it passes a hit, over any distance."""
    for _ in range(40):
        s = (hit.x - state.x) * np.cos(state.psi) + (hit.y - state.y) * np.sin(state.psi)
        # Near enough for `residual`; so written that NaN ends it as well.
        if not abs(s) > 1.0:
            return
        most = EVEN_FIELD / max(abs(state.slope), 1.0)
        s = min(max(s, -most), most)
        fly(state, s, field)


@compiled
def _angle_variance(k: float, radiation_lengths: float) -> float:
    """Variance of the transverse direction behind one surface: multiple scattering, 13.6 MeV / p sqrt(x / X0)."""
    # A straight line would not scatter at all, and a curl without end.
    pt = min(max(GEV_PER_TESLA_MM / abs(k), 0.1), 100.0)
    variance: float = 0.0136**2 * radiation_lengths / (pt * pt)
    return variance


@compiled
def scatter(state: Any, place: Any) -> None:
    """Add scattering and loss of energy in one surface to the covariances.

    A track that flies along a surface more than across it passes more of it: much, where a barrel ends.
    """
    path = np.sqrt(1 + state.slope * state.slope)
    if not place.is_barrel:
        path /= max(abs(state.slope), 0.3)
    variance = _angle_variance(state.k, place.material) * path
    state.pp += variance
    state.ss += variance * (1 + state.slope * state.slope)
    state.kk += (LOSS * place.material * state.k) ** 2


@compiled
def _variances(state: Any, hit: Any, place: Any) -> Any:
    """Variances of a hit's position across the track, and in z where the track passes it."""
    if place.is_barrel:
        return place.var_u, place.var_v
    # In a disk a track that does not run radially sees the long side of the cells as well.
    turned = np.sin(state.psi - hit.phi) ** 2
    return place.var_u * (1 - turned) + place.var_v * turned, place.var_v * state.slope * state.slope


@compiled
def residual(state: Any, hit: Any, place: Any, bz: float) -> Any:
    """(chi^2, arc length to the hit, distance across, distance in z, their variances at the hit) of a hit nearby."""
    sine, cosine = np.sin(state.psi), np.cos(state.psi)
    dx, dy = hit.x - state.x, hit.y - state.y
    s = dx * cosine + dy * sine
    across = dy * cosine - dx * sine - 0.5 * state.k * bz * s * s
    up = hit.z - state.z - state.slope * s
    var_y, var_z = _variances(state, hit, place)
    yy = state.yy + 2 * s * state.yp + s * s * state.pp + var_y
    zz = state.zz + 2 * s * state.zs + s * s * state.ss + var_z
    return across * across / yy + up * up / zz, s, across, up, var_y, var_z


@compiled
def take(state: Any, hit: Any, place: Any, bz: float) -> None:
    """Move a state to a hit nearby and let the hit correct it."""
    # Twice: the residual that corrects is that at the hit, not that from afar.
    move(state, residual(state, hit, place, bz)[1], bz)
    chi2, _s, across, up, var_y, var_z = residual(state, hit, place, bz)
    scale = 1 / (state.yy + var_y)
    ky, kp, kk = state.yy * scale, state.yp * scale, state.yk * scale
    state.x -= np.sin(state.psi) * ky * across
    state.y += np.cos(state.psi) * ky * across
    state.psi += kp * across
    state.k += kk * across
    yy, yp, yk = state.yy, state.yp, state.yk
    state.yy, state.yp, state.yk = yy - ky * yy, yp - ky * yp, yk - ky * yk
    state.pp -= kp * yp
    state.pk -= kp * yk
    state.kk -= kk * yk
    scale = 1 / (state.zz + var_z)
    kz, ks = state.zz * scale, state.zs * scale
    state.z += kz * up
    state.slope += ks * up
    zz, zs = state.zz, state.zs
    state.zz, state.zs = zz - kz * zz, zs - kz * zs
    state.ss -= ks * zs
    state.quality += HIT_WORTH - chi2
    state.num_hits += 1


@compiled
def start(state: Any, a: Any, b: Any, c: Any, places: Any, field: Any) -> None:
    """Put a state on the last of three hits of a flight, whichever way it goes: the helix through them."""
    ab, bc, ac = np.hypot(b.x - a.x, b.y - a.y), np.hypot(c.x - b.x, c.y - b.y), np.hypot(c.x - a.x, c.y - a.y)
    k = 2 * ((b.x - a.x) * (c.y - b.y) - (b.y - a.y) * (c.x - b.x)) / (ab * bc * ac)
    # Chords to arcs.
    ab, bc = ab * (1 + (k * ab) ** 2 / 24), bc * (1 + (k * bc) ** 2 / 24)
    state.x, state.y = c.x, c.y
    state.psi = np.arctan2(c.y - b.y, c.x - b.x) + 0.5 * k * bc
    state.slope = (c.z - a.z) / (ab + bc)
    bz, twist = forces(field, b.x, b.y, b.z, state.psi - k * bc, state.slope)
    before, behind, here = bz, bz, bz
    if field.bz.shape[0] > 1:
        before, behind = _between(a, b, state.slope, field), _between(b, c, state.slope, field)
        here = forces(field, c.x, c.y, c.z, state.psi, state.slope)[0]
        # The curvature of a parabola through three points is that of the track, weighed most at the middle one.
        bz = (ab * (2 * before + bz) + bc * (2 * behind + bz)) / (3 * (ab + bc))
    state.k = k / bz
    ya, za = _variances(state, a, places[a.surface])
    yb, zb = _variances(state, b, places[b.surface])
    yc, zc = _variances(state, c, places[c.surface])
    # Seen from behind b, what scattered there displaces a.
    angle = _angle_variance(state.k, places[b.surface].material)
    ya += angle * ab * ab
    za += angle * (1 + state.slope * state.slope) * ab * ab
    if field.bz.shape[0] == 1:
        _start_parabola(state, -(ab + bc), -bc, ya, yb, yc, bz)
    else:
        _start_parabola(state, -(ab + bc), -bc, ya, yb, yc, 1.0)
        state.k = k
        _expect_momentum(state, bz)
        _turn(state, bc * ((2 * behind + here) / 6 - bz / 2))
    # Where the slope changes on the way, that at c is asked for: half of the change times the arc squared is taken off.
    half = 0.5 * state.k * twist * (1 + state.slope * state.slope)
    z_of_a, z_of_b = a.z - half * (ab + bc) ** 2, b.z - half * bc**2
    _start_line(state, -(ab + bc), -bc, z_of_a, z_of_b, c.z, za, zb, zc)
    state.num_hits, state.surfaces, state.holes, state.pending = 3, 3, 0, 0


@compiled
def _turn(state: Any, per_k: float) -> None:
    """Turn a state by `per_k` times its k: at the last hit a map bends other than it does on the whole."""
    state.psi += per_k * state.k
    state.yp += per_k * state.yk
    state.pp += per_k * (2 * state.pk + per_k * state.kk)
    state.pk += per_k * state.kk


@compiled
def _between(a: Any, b: Any, slope: float, field: Any) -> float:
    """What bends a flight half way between two hits, in T."""
    psi = np.arctan2(b.y - a.y, b.x - a.x)
    bend: float = forces(field, 0.5 * (a.x + b.x), 0.5 * (a.y + b.y), 0.5 * (a.z + b.z), psi, slope)[0]
    return bend


@compiled
def _expect_momentum(state: Any, bend: float) -> None:
    """Turn the curvature of a state and its covariances into those of k, by what bends there in T.

    A map may bend little at a point, or not at all: then three hits tell no momentum. So what is known of momenta
    before any hit counts as a measurement of k: 0 with the error `CURVATURE`.
    """
    expected = CURVATURE * CURVATURE * bend
    total = state.kk + expected * bend
    off, gain = state.k / total, expected / total
    state.x += np.sin(state.psi) * state.yk * off
    state.y -= np.cos(state.psi) * state.yk * off
    state.psi -= state.pk * off
    state.yy -= state.yk * state.yk / total
    state.yp -= state.yk * state.pk / total
    state.pp -= state.pk * state.pk / total
    state.k, state.yk, state.pk = state.k * gain, state.yk * gain, state.pk * gain
    state.kk *= CURVATURE * CURVATURE / total


@compiled
def _start_parabola(state: Any, sa: float, sb: float, va: float, vb: float, vc: float, bz: float) -> None:
    """Covariances of y, direction and curvature at arc length 0 of the parabola through points at sa, sb, 0."""
    pa, pb, pc = -sb / ((sa - sb) * sa), -sa / ((sb - sa) * sb), -(sa + sb) / (sa * sb)
    ka, kb, kc = 2 / ((sa - sb) * sa * bz), 2 / ((sb - sa) * sb * bz), 2 / (sa * sb * bz)
    state.yy, state.yp, state.yk = vc, vc * pc, vc * kc
    state.pp = va * pa * pa + vb * pb * pb + vc * pc * pc
    state.pk = va * pa * ka + vb * pb * kb + vc * pc * kc
    state.kk = va * ka * ka + vb * kb * kb + vc * kc * kc


@compiled
def _start_line(state: Any, sa: float, sb: float, za: float, zb: float, zc: float, va: float, vb: float, vc: float
                ) -> None:  # fmt: skip
    """z and slope at arc length 0 of the weighted line through points at sa, sb, 0; and the quality of the three."""
    wa, wb, wc = 1 / va, 1 / vb, 1 / vc
    w, ws, wss = wa + wb + wc, wa * sa + wb * sb, wa * sa * sa + wb * sb * sb
    wz, wsz = wa * za + wb * zb + wc * zc, wa * sa * za + wb * sb * zb
    scale = 1 / (w * wss - ws * ws)
    state.z, state.slope = (wss * wz - ws * wsz) * scale, (w * wsz - ws * wz) * scale
    state.zz, state.zs, state.ss = wss * scale, -ws * scale, w * scale
    chi2 = wc * (zc - state.z) ** 2
    chi2 += wa * (za - state.z - state.slope * sa) ** 2 + wb * (zb - state.z - state.slope * sb) ** 2
    state.quality = 3 * HIT_WORTH - chi2
