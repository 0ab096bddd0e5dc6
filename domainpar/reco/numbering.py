"""Names of tracks, whoever found them, as numbers from 0."""

from __future__ import annotations

import numpy as np

from domainpar.events.graph import IntArray


def number_tracks(tracks: IntArray) -> IntArray:
    """Number tracks from 0, in the order of their first hits, int64 [N]; -1 stays.

    Args:
        tracks: Name of each hit's track, any number from 0, in the order that decides; -1 for none.
    """
    names, first, track = np.unique(tracks, return_index=True, return_inverse=True)
    number = np.full(len(names), -1, np.int64)
    order = np.argsort(first)
    order = order[names[order] >= 0]
    number[order] = np.arange(len(order))
    return number[track]
