"""The distance of each hit from the track that the other hits of its track give."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.common.compiling import compiled
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.graph import IntArray
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.kalman import (
    MIN_FITTED_HITS,
    approach,
    begin,
    bend_at,
    forget,
    pass_material,
    residual,
    room,
    take,
)


def residuals(hits: TrackHits, track_id: IntArray, num_tracks: int, rows: IntArray | None = None) -> Any:
    """Distance of hits in mm from their tracks: across in the transverse plane, left is positive, and along z
    as seen across the flight.

    One filter comes from inside and one from outside; what both predict at a hit is weighted by their errors.

    Args:
        hits, track_id, num_tracks, rows: As of `TrackHits.by_track`.

    Returns:
        float64 [N, 2]; NaN on no track, and on one without a fit.

    Raises:
        ValueError: As `TrackHits.by_track`.
    """
    rows, ptr, places = hits.by_track(track_id, num_tracks, rows)
    sums = np.zeros((len(rows), 2, 2))
    _predict(rows, ptr, hits.table, hits.places, Field.of(hits.field), room(), sums)
    off: npt.NDArray[np.float64] = np.full((len(track_id), 2), np.nan)
    with np.errstate(invalid="ignore"):
        off[places] = sums[:, 0] / sums[:, 1]
    return off


@compiled
def _predict(rows: Any, ptr: Any, hits: Any, places: Any, field: Any, room: Any, sums: Any) -> None:
    """Add up what both filters predict at each hit, by weight, and the weights, in `sums` [n, 2, 2]."""
    state = room[0]
    for track in range(len(ptr) - 1):
        first, last = ptr[track], ptr[track + 1] - 1
        if last - first + 1 < MIN_FITTED_HITS:
            continue
        begin(state, hits[rows[first]], hits[rows[(first + last) // 2]], hits[rows[last]], field)
        for side in (1, -1):
            forget(state)
            for n in range(last - first + 1):
                i = first + n if side > 0 else last - n
                hit = hits[rows[i]]
                if n > 0 and hit.surface != hits[rows[i - side]].surface:
                    pass_material(state, places[hits[rows[i - side]].surface], side)
                approach(state, hit.x, hit.y, 1.0, field)
                _, _, across, up = residual(state, hit, bend_at(field, state))
                of_across, of_up = 1 / state.cov[0, 0], 1 / state.cov[3, 3]
                sums[i, 0, 0] += of_across * across
                sums[i, 1, 0] += of_across
                sums[i, 0, 1] += of_up * up / np.hypot(1.0, state.slope)
                sums[i, 1, 1] += of_up
                take(state, hit, field)
