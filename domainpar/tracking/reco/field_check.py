"""Whether the field fits the tracks that were found, without truth: both halves of a track have the same momentum.

Not seen is a field that is wrong by the same factor everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from domainpar.tracking.events.graph import IntArray
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.perigee import fit_perigees

LEAST_HITS, SOFTEST, HARDEST = 8, 0.3, 5.0
"""Hits of a track that is cut in halves, at least; and its pT in GeV: halves of harder ones are all but straight."""

SHORTEST = 100.0
"""Transverse distance in mm from the first to the last hit of a half, at least: pixel hits measure no momentum."""

ETAS, RATIOS = (1.0, 1.5, 2.0, 2.5), np.linspace(0.0, 2.0, 101)
"""Edges of the bins of |eta|, nearer to 0 a field changes little along a track, and of the ratios of momenta."""

FEWEST, LARGEST = 100, 0.1
"""Tracks of a bin whose median counts, at least; it may differ by this from 1. Two events each of ACTS and of the
simulation have 0.03 at most in the field of their making (2 T, a solenoid, TrackML's), and 0.15 or more in some bin in
another of them."""


def ratios_of_halves(hits: TrackHits, track_id: IntArray) -> IntArray:
    """Tracks by |eta| and by the momentum of their outer half over that of their inner one, each over its charge.

    Args:
        hits: The hits, with positions, in the field in which the halves are fitted.
        track_id: Track of each hit, or -1 for none, [N].

    Returns:
        int64 [3, 100], bins of `ETAS` and `RATIOS`; ratios beyond count in the outermost.
    """
    rows = hits.outward(track_id)
    tracks, first, track, number = np.unique(track_id[rows], return_index=True, return_inverse=True, return_counts=True)
    half = np.full(len(hits), -1)
    half[rows] = 2 * track + (2 * (np.arange(len(rows)) - first[track]) >= number[track])
    half[rows[number[track] < LEAST_HITS]] = -1
    over_pt, eta = fit_perigees(hits, half, 2 * len(tracks), passes=1).momenta[:, :2].T
    with np.errstate(divide="ignore", invalid="ignore"):  # NaN without a fit
        ratio = np.clip(over_pt[::2] / over_pt[1::2], RATIOS[0], RATIOS[-1])
        good = (np.abs(over_pt[::2]) < 1 / SOFTEST) & (np.abs(over_pt[::2]) > 1 / HARDEST) & np.isfinite(ratio)
    middle = first + (number + 1) // 2
    ends = hits.table[rows[np.minimum([first, middle - 1, middle, first + number - 1], len(rows) - 1)]]
    across = np.hypot(ends["x"][1::2] - ends["x"][::2], ends["y"][1::2] - ends["y"][::2])
    good &= (across >= SHORTEST).all(axis=0)
    counts: IntArray = np.histogram2d(np.abs(eta[::2][good]), ratio[good], bins=(ETAS, RATIOS))[0].astype(np.int64)
    return counts


def field_warning(counts: Sequence[IntArray], field: str) -> list[str]:
    """That a field, named so, does not fit the tracks of events with these `ratios_of_halves`, where it does not."""
    odd = []
    for low, high, tracks in zip(ETAS, ETAS[1:], np.sum(counts, axis=0)):
        middle = int(np.searchsorted(np.cumsum(tracks), tracks.sum() / 2))
        median = float(RATIOS[middle : middle + 2].mean())
        if tracks.sum() >= FEWEST and abs(median - 1) > LARGEST:
            odd.append(f"{median:.2f} at |eta| {low:g} to {high:g} ({tracks.sum():,} tracks)")
    if not odd:
        return []
    return [
        f"WARNING: the field ({field}) looks wrong: the momentum of a track's outer half over that of its inner half, "
        f"1 in the right field, has a median of {', '.join(odd)}; name the field with prepare --field"
    ]
