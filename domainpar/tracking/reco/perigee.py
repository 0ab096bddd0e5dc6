"""The parameters of each found track at the beam line, with covariances: a Kalman filter from the outermost hit inward.

    d0     signed distance in mm of the track's point (x0, y0) closest to the beam line x = y = 0, which is
           y0 cos(phi) - x0 sin(phi): positive where the beam line lies to the right of the track
    z0     z of that point in mm
    phi    direction of flight there in the transverse plane, in [-pi, pi]
    theta  polar angle of that direction, in (0, pi)
    q/p    charge over momentum in 1/GeV

These are ACTS's parameters of a perigee surface along z at the origin, signs included.

The filter of `reco.kalman` begins far out, where nothing is known, on the circle through first, middle and last hit,
and goes inward from hit to hit. A surface scatters once, and slows by the mean loss of a pion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.common.compiling import compiled
from domainpar.tracking.events.detector import GEV_PER_TESLA_MM
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.graph import FloatArray, IntArray, volumes_and_layers
from domainpar.tracking.reco.ckf.layout import trackml
from domainpar.tracking.reco.helix import MIN_FITTED_HITS
from domainpar.tracking.reco.hit_table import table_of
from domainpar.tracking.reco.kalman import HIT_WORTH, STATE_DTYPE, approach, begin, forget, pass_material, point, take
from domainpar.tracking.reco.segments import TrackHits

NAMES = ("d0", "z0", "phi", "theta", "qop")

PASSES = 2
"""Each begins with the result of the one before."""

NEAR = 1e-4
"""mm from the beam line's closest point at which a flight ends."""


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
    layout, measured = hits.layout or trackml(), None if hits.measured is None else hits.measured[rows]
    columns = hits.position[rows], *volumes_and_layers(hits.surface[rows]), hits.module[rows]
    table, _, places = table_of(*columns, layout, measured, on_surfaces=False)
    distance = table["x"] ** 2 + table["y"] ** 2 + table["z"] ** 2
    # The rest of the order is the table's, which the caller's does not touch.
    order = np.lexsort((distance, track_id[places]))
    ptr = np.searchsorted(track_id[places][order], np.arange(num_tracks + 1))
    begun, spread, chi2 = _fit_all(table[order], ptr, layout.places, Field.of(hits.field), _room())
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # what is not finite is dropped below
        value, covariance = _parameters(begun), _carried_over(begun, spread)
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
            state.x, state.y, psi, state.k, state.z, state.slope = begun[i]
            point(state, psi)
            forget(state)
            _to_beam(state, references[i], field)
    return references


@compiled
def _to_beam(state: Any, reference: Any, field: Any) -> None:
    """Fly a state to its point closest to the beam line, and read (d0, phi, k, z0, slope) there."""
    approach(state, 0.0, 0.0, NEAR, field)
    reference[0] = state.y * state.cosine - state.x * state.sine
    reference[1], reference[2], reference[3], reference[4] = state.psi, state.k, state.z, state.slope


@compiled
def _fit_all(hits: Any, ptr: Any, places: Any, field: Any, room: Any) -> Any:
    """((d0, phi, k, z0, slope) of each track, [T, 5]; covariances of (place across, direction, k, z, slope) there,
    [T, 5, 5]; chi^2, [T]), NaN without a helix."""
    count = len(ptr) - 1
    references, spreads, chi2 = np.full((count, 5), np.nan), np.full((count, 5, 5), np.nan), np.full(count, np.nan)
    state = room[0]
    for track in range(count):
        first, last = ptr[track], ptr[track + 1] - 1
        if last - first + 1 < MIN_FITTED_HITS:
            continue
        begin(state, hits[first], hits[(first + last) // 2], hits[last], field)
        for _ in range(PASSES):
            # Outward along the hits, to where the filter begins, with the energy that the track loses there.
            for i in range(first, last + 1):
                if i > first and hits[i].surface != hits[i - 1].surface:
                    pass_material(state, places[hits[i - 1].surface], 1)
                approach(state, hits[i].x, hits[i].y, 1.0, field)
            forget(state)
            for i in range(last, first - 1, -1):
                approach(state, hits[i].x, hits[i].y, 1.0, field)
                take(state, hits[i], field)
                if i == first or hits[i].surface != hits[i - 1].surface:
                    pass_material(state, places[hits[i].surface], -1)
            chi2[track] = HIT_WORTH * state.num_hits - state.quality
            _to_beam(state, references[track], field)
            spreads[track] = state.cov
    return references, spreads, chi2
