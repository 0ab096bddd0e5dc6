"""What matched tracks hold of their particles' hits, layer by layer, and how far these lie from the fitted track."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from domainpar.common.models import Model
from domainpar.tracking.events.graph import BoolArray, FloatArray, IntArray, volumes_and_layers
from domainpar.tracking.reco.performance.matching import Overlaps
from domainpar.tracking.reco.performance.truth import EventTruth

_LARGE = [10 ** (power / 5) for power in range(-15, 6)]

RESIDUALS = (*(-edge for edge in reversed(_LARGE)), *_LARGE)
"""Borders of the bins of distances in mm, five to a decade from 0.001 to 10 on both sides; the outermost bins hold what
lies beyond, too."""


class LayerCounts(Model, frozen=True):
    """Hits of target particles on one layer, of tracks that are pure for these (see `matching.STYLES`).

    Attributes:
        hits: The particles' hits, once for each such track.
        held: Those of them that lie on the track.
        across, along: Held hits by their distance from the track of the others (`residuals`), in bins of
            `RESIDUALS`; hits without a fit are in none.
    """

    hits: int
    held: int
    across: tuple[int, ...]
    along: tuple[int, ...]


def count_layers(overlaps: Overlaps, truth: EventTruth, matched: BoolArray) -> dict[str, LayerCounts]:
    """Count the hits of each layer that has some, by `volume.layer`.

    Args:
        overlaps: The tracks and particles of the event.
        truth: Its truth.
        matched: Whether the track of each pair is pure for its particle, and this is a target, bool [K].
    """
    # One row more each: that of noise, and of hits in no pair.
    tracks_of_particle = np.bincount(overlaps.particle[matched], minlength=overlaps.num_particles + 1)
    held = np.append(matched, False)[overlaps.pair_of_member]
    off = np.full((len(held), 2), np.nan)
    if truth.position is not None:
        from domainpar.tracking.reco.residuals import residuals  # its compiled code is loaded when tracks are fitted

        off = residuals(truth.hits, overlaps.track_of_member, overlaps.num_tracks, overlaps.member)
    surfaces, layer_of_hit = np.unique(truth.surface, return_inverse=True)
    hits = np.bincount(layer_of_hit, tracks_of_particle[overlaps.particle_of_hit], len(surfaces)).astype(np.int64)
    layer, off = layer_of_hit[overlaps.member[held]], off[held]
    num_held = np.bincount(layer, minlength=len(surfaces))
    across, along = (_histograms(layer[of == of], of[of == of], len(surfaces)) for of in off.T)  # not NaN
    names = [f"{volume}.{number}" for volume, number in zip(*volumes_and_layers(surfaces))]
    return {
        names[i]: LayerCounts(int(hits[i]), int(num_held[i]), tuple(across[i].tolist()), tuple(along[i].tolist()))
        for i in np.flatnonzero(hits)
    }


def _histograms(layer: IntArray, distance: IntArray, num_layers: int) -> IntArray:
    """Hits of each layer by their distance, int64 [layers, bins]."""
    num_bins = len(RESIDUALS) - 1
    bins = np.searchsorted(RESIDUALS[1:-1], distance, side="right")
    return np.bincount(layer * num_bins + bins, minlength=num_layers * num_bins).reshape(num_layers, num_bins)


ONE_SIGMA = np.array([0.1587, 0.5, 0.8413])
"""Levels of the central 68.3 % and of the median."""


def median_and_width(values: FloatArray) -> tuple[float, float]:
    """Median of the finite values, and half of the interval that holds their central 68.3 %; NaN without any."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return np.nan, np.nan
    low, median, high = np.quantile(finite, ONE_SIGMA)
    return float(median), float(high - low) / 2


def median_and_width_of_bins(counts: Sequence[int]) -> tuple[float, float] | None:
    """The same of distances in bins of `RESIDUALS`, in mm, spread evenly in each bin; None of none."""
    if not sum(counts):
        return None
    below = np.cumsum([0, *counts])
    low, median, high = np.interp(ONE_SIGMA * below[-1], below, RESIDUALS)
    return float(median), float(high - low) / 2
