"""Which track of one event is whose: what the event display shows as found, missed and fake.

The rules are those of the efficiencies, so that the display shows what they count. In the `atlas` style a track with
more than half of its hits from one particle belongs to it, the particle is found, and a track that belongs to nobody is
a fake.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from domainpar.display.event_data import EventData
from domainpar.events.graph import IntArray
from domainpar.reco.performance.matching import Overlaps, TrackCuts, find_overlaps, match, matchable_tracks

OF_TARGET, OF_OTHER, DUPLICATE, FAKE_TRACK, SHORT = 0, 1, 2, 3, 4
"""Kinds of tracks: of a target, of another particle, of a particle that has a better one, of nobody, too short."""


@dataclass(frozen=True, eq=False)
class Matches:
    """Tracks (T) and particles of the table (M) of one event, matched.

    Attributes:
        size: Hits of each track, int64 [T].
        particle: Row of the particle that made most hits of each track, -1 for none, int64 [T].
        shared: How many hits that is, int64 [T].
        kind: One of `OF_TARGET`, `OF_OTHER`, `DUPLICATE`, `FAKE_TRACK`, `SHORT`, uint8 [T].
        best_track: The track that holds most hits of each particle, -1 where none holds any, int64 [M].
        best_shared: How many hits that is, int64 [M].
        wanted: Whether each particle is a target with hits in the event, bool [M].
        found: Whether a track belongs to each particle, bool [M].
    """

    size: IntArray
    particle: IntArray
    shared: IntArray
    kind: IntArray
    best_track: IntArray
    best_shared: IntArray
    wanted: npt.NDArray[np.bool_]
    found: npt.NDArray[np.bool_]


def match_tracks(event: EventData, track_id: IntArray, cuts: TrackCuts, style: str = "atlas") -> Matches | None:
    """Match the tracks of an event with its particles; None without a particle table.

    Args:
        event: The event.
        track_id: Track of each hit, numbered from 0, -1 for none, [N].
        cuts: Which tracks count, and how much must agree. Its targets are those of the event already.
        style: One of `styles.STYLES`.
    """
    if event.particles is None or event.target is None or event.particle_id is None:
        return None
    overlaps = find_overlaps(track_id, event.particle_id)
    matching = match(overlaps, cuts)[style]
    num_particles = len(event.particles.particle_id)
    table_row, row = _table_rows(event, overlaps)
    found, wanted = np.zeros(num_particles, bool), np.zeros(num_particles, bool)
    found[row] = matching.times_reconstructed[table_row] > 0
    wanted[row] = event.target[row]
    majority, shared = _most(overlaps.track, overlaps.particle, overlaps.shared, overlaps.num_tracks)
    best_track, best_shared = _most(overlaps.particle, overlaps.track, overlaps.shared, overlaps.num_particles)
    to_table = np.full(overlaps.num_particles + 1, -1, np.int64)
    to_table[table_row] = row
    of_target = np.append(event.target, False)[to_table[majority]]
    kind = _kinds(majority, shared, matching.matched, matchable_tracks(overlaps, cuts), of_target)
    best = (np.full(num_particles, -1, np.int64), np.zeros(num_particles, np.int64))
    best[0][row], best[1][row] = best_track[table_row], best_shared[table_row]
    return Matches(overlaps.track_hits, to_table[majority], shared, kind, *best, wanted, found)


def _table_rows(event: EventData, overlaps: Overlaps) -> tuple[IntArray, IntArray]:
    """Rows among the particles with hits and in the table, of those that are in both."""
    assert event.particles is not None, "asked for events with a table only"
    _, ours, theirs = np.intersect1d(overlaps.particle_ids, event.particles.particle_id, return_indices=True)
    return ours, theirs


def _most(owner: IntArray, other: IntArray, counts: IntArray, num_owners: int) -> tuple[IntArray, IntArray]:
    """Of each owner the other that it shares most with, and how much; -1 and 0 where it shares nothing."""
    order = np.lexsort((other, -counts, owner))
    owners, first = np.unique(owner[order], return_index=True)
    which, shared = np.full(num_owners, -1, np.int64), np.zeros(num_owners, np.int64)
    which[owners], shared[owners] = other[order][first], counts[order][first]
    return which, shared


def _kinds(
    majority: IntArray,
    shared: IntArray,
    matched: npt.NDArray[np.bool_],
    matchable: npt.NDArray[np.bool_],
    of_target: npt.NDArray[np.bool_],
) -> IntArray:
    kind = np.where(matchable, FAKE_TRACK, SHORT).astype(np.uint8)
    rows = np.flatnonzero(matched)
    kind[rows] = np.where(of_target[rows], OF_TARGET, OF_OTHER)
    # The track with most hits of a particle is the one; of equal ones the first.
    order = rows[np.lexsort((rows, -shared[rows], majority[rows]))]
    again = np.zeros(len(order), bool)
    again[1:] = majority[order][1:] == majority[order][:-1]
    kind[order[again]] = DUPLICATE
    return kind
