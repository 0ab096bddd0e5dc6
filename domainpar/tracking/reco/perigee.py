"""The parameters of each found track at the beam line, with covariances: a Kalman filter from the outermost hit inward.

    d0     signed distance in mm of the track's point (x0, y0) closest to the beam line x = y = 0, which is
           y0 cos(phi) - x0 sin(phi): positive where the beam line lies to the right of the track
    z0     z of that point in mm
    phi    direction of flight there in the transverse plane, in [-pi, pi]
    theta  polar angle of that direction, in (0, pi)
    q/p    charge over momentum in 1/GeV

These are ACTS's parameters of a perigee surface along z at the origin, signs included.

The reference is the helix of `reco.helix`, flown through the field from hit to hit; the filter (R. Fruehwirth, Nucl.
Instrum. Meth. A 262 (1987) 444) is of deviations from it, and moves it. A surface scatters once, and slows by the mean
loss of a pion. Hits are as precise as the layout tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.common.compiling import compiled
from domainpar.tracking.events.detector import CHARGE_SHARING, GEV_PER_TESLA_MM
from domainpar.tracking.events.field import Field, forces
from domainpar.tracking.events.graph import FloatArray, IntArray, volumes_and_layers
from domainpar.tracking.reco.ckf.finder import HIT_DTYPE
from domainpar.tracking.reco.ckf.layout import trackml
from domainpar.tracking.reco.ckf.states import EVEN_FIELD, STATE_DTYPE, fly
from domainpar.tracking.reco.helix import fit_helices
from domainpar.tracking.reco.segments import TrackHits

NAMES = ("d0", "z0", "phi", "theta", "qop")

PASSES = 3
"""Each begins with the result of the one before."""

# Nothing is known before the outermost hit: mm, rad, 1/GeV, mm, and share of 1 + slope^2.
AT_FIRST = (5.0, 0.1, 2.0, 5.0, 0.1)

AT_THE_HIT = 0.9
"""Part of a surface's material that scatters there, whatever the angle: chosen on simulated events, where all of it
scatters some mm behind the hit."""

ENERGY_LOSS = 0.045
"""GeV in a radiation length, of a fast particle; beta^-3 times as much of a slow one of this mass."""
PION = 0.1396

# A step that ends nearer to a hit than this, in mm, is the last.
NEAR = 1e-4
MAX_STEPS = 60


@dataclass(frozen=True, eq=False)
class Perigees:
    """Parameters of T tracks, NaN where a track has no fit.

    Attributes:
        value: `NAMES` of each, float64 [T, 5].
        covariance: In the same order and units, float64 [T, 5, 5].
        chi2: Of the hits, two measurements each, float64 [T].
        ndf: Twice the hits less five, int64 [T].
    """

    value: FloatArray
    covariance: FloatArray
    chi2: FloatArray
    ndf: IntArray


def fit_perigees(hits: TrackHits, track_id: IntArray, num_tracks: int, rows: IntArray | None = None) -> Perigees:
    """Fit all tracks of an event, each by its own hits in whatever order; they are taken outward from the origin.

    Args:
        hits: The hits of the event, with positions.
        track_id: Track of each, in [0, num_tracks), or -1 for none, [N].
        num_tracks: Number of tracks T.
        rows: Hits that `track_id` is of, where some lie on several tracks, [N + S]; by default each once.

    Returns:
        One row a track. Tracks that have no helix are not fitted.

    Raises:
        ValueError: If the hits have no positions, or one of a track lies on none of the surfaces.
    """
    if hits.position is None:
        raise ValueError("the parameters of tracks are fitted to positions, which their hits do not have.")
    rows = np.arange(len(hits)) if rows is None else rows
    rows, track_id = rows[track_id >= 0], track_id[track_id >= 0]
    position, field = hits.position[rows].astype(np.float64), Field.of(hits.field)
    helices = fit_helices(position, track_id, num_tracks, field)
    layout = hits.layout or trackml()
    table = np.zeros(len(rows), HIT_DTYPE)
    table["x"], table["y"], table["z"] = position.T
    table["phi"] = np.arctan2(table["y"], table["x"])
    table["surface"] = layout.surface_of(*volumes_and_layers(hits.surface[rows]))
    # By all that tells hits apart: their order in the event must not decide anything.
    order = np.lexsort((*position.T, np.sum(position**2, axis=1), track_id))
    ptr = np.searchsorted(track_id[order], np.arange(num_tracks + 1))
    k = -helices.charge * GEV_PER_TESLA_MM / helices.pt
    begin = np.stack([helices.d0, helices.phi, k, helices.z0, np.sinh(helices.eta)], axis=1)
    spread, chi2 = _fit_all(table[order], ptr, begin, layout.places, field, _room())
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # what is not finite is dropped below
        value, covariance = _parameters(begin), _carried_over(begin, spread)
    known = np.isfinite(value).all(axis=1) & np.isfinite(covariance).all(axis=(1, 2)) & np.isfinite(chi2)
    # Hits of no particle may leave a filter without a positive variance.
    unknown = ~(known & (np.einsum("tii->ti", covariance) > 0).all(axis=1))
    value[unknown], covariance[unknown], chi2[unknown] = np.nan, np.nan, np.nan
    return Perigees(value, covariance, chi2, 2 * np.diff(ptr) - 5)


def flown_back(begun: FloatArray, field: Field) -> FloatArray:
    """`NAMES` of particles that began anywhere, flown back to the beam line without material, float64 [P, 5].

    Args:
        begun: x, y, z in mm, phi, pt in GeV, eta and charge of each, [P, 7]; where one is NaN, or the charge 0, so is
            the result.
        field: The field.
    """
    x, y, z, phi, pt, eta, charge = begun.T
    k = -np.where(charge == 0, np.nan, charge) * GEV_PER_TESLA_MM / pt
    return _parameters(_fly_back(np.stack([x, y, phi, k, z, np.sinh(eta)], axis=1), field, _room()))


def _room() -> npt.NDArray[np.void]:
    """Room for a state, which the caller of a kernel owns: a record keeps no array alive in compiled code.

    Of one made there, numba frees the array once the record is taken out, and its memory is given to whoever asks next.
    """
    return np.zeros(1, STATE_DTYPE)


def _parameters(reference: FloatArray) -> FloatArray:
    """`NAMES` of (d0, phi, k, z0, slope), [T, 5]."""
    d0, phi, k, z0, slope = reference.T
    qop = -k / (GEV_PER_TESLA_MM * np.hypot(1, slope))
    return np.stack([d0, z0, (phi + np.pi) % (2 * np.pi) - np.pi, np.arctan2(1, slope), qop], axis=1)


def _carried_over(reference: FloatArray, covariance: FloatArray) -> FloatArray:
    """The covariance of `_parameters`, given that of deviations from the reference, [T, 5, 5]."""
    d0, _, k, _, slope = reference.T
    by, square = np.zeros((len(reference), 5, 5)), 1 + slope * slope
    by[:, 0, 0] = by[:, 2, 1] = by[:, 1, 3] = 1.0
    # Turned about a point aside of the beam line, a track has its closest point elsewhere.
    by[:, 1, 1], by[:, 3, 4] = -slope * d0, -1 / square
    by[:, 4, 2] = -1 / (GEV_PER_TESLA_MM * np.sqrt(square))
    by[:, 4, 4] = -k * by[:, 4, 2] * slope / square
    return np.asarray(np.einsum("tij,tjk,tlk->til", by, covariance, by))


@compiled
def _fly_back(begun: Any, field: Any, room: Any) -> Any:
    """(d0, phi, k, z0, slope) of states (x, y, phi, k, z, slope); NaN of those with one."""
    references, state = np.full((len(begun), 5), np.nan), room[0]
    for i in range(len(begun)):
        if np.isfinite(begun[i]).all():
            state.x, state.y, state.psi, state.k, state.z, state.slope = begun[i]
            _to_beam(state, references[i], field)
    return references


# --- one track -------------------------------------------------------------------------------------------------------
# Deviations from the reference are of (place across it, direction, curvature k, z, slope), as the state of the CKF.


@compiled
def _fit_all(hits: Any, ptr: Any, references: Any, places: Any, field: Any, room: Any) -> Any:
    """Move the references (d0, phi, k, z0, slope), [T, 5], where the hits of their tracks tell; (covariances of
    deviations from them, [T, 5, 5], chi^2, [T]), NaN without a helix."""
    spreads, chi2 = np.full((len(references), 5, 5), np.nan), np.full(len(references), np.nan)
    most = max(np.max(np.diff(ptr)), 1) if len(references) else 1
    state, back, along = room[0], np.empty((most, 5, 5)), np.empty((most, 5))
    for track in range(len(references)):
        of_track, reference = hits[ptr[track] : ptr[track + 1]], references[track]
        if not np.isfinite(reference).all() or reference[2] == 0.0:
            continue
        for _ in range(PASSES):
            _fly_out(state, reference, of_track, places, field, back, along)
            deviation, spreads[track], chi2[track] = _filter(of_track, along, back, places)
            reference += deviation
            _place(state, reference)
            _to_beam(state, reference, field)
    return spreads, chi2


@compiled
def _place(state: Any, reference: Any) -> None:
    """Put a state on the reference's point closest to the beam line."""
    d0, phi = reference[0], reference[1]
    state.x, state.y, state.psi = -d0 * np.sin(phi), d0 * np.cos(phi), phi
    state.k, state.z, state.slope = reference[2], reference[3], reference[4]


@compiled
def _fly_out(state: Any, reference: Any, hits: Any, places: Any, field: Any, back: Any, along: Any) -> None:
    """Fly from the beam line along the hits of a track.

    For each hit: `back` carries deviations from it to the one before, or to the beam line, and `along` has the
    hit's distance across and in z, and the direction, slope and k there.
    """
    _place(state, reference)
    for i in range(len(hits)):
        back[i] = np.eye(5)
        _fly_to(state, hits[i].x, hits[i].y, field, back[i])
        sine, cosine = np.sin(state.psi), np.cos(state.psi)
        along[i, 0] = (hits[i].y - state.y) * cosine - (hits[i].x - state.x) * sine
        along[i, 1] = hits[i].z - state.z
        along[i, 2], along[i, 3], along[i, 4] = state.psi, state.slope, state.k
        if i + 1 < len(hits) and hits[i + 1].surface != hits[i].surface:
            momentum = GEV_PER_TESLA_MM / abs(state.k) * np.sqrt(1 + state.slope**2)
            lost = ENERGY_LOSS * places[hits[i].surface].material * (1 + (PION / momentum) ** 2) ** 1.5
            state.k *= 1 + lost / momentum


@compiled
def _to_beam(state: Any, reference: Any, field: Any) -> None:
    """Fly a state to its point closest to the beam line, and read the reference there."""
    _fly_to(state, 0.0, 0.0, field, np.eye(5))
    reference[0] = state.y * np.cos(state.psi) - state.x * np.sin(state.psi)
    reference[1], reference[2], reference[3], reference[4] = state.psi, state.k, state.z, state.slope


@compiled
def _fly_to(state: Any, x: float, y: float, field: Any, back: Any) -> None:
    """Move a state to where it passes (x, y), and multiply `back` by the transport of deviations back over a step."""
    step, product = np.eye(5), np.empty((5, 5))
    for _ in range(MAX_STEPS):
        s = (x - state.x) * np.cos(state.psi) + (y - state.y) * np.sin(state.psi)
        # So written that NaN ends it as well.
        if not abs(s) > NEAR:
            return
        most = EVEN_FIELD / max(abs(state.slope), 1.0)
        s = min(max(s, -most), most)
        _transport(state, -s, field, step)
        fly(state, s, field)
        _multiply(back, step, product)
        back[:] = product


@compiled
def _transport(state: Any, s: float, field: Any, step: Any) -> None:
    """The transport of deviations by the arc length s, exact to s^2, about the place half a step ahead of a state.

    Along a curve of curvature c a neighbour at the distance y turns by -c^2 y, and its way is shorter by c y.
    """
    slope, square = state.slope, 0.5 * s * s
    x, y = state.x - 0.5 * s * np.cos(state.psi), state.y - 0.5 * s * np.sin(state.psi)
    z = state.z - 0.5 * s * slope
    bend, twist = forces(field, x, y, z, state.psi, slope)
    turn = state.k * bend
    by_slope = state.k * (bend - forces(field, x, y, z, state.psi, 0.0)[0]) / slope if abs(slope) > 1e-6 else 0.0
    of_k = twist * (1 + slope * slope)
    step[0, 0], step[0, 1], step[0, 2], step[0, 4] = 1 - square * turn**2, s, square * bend, square * by_slope
    step[1, 0], step[1, 1], step[1, 2], step[1, 4] = -s * turn**2, step[0, 0], s * bend, s * by_slope
    step[3, 0], step[3, 1], step[3, 2] = -s * slope * turn, -square * slope * turn, square * of_k
    step[3, 4], step[4, 2] = s, s * of_k


@compiled
def _multiply(a: Any, b: Any, product: Any) -> None:
    for i in range(5):
        for j in range(5):
            total = 0.0
            for n in range(5):
                total += a[i, n] * b[n, j]
            product[i, j] = total


@compiled
def _filter(hits: Any, along: Any, back: Any, places: Any) -> Any:
    """(deviation at the beam line, its covariance, chi^2) of the hits of a track, from the outermost inward."""
    x, chi2, last = np.zeros(5), 0.0, along[len(hits) - 1]
    spread = np.zeros((5, 5))
    for m in range(5):
        spread[m, m] = AT_FIRST[m] ** 2
    spread[2, 2] *= GEV_PER_TESLA_MM**2
    spread[4, 4] *= (1 + last[3] ** 2) ** 2
    product, column = np.empty((5, 5)), np.empty((5, 2))
    for i in range(len(hits) - 1, -1, -1):
        place, psi, slope, k = places[hits[i].surface], along[i, 2], along[i, 3], along[i, 4]
        a, b, c = _errors(place, psi - hits[i].phi, slope)
        a, b, c = a + spread[0, 0], b + spread[0, 3], c + spread[3, 3]
        scale = 1 / (a * c - b * b)
        across, up = along[i, 0] - x[0], along[i, 1] - x[3]
        chi2 += scale * (c * across * across - 2 * b * across * up + a * up * up)
        for m in range(5):
            column[m, 0] = scale * (c * spread[m, 0] - b * spread[m, 3])
            column[m, 1] = scale * (a * spread[m, 3] - b * spread[m, 0])
        of_y, of_z = spread[0].copy(), spread[3].copy()
        for m in range(5):
            x[m] += column[m, 0] * across + column[m, 1] * up
            for n in range(5):
                spread[m, n] -= column[m, 0] * of_y[n] + column[m, 1] * of_z[n]
        if i == 0 or hits[i - 1].surface != hits[i].surface:
            # Scattering in both directions across the track: 13.6 MeV / p sqrt(x / X0).
            variance = 0.0136**2 * AT_THE_HIT * place.material * (k / GEV_PER_TESLA_MM) ** 2
            spread[1, 1] += variance
            spread[4, 4] += variance * (1 + slope * slope)
        _multiply(back[i], spread, product)
        _multiply(product, back[i].T, spread)
        x = (back[i] * x).sum(axis=1)
    return x, spread, chi2


@compiled
def _errors(place: Any, turned: float, slope: float) -> Any:
    """Covariance (across, both, z) of a hit's distance from a track that passes it, `turned` from the radial."""
    sine, cosine = np.sin(turned), np.cos(turned)
    if place.is_barrel:
        per_normal = 1 / max(abs(np.cos(turned - place.tilt)), 0.05)
        var_u = _narrowed(place.var_u, place.thickness * np.sin(turned - place.tilt) * per_normal, CHARGE_SHARING[0])
        var_v = _narrowed(place.var_v, place.thickness * slope * per_normal, CHARGE_SHARING[1])
        both = -var_u * slope * sine * cosine
        return var_u * cosine * cosine, both, var_u * (slope * sine) ** 2 + var_v
    per_normal = 1 / max(abs(slope), 0.05)
    var_u = _narrowed(place.var_u, place.thickness * sine * per_normal, CHARGE_SHARING[0])
    var_v = _narrowed(place.var_v, place.thickness * cosine * per_normal, CHARGE_SHARING[1])
    both = slope * sine * cosine * (var_v - var_u)
    across = var_u * cosine * cosine + var_v * sine * sine
    return across, both, slope * slope * (var_u * sine * sine + var_v * cosine * cosine)


@compiled
def _narrowed(variance: float, span: float, sharing: float) -> float:
    """Variance of a position by cells, of `variance` where one tells it: a track that spans several is seen better."""
    pitch_squared = 12 * variance
    cells = min(abs(span) / np.sqrt(pitch_squared), 1.0)
    return pitch_squared * ((1 - cells) ** 2 / 12 + cells * sharing**2 / 3)  # type: ignore[no-any-return]
