"""Tracks and particles of one event, matched: the found, missed and fake ones of the event display.

The rules are those of the efficiencies, so that the display shows what they count. In the `atlas` style a track with
more than half of its hits from one particle belongs to it, the particle is found, and a track of no particle is a fake.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from domainpar.display.event_data import EventData
from domainpar.events.graph import IntArray
from domainpar.reco.performance.matching import TrackCuts, find_overlaps, match, matchable_tracks

OF_TARGET, OF_OTHER, DUPLICATE, FAKE_TRACK, SHORT = 0, 1, 2, 3, 4
"""Kinds of tracks: of a target, of another particle, of a particle that has a better one, of none, too short."""


@dataclass(frozen=True, eq=False)
class Matches:
    """Tracks (T) and particles of the table (M) of one event, matched.

    Attributes:
        particle: Row of the particle that made most hits of each track, -1 for none, int64 [T].
        shared: The number of these hits, int64 [T].
        kind: One of `OF_TARGET`, `OF_OTHER`, `DUPLICATE`, `FAKE_TRACK`, `SHORT`, uint8 [T].
        best_track: The track that holds most hits of each particle, -1 where none holds any, int64 [M].
        best_shared: The number of these hits, int64 [M].
        target: Whether each particle is a target with hits in the event, bool [M].
        found: Whether a track belongs to each particle, bool [M].
    """

    particle: IntArray
    shared: IntArray
    kind: IntArray
    best_track: IntArray
    best_shared: IntArray
    target: npt.NDArray[np.bool_]
    found: npt.NDArray[np.bool_]


def match_tracks(event: EventData, track_id: IntArray, cuts: TrackCuts, style: str = "atlas") -> Matches | None:
    """Match the tracks of an event with its particles; None without a particle table.

    Args:
        event: The event.
        track_id: Track of each hit, numbered from 0, -1 for none, [N].
        cuts: Conditions on the tracks that count, and on the share of hits. Its targets are those of the event already.
        style: One of `styles.STYLES`.
    """
    if event.particles is None or event.target is None or event.particle_id is None:
        return None
    overlaps = find_overlaps(track_id, event.particle_id)
    matching = match(overlaps, cuts)[style]
    num_particles = len(event.particles.particle_id)
    # Particles with hits that are in the table: their rows among the overlaps and in the table.
    _, here, row = np.intersect1d(overlaps.particle_ids, event.particles.particle_id, return_indices=True)
    found, target = np.zeros(num_particles, bool), np.zeros(num_particles, bool)
    found[row] = matching.times_reconstructed[here] > 0
    target[row] = event.target[row]
    majority, shared = _most(overlaps.track, overlaps.particle, overlaps.shared, overlaps.num_tracks)
    tracks, counts = _most(overlaps.particle, overlaps.track, overlaps.shared, overlaps.num_particles)
    best_track, best_shared = np.full(num_particles, -1, np.int64), np.zeros(num_particles, np.int64)
    best_track[row], best_shared[row] = tracks[here], counts[here]
    to_table = np.full(overlaps.num_particles + 1, -1, np.int64)
    to_table[here] = row
    of_target = np.append(event.target, False)[to_table[majority]]
    kind = np.where(matchable_tracks(overlaps, cuts), FAKE_TRACK, SHORT).astype(np.uint8)
    matched = np.flatnonzero(matching.matched)
    kind[matched] = np.where(of_target[matched], OF_TARGET, OF_OTHER)
    # Of the tracks of a particle the one with most hits counts; of equal ones the first.
    order = matched[np.lexsort((matched, -shared[matched], majority[matched]))]
    kind[order[1:][majority[order][1:] == majority[order][:-1]]] = DUPLICATE
    return Matches(
        particle=to_table[majority],
        shared=shared,
        kind=kind,
        best_track=best_track,
        best_shared=best_shared,
        target=target,
        found=found,
    )


def _most(owner: IntArray, other: IntArray, counts: IntArray, num_owners: int) -> tuple[IntArray, IntArray]:
    """Of each owner the other that it shares most with, and the number; -1 and 0 where it shares nothing."""
    order = np.lexsort((other, -counts, owner))
    owners, first = np.unique(owner[order], return_index=True)
    which, shared = np.full(num_owners, -1, np.int64), np.zeros(num_owners, np.int64)
    which[owners], shared[owners] = other[order][first], counts[order][first]
    return which, shared
