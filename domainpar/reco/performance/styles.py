"""The three styles in which the acorn framework matches tracks to particles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from domainpar.events.graph import BoolArray, IntArray
from domainpar.reco.performance.cuts import TrackCuts
from domainpar.reco.performance.overlaps import Overlaps

STYLES = ("atlas", "one_way", "two_way")
"""With enough of a track's hits from one particle called pure, and enough of a particle's hits on one track complete:

    atlas     a track is matched, and the particle reconstructed, if the track is pure
    one_way   a track is matched if it is pure; a particle is reconstructed if it is complete
    two_way   a track is matched, and the particle reconstructed, if both hold
"""


@dataclass(frozen=True)
class StyleCounts:
    """Counts of one style. Only matchable tracks, those with enough hits, match or reconstruct anything.

    Attributes:
        targets: Target particles with at least one hit in the event.
        reconstructed: Targets that at least one track reconstructs.
        target_pairs: (track, target) pairs in which the track reconstructs the target.
        matchable: Tracks with enough hits.
        matched: Matchable tracks matched to any particle, target or not.
        particles: Particles, target or not, that at least one track reconstructs.
        pairs: (track, particle) pairs in which the track reconstructs the particle, target or not.
    """

    targets: int
    reconstructed: int
    target_pairs: int
    matchable: int
    matched: int
    particles: int
    pairs: int


@dataclass(frozen=True, eq=False)
class Matching:
    """Who found whom in one style.

    Attributes:
        matched: Whether each track is matchable and matched, bool [T].
        times_reconstructed: Matchable tracks that reconstruct each particle, int64 [P].
    """

    matched: BoolArray
    times_reconstructed: IntArray

    def count(self, matchable: BoolArray, target: BoolArray) -> StyleCounts:
        """The counts, given which tracks are matchable [T] and which particles are targets [P]."""
        times, of_targets = self.times_reconstructed, self.times_reconstructed[target]
        return StyleCounts(
            targets=int(target.sum()),
            reconstructed=int(np.count_nonzero(of_targets)),
            target_pairs=int(of_targets.sum()),
            matchable=int(matchable.sum()),
            matched=int(self.matched.sum()),
            particles=int(np.count_nonzero(times)),
            pairs=int(times.sum()),
        )


def match(overlaps: Overlaps, cuts: TrackCuts) -> dict[str, Matching]:
    """Match tracks to particles, in each of `STYLES`."""
    long_enough = matchable_tracks(overlaps, cuts)[overlaps.track]
    pure = long_enough & cuts.agree(overlaps.shared, overlaps.track_hits[overlaps.track])
    complete = long_enough & cuts.agree(overlaps.shared, overlaps.particle_hits[overlaps.particle])
    return {
        "atlas": _matching(overlaps, pure, pure),
        "one_way": _matching(overlaps, pure, complete),
        "two_way": _matching(overlaps, pure & complete, pure & complete),
    }


def matchable_tracks(overlaps: Overlaps, cuts: TrackCuts) -> BoolArray:
    """Whether each track has enough hits to count, bool [T]."""
    return np.asarray(overlaps.track_hits >= cuts.min_hits)


def _matching(overlaps: Overlaps, matches: BoolArray, reconstructs: BoolArray) -> Matching:
    matched = np.zeros(overlaps.num_tracks, bool)
    matched[overlaps.track[matches]] = True
    return Matching(matched, np.bincount(overlaps.particle[reconstructs], minlength=overlaps.num_particles))
