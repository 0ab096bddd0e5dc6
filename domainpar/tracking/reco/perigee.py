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
from domainpar.tracking.events.graph import FloatArray, IntArray
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.kalman import (
    MIN_FITTED_HITS,
    approach,
    begin,
    filter_hits,
    forget,
    pass_material,
    point,
    room,
)

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

    @property
    def momenta(self) -> npt.NDArray[np.float64]:
        """Charge over pT in 1/GeV, pseudorapidity, phi, d0 and z0 of each, float64 [T, 5]."""
        d0, z0, phi, theta, qop = self.value.T
        return np.column_stack([qop / np.sin(theta), -np.log(np.tan(theta / 2)), phi, d0, z0])


def fit_perigees(
    hits: TrackHits, track_id: IntArray, num_tracks: int, rows: IntArray | None = None, passes: int = PASSES
) -> Perigees:
    """Fit all tracks of an event, each by its own hits in whatever order.

    Args:
        hits, track_id, num_tracks, rows: As of `TrackHits.by_track`.
        passes: Each begins with the result of the one before. One is enough to compare tracks.

    Returns:
        One row a track. Tracks of fewer than three hits, or that no circle goes through, are not fitted.

    Raises:
        ValueError: As `TrackHits.by_track`.
    """
    rows, ptr, _ = hits.by_track(track_id, num_tracks, rows)
    begun, spread, chi2 = _fit_all(rows, ptr, hits.table, hits.places, Field.of(hits.field), room(), passes)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # what is not finite is dropped below
        value, covariance = _parameters(begun), _carried_over(begun, spread)
    is_finite = np.isfinite(value).all(axis=1) & np.isfinite(covariance).all(axis=(1, 2)) & np.isfinite(chi2)
    # Hits of no particle may leave a filter without a positive variance.
    bad = ~(is_finite & (np.einsum("tii->ti", covariance) > 0).all(axis=1))
    value[bad], covariance[bad], chi2[bad] = np.nan, np.nan, np.nan
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
    return _parameters(_fly_back(np.stack([x, y, phi, k, z, np.sinh(eta)], axis=1), field, room()))


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
def _fit_all(rows: Any, ptr: Any, hits: Any, places: Any, field: Any, room: Any, passes: int) -> Any:
    """((d0, phi, k, z0, slope) of each track, [T, 5]; covariances of (place across, direction, k, z, slope) there,
    [T, 5, 5]; chi^2, [T]), NaN without a circle."""
    count = len(ptr) - 1
    references, spreads, chi2 = np.full((count, 5), np.nan), np.full((count, 5, 5), np.nan), np.full(count, np.nan)
    state = room[0]
    for track in range(count):
        outward = rows[ptr[track] : ptr[track + 1]]
        if len(outward) < MIN_FITTED_HITS:
            continue
        begin(state, hits[outward[0]], hits[outward[(len(outward) - 1) // 2]], hits[outward[-1]], field)
        for _ in range(passes):
            # Outward along the hits, to where the filter begins, with the energy that the track loses there.
            for i in range(len(outward)):
                if i > 0 and hits[outward[i]].surface != hits[outward[i - 1]].surface:
                    pass_material(state, places[hits[outward[i - 1]].surface], 1)
                approach(state, hits[outward[i]].x, hits[outward[i]].y, 1.0, field)
            chi2[track] = filter_hits(state, outward[::-1], hits, places, -1, field, np.inf)
            pass_material(state, places[hits[outward[0]].surface], -1)
            _to_beam(state, references[track], field)
            spreads[track] = state.cov
    return references, spreads, chi2
