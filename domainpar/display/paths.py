"""The way of particles and of tracks through an event: their hits in the order in which they were made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from domainpar.display.event_data import EventData
from domainpar.events.graph import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Paths:
    """Hits in the order of some tracks or particles.

    Attributes:
        rows: Rows of the hits, path after path, int64 [n].
        ptr: Path p holds rows[ptr[p] : ptr[p + 1]], int64 [paths + 1]; a path may be empty.
    """

    rows: IntArray
    ptr: IntArray

    @property
    def sizes(self) -> IntArray:
        """Hits of each path, int64 [paths]."""
        return np.diff(self.ptr)


def paths_of(owner: IntArray, num_owners: int, distance: FloatArray) -> Paths:
    """The hits of each owner by increasing distance.

    Args:
        owner: Owner of each hit, in [0, num_owners), -1 for none, [N].
        num_owners: Owners, also those without hits.
        distance: What orders the hits of one owner, [N].
    """
    order = np.lexsort((distance, owner))
    rows = order[np.searchsorted(owner[order], 0) :]
    counts = np.bincount(owner[rows], minlength=num_owners)
    return Paths(rows, np.concatenate([[0], np.cumsum(counts)]))


def particle_paths(event: EventData) -> Paths:
    """The hits of each particle of the table, by distance from its production vertex (the origin where unknown)."""
    rows = event.particle_row
    if event.particles is None or event.position is None:
        return Paths(np.zeros(0, np.int64), np.zeros(1, np.int64))
    start = np.zeros((event.num_hits, 3))
    known = rows >= 0
    start[known] = np.nan_to_num(event.particles.vertex[rows[known]], nan=0.0)
    distance = np.linalg.norm(event.position - start, axis=1)
    return paths_of(rows, len(event.particles.particle_id), distance)


def track_paths(event: EventData, track_id: IntArray) -> Paths:
    """The hits of each track, by distance from the origin."""
    num_tracks = int(track_id.max(initial=-1)) + 1
    distance = np.zeros(event.num_hits) if event.position is None else np.linalg.norm(event.position, axis=1)
    return paths_of(track_id, num_tracks, distance)
