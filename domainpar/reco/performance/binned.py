"""Counts against pT, eta, phi and the distance to the nearest border of a sector: of particles and of fitted tracks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from domainpar.events.graph import BoolArray, FloatArray, IntArray
from domainpar.reco.performance.matching import Matching, Overlaps
from domainpar.reco.performance.truth import EventTruth, directions, production_vertices

EDGES: Mapping[str, tuple[float, ...]] = {
    "pt": (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0, 50.0),
    "eta": tuple(i / 2 for i in range(-8, 9)),
    "phi": tuple(i * math.pi / 8 for i in range(-8, 9)),
    "border": (0.0, 0.01, 0.02, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0),
}
"""Borders of the bins: pT in GeV, eta, phi in rad, Delta R. A bin holds its lower border, the last one both."""


@dataclass(frozen=True)
class Binned:
    """Counts of one style in bins of one quantity.

    What lies outside the outermost edges, or whose quantity is unknown, is in no bin: the totals count it.

    Attributes:
        edges: Borders of the bins, length B + 1.
        targets: Target particles by their true quantity, length B. Against pT the condition on pT is left out, so that
            the turn-on shows.
        reconstructed: Those of them that a track reconstructs.
        duplicated: Further tracks that reconstruct these particles, after the first.
        tracks: Matchable tracks by the quantity of the helix fitted to them.
        fakes: Those of them that match no particle.
    """

    edges: tuple[float, ...]
    targets: tuple[int, ...]
    reconstructed: tuple[int, ...]
    duplicated: tuple[int, ...]
    tracks: tuple[int, ...]
    fakes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Bins:
    """The bin of each particle and of each track in one quantity, -1 for none, int64 [P] and [T]."""

    edges: tuple[float, ...]
    particle: IntArray
    track: IntArray

    def count(self, matching: Matching, matchable: BoolArray, target: BoolArray) -> Binned:
        """The counts of one style, given which tracks are matchable [T] and which particles are targets [P]."""
        times = matching.times_reconstructed
        further = np.where(target, np.maximum(times - 1, 0), 0)
        return Binned(
            edges=self.edges,
            targets=self._histogram(self.particle[target]),
            reconstructed=self._histogram(self.particle[target & (times > 0)]),
            duplicated=self._histogram(np.repeat(self.particle, further)),
            tracks=self._histogram(self.track[matchable]),
            fakes=self._histogram(self.track[matchable & ~matching.matched]),
        )

    def _histogram(self, bins: IntArray) -> tuple[int, ...]:
        return tuple(np.bincount(bins[bins >= 0], minlength=len(self.edges) - 1).tolist())


def bins_of(values: FloatArray, edges: tuple[float, ...]) -> IntArray:
    """The bin of each value, -1 outside all of them and for NaN, int64."""
    values = np.asarray(values, np.float64)
    bins = np.searchsorted(edges, values, side="right") - 1
    bins[values == edges[-1]] = len(edges) - 2
    bins[~((values >= edges[0]) & (values <= edges[-1]))] = -1
    return np.asarray(bins)


def bin_all(overlaps: Overlaps, truth: EventTruth, pt: FloatArray, eta: FloatArray) -> dict[str, Bins]:
    """The bins of all particles and tracks, for each quantity of `EDGES`.

    Particles are binned by their true pT and eta, given here, [P]; by the phi of their hit nearest to the production
    vertex, since tables of particles hold no direction; and by the smallest border distance of their hits. Tracks are
    binned by a helix fitted to their hits, and by the smallest border distance of these.
    """
    of_particles = {
        "pt": pt,
        "eta": eta,
        "phi": _phi_of_first_hits(overlaps, truth),
        "border": _smallest(truth.border, overlaps.particle_of_hit, overlaps.num_particles),
    }
    of_tracks = dict.fromkeys(("pt", "eta", "phi"), np.full(overlaps.num_tracks, np.nan))
    if truth.position is not None:
        from domainpar.reco.helix import fit_helices  # its compiled code is loaded when tracks are fitted only

        helices = fit_helices(truth.position, overlaps.track_of_hit, overlaps.num_tracks, truth.field)
        of_tracks = {"pt": helices.pt, "eta": helices.eta, "phi": helices.phi}
    of_tracks["border"] = _smallest(truth.border, overlaps.track_of_hit, overlaps.num_tracks)
    return {
        name: Bins(edges, bins_of(of_particles[name], edges), bins_of(of_tracks[name], edges))
        for name, edges in EDGES.items()
    }


def _smallest(values: FloatArray | None, row_of_hit: IntArray, count: int) -> FloatArray:
    """The smallest value among the hits of each row; NaN without values."""
    smallest = np.full(count, np.nan if values is None else np.inf)
    if values is not None:
        counted = row_of_hit >= 0
        np.minimum.at(smallest, row_of_hit[counted], values[counted].astype(np.float64))
    return smallest


def _phi_of_first_hits(overlaps: Overlaps, truth: EventTruth) -> FloatArray:
    """phi of the hit of each particle that is nearest to its production vertex, or to the origin if that is unknown."""
    phi = np.full(overlaps.num_particles, np.nan)
    if truth.position is None:
        return phi
    hits = np.flatnonzero(overlaps.particle_of_hit >= 0)
    particle = overlaps.particle_of_hit[hits]
    position = truth.position[hits]
    distance = np.linalg.norm(position - production_vertices(truth, overlaps.particle_ids)[particle], axis=1)
    phi_of_hit = directions(position)[1]
    order = np.lexsort((phi_of_hit, -distance, particle))
    phi[particle[order]] = phi_of_hit[order]  # of several, the last one stays: the nearest
    return phi
