"""Tracks of a network followed through the hits of the whole detector, as those that begin with seeds are.

A network names three hits of a particle for certain sooner than all of them, and hits that no candidate edge joins it
never sees. The filter that follows a track looks at every hit near its helix, and says which of two tracks a hit suits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from domainpar.tracking.events.field import Field
from domainpar.tracking.events.graph import IntArray
from domainpar.tracking.reco.ckf.candidates import follow_seeds
from domainpar.tracking.reco.ckf.finder import MAX_SHARED, WAYS, resolve, scene_of
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.kalman import room
from domainpar.tracking.reco.segments import number_tracks

MIN_SURFACES, MAX_HOLES = 3, 2
"""Fewest surfaces, and most holes, of a track that a network began; it is more certain than a seed."""


def extend_tracks(track_id: IntArray, hits: TrackHits, min_hits: int) -> IntArray:
    """Follow each track from its innermost, middle and outermost hits on three surfaces, outward and back.

    Of the candidates that share hits the better ones keep them. A track as it was is the last of them: it stays where
    it leads to none, or to a bad one.

    Args:
        track_id: Track of each hit, -1 for none, int64 [N].
        hits: The hits of an event.
        min_hits: What has fewer is no track.

    Returns:
        Track of each hit, int64 [N]: 0, 1, ... by their first hit, or -1 for none. Neither the names of tracks nor the
        order of hits matter.

    Raises:
        ValueError: If the hits have no positions, or one lies on none of the surfaces.
    """
    table, ptr, rows_of_caller = hits.by_surface()
    begun = track_id[rows_of_caller]
    track_of = np.full(len(table), -1, np.int64)
    scene = scene_of(table, ptr, track_of < 0, Field.of(hits.field), hits.surfaces)
    # Each of them: what an inner seed with a false hit leads to holds the outer seeds, too, and they find the true one.
    ways = room((2, WAYS + 1))
    starts, rows, quality = follow_seeds(_seeds(begun, table), scene, min_hits, MIN_SURFACES, MAX_HOLES, ways, True)
    # The tracks as they were come after these, but before those that suit their hits so badly that none has more.
    kept = np.argsort(begun, kind="stable")
    kept = kept[begun[kept] >= 0]
    kept_starts = np.append(np.flatnonzero(np.diff(begun[kept], prepend=-1)), len(kept))
    quality = np.append(quality, np.zeros(len(kept_starts) - 1))
    starts, rows = np.append(starts[:-1], starts[-1] + kept_starts), np.append(rows, kept)
    resolve(starts, rows, np.argsort(-quality, kind="stable"), track_of, 0, MAX_SHARED, min_hits)
    followed = np.empty_like(track_of)
    followed[rows_of_caller] = track_of
    return number_tracks(followed)


def _seeds(track_id: IntArray, table: npt.NDArray[np.void]) -> IntArray:
    """Three hits on neighbouring surfaces of each track, at both its ends and in its middle, int64 [S, 3]."""
    outward = np.lexsort((table["r"] ** 2 + table["z"] ** 2, track_id))
    outward = outward[track_id[outward] >= 0]
    # One hit a surface, the innermost: those of overlapping modules lie too near to tell a direction.
    met = np.stack([track_id[outward], table["surface"][outward]])
    single = outward[np.sort(np.unique(met, axis=1, return_index=True)[1])]
    first = np.flatnonzero(np.diff(track_id[single], prepend=-1))
    counts = np.diff(np.append(first, len(single)))
    first, counts = first[counts >= 3], counts[counts >= 3]
    places = np.concatenate([first, first + counts - 3, first + (counts - 3) // 2])
    # In the order of the table, which the caller's does not touch.
    return np.unique(single[places[:, None] + np.arange(3)], axis=0)
