"""Whether the field fits the tracks that were found, without truth: both halves of a track have the same momentum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from domainpar.tracking.events.field import Field
from domainpar.tracking.events.graph import FloatArray, IntArray
from domainpar.tracking.reco.helix import fit_helices

LEAST_HITS = 8
"""Hits of a track that is cut in halves, at least."""

SOFTEST, HARDEST = 0.3, 5.0
"""pT in GeV of these tracks: softer ones scatter, the halves of harder ones are as good as straight."""

ETAS = (1.0, 1.5, 2.0, 2.5)
"""Edges of the bins of |eta|. Nearer to 0 a field changes little along a track, beyond them half a track is short."""

RATIOS = np.linspace(0.0, 2.0, 101)
"""Edges of the bins of the ratios; those beyond count in the outermost."""

FEWEST = 100
"""Tracks of a bin of |eta| whose median is told, at least."""

LARGEST = 0.1
"""A median that differs by more from 1 tells of another field. Measured on ACTS events, two each: at most 0.03 in the
field of their simulation (2 T; a solenoid with its map); 0.14 and more in some bin in TrackML's, or with 2 T for the
solenoid."""


def ratios_of_halves(position: FloatArray, track_id: IntArray, field: Field) -> IntArray:
    """Tracks by |eta| and by the momentum of their outer half over that of their inner one, each over its charge.

    Args:
        position: x, y, z of each hit in mm, [N, 3].
        track_id: Track of each hit, or -1 for none, [N].
        field: The field in which the halves are fitted.

    Returns:
        int64 [3, 100], bins of `ETAS` and `RATIOS`.
    """
    rows = np.lexsort((np.sum(np.asarray(position, np.float64) ** 2, axis=1), track_id))
    rows = rows[track_id[rows] >= 0]
    tracks, first, track, hits = np.unique(track_id[rows], return_index=True, return_inverse=True, return_counts=True)
    outer = 2 * (np.arange(len(rows)) - first[track]) >= hits[track]
    half = np.full(len(position), -1)
    half[rows] = np.where(hits[track] >= LEAST_HITS, 2 * track + outer, -1)
    fits = fit_helices(position, half, 2 * len(tracks), field)
    with np.errstate(divide="ignore", invalid="ignore"):
        momentum = fits.pt * fits.charge  # NaN without a fit, infinite on a line
        inner, ratio = np.abs(momentum[::2]), momentum[1::2] / momentum[::2]
        good = (inner > SOFTEST) & (inner < HARDEST) & ~np.isnan(ratio)
    binned, _, _ = np.histogram2d(
        np.abs(fits.eta[::2][good]), np.clip(ratio[good], RATIOS[0], RATIOS[-1]), bins=(ETAS, RATIOS)
    )
    return binned.astype(np.int64)


def field_warning(counts: Sequence[IntArray], field: str) -> list[str]:
    """That a field does not fit the tracks, where it does not.

    Args:
        counts: `ratios_of_halves` of events in it.
        field: The field, in words.
    """
    odd = []
    for low, high, tracks in zip(ETAS, ETAS[1:], np.sum(counts, axis=0) if counts else ()):
        if (number := int(tracks.sum())) >= FEWEST:
            middle = int(np.searchsorted(np.cumsum(tracks), number / 2))
            if abs((median := float(RATIOS[middle] + RATIOS[middle + 1]) / 2) - 1) > LARGEST:
                odd.append(f"{median:.2f} at |eta| {low:g} to {high:g} ({number:,} tracks)")
    if not odd:
        return []
    return [
        f"WARNING: the field ({field}) looks wrong: momenta of the outer half of a track over the inner half, which "
        f"are 1 in the right field, have a median of {', '.join(odd)}; name the field with prepare --field"
    ]
