"""Which tracks and particles share hits. Everything else about the quality of tracks follows from these counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from domainpar.events.graph import IntArray


@dataclass(frozen=True, eq=False)
class Overlaps:
    """Tracks and particles with at least one hit, numbered by rows, and the pairs of them that share hits.

    Noise is no particle: it counts among the hits of a track, and in no pair. Hits on no track count among the hits of
    their particle, and in no pair.

    Attributes:
        particle_ids: Id of each particle, ascending, int64 [P].
        particle_hits: Hits of each particle in the event, int64 [P].
        track_hits: Hits of each track, int64 [T]; tracks in ascending order of their ids.
        particle_of_hit: Row of the particle of each hit, -1 for noise, int64 [N].
        track_of_hit: Row of the track of each hit, -1 for none, int64 [N].
        track: Row of the track of each pair, int64 [K]. Pairs ascend in (track, particle).
        particle: Row of the particle of each pair, int64 [K].
        shared: Hits they share, at least 1, int64 [K].
    """

    particle_ids: IntArray
    particle_hits: IntArray
    track_hits: IntArray
    particle_of_hit: IntArray
    track_of_hit: IntArray
    track: IntArray
    particle: IntArray
    shared: IntArray

    @property
    def num_tracks(self) -> int:
        return len(self.track_hits)

    @property
    def num_particles(self) -> int:
        return len(self.particle_hits)


def find_overlaps(track_id: IntArray, particle_id: IntArray) -> Overlaps:
    """Count the hits that tracks and particles share.

    Args:
        track_id: Track of each hit, negative for none, [N].
        particle_id: Particle of each hit, 0 for noise, [N].
    """
    _, track_of_hit, track_hits = _rows(track_id, track_id >= 0)
    particle_ids, particle_of_hit, particle_hits = _rows(particle_id, particle_id != 0)
    both = (track_of_hit >= 0) & (particle_of_hit >= 0)
    key = track_of_hit[both] * max(1, len(particle_ids)) + particle_of_hit[both]
    pairs, shared = np.unique(key, return_counts=True)
    track, particle = np.divmod(pairs, max(1, len(particle_ids)))
    return Overlaps(
        particle_ids, particle_hits, track_hits, particle_of_hit, track_of_hit, track, particle, shared
    )  # fmt: skip


def _rows(ids: IntArray, counted: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[IntArray, IntArray, IntArray]:
    """Distinct ids of the hits that count, the row of each hit among them (-1 for the others), and hits of each."""
    distinct, rows, hits = np.unique(ids[counted], return_inverse=True, return_counts=True)
    row_of_hit = np.full(len(ids), -1, np.int64)
    row_of_hit[counted] = rows
    return distinct, row_of_hit, hits
