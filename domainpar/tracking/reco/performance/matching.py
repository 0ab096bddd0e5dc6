"""Tracks matched to particles: in the three styles of the acorn framework, and by the majority of their hits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import yaml

from domainpar.common.models import Model
from domainpar.tracking.events.graph import BoolArray, FloatArray, IntArray
from domainpar.tracking.events.targets import passes

DEFAULT_TARGET: Mapping[str, Any] = {"pt": [1.0, float("inf")], "nhits": [5, float("inf")]}
"""Particles of at least 1 GeV that left enough hits for a track of at least 5."""


@dataclass(frozen=True)
class TrackCuts:
    """Which particles and tracks are counted. The defaults are those that acorn's users know.

    Attributes:
        min_hits: Only tracks of at least this many hits count, as reconstructed or as fake.
        fraction: Share of the hits of a track, or of a particle, that must agree. At 0.5 it must be more than half, so
            that no two particles match one track; any other share need only be reached. Between 0.5 and 1, taken to six
            digits and compared in integers.
        target: Conditions of `events.targets` on the particles one wants to find; empty: every particle. A target must
            also have at least one hit in the event.
        majority_pt: Smallest pT in GeV of the particles that the counts of gnn_tracking look at.

    Raises:
        ValueError: If a number is out of its range.
    """

    min_hits: int = 5
    fraction: float = 0.5
    target: Mapping[str, Any] = field(default_factory=lambda: dict(DEFAULT_TARGET))
    majority_pt: float = 1.0

    def __post_init__(self) -> None:
        if self.min_hits < 1:
            raise ValueError(f"min_hits is {self.min_hits}; a track has at least 1 hit.")
        if not 0.5 <= self.fraction <= 1:
            raise ValueError(
                f"fraction is {self.fraction}; the share of hits that must agree lies between 0.5 and 1: below it, "
                "several particles could match one track."
            )
        if not self.majority_pt >= 0:
            raise ValueError(f"majority_pt is {self.majority_pt}; a pT in GeV is not negative.")

    @property
    def target_without_pt(self) -> dict[str, Any]:
        """The conditions but that on pT: what is counted against pT, where a cut on it would hide the turn-on."""
        return {name: condition for name, condition in self.target.items() if name != "pt"}

    def in_range(self, pt: FloatArray) -> BoolArray:
        """Whether a target could have left each track, by the pT in GeV that was fitted to it; of those without a fit
        nothing speaks against it, bool [T].

        A finder of all momenta has tracks that no target left: their fakes are not to be held against those of one that
        looks for targets alone.
        """
        return np.isnan(pt) | passes(pt, self.target["pt"]) if "pt" in self.target else np.ones(len(pt), bool)

    @property
    def target_text(self) -> str:
        """The conditions as the command line takes them, in alphabetical order; empty for every particle."""
        written = yaml.safe_dump(dict(self.target), default_flow_style=True, width=float("inf"))
        return written.strip().removeprefix("{").removesuffix("}")

    def agree(self, shared: IntArray, hits: IntArray) -> BoolArray:
        """Whether `shared` is enough of `hits`, in exact integers."""
        # 0.7 as it is written, not the nearest float: 7 of 10 hits agree on any machine.
        share = Fraction(str(self.fraction)).limit_denominator(10**6)
        part, whole = shared * share.denominator, hits * share.numerator
        return np.asarray(part > whole if share == Fraction(1, 2) else part >= whole)


@dataclass(frozen=True, eq=False)
class Overlaps:
    """Tracks and particles with at least one hit, numbered by rows, and the pairs of them that share hits.

    Noise is no particle: it counts among the hits of a track, and in no pair. Hits on no track count among the hits of
    their particle, and in no pair. A hit on several tracks counts on each of them, and once for its particle.

    Attributes:
        particle_ids: Id of each particle, ascending, int64 [P].
        particle_hits: Hits of each particle in the event, int64 [P].
        track_hits: Hits of each track, int64 [T]; tracks in ascending order of their ids.
        particle_of_hit: Row of the particle of each hit, -1 for noise, int64 [N].
        member: Each hit once, then for each further track that it lies on once more, int64 [N + S].
        track_of_member: Row of the track of each of these, -1 for none, int64 [N + S].
        pair_of_member: Row of the pair of each, -1 on no track or of no particle, int64 [N + S].
        track: Row of the track of each pair, int64 [K]. Pairs ascend in (track, particle).
        particle: Row of the particle of each pair, int64 [K].
        shared: Hits they share, at least 1, int64 [K].
    """

    particle_ids: IntArray
    particle_hits: IntArray
    track_hits: IntArray
    particle_of_hit: IntArray
    member: IntArray
    track_of_member: IntArray
    pair_of_member: IntArray
    track: IntArray
    particle: IntArray
    shared: IntArray

    @property
    def num_tracks(self) -> int:
        return len(self.track_hits)

    @property
    def num_particles(self) -> int:
        return len(self.particle_hits)

    @property
    def hits_of_tracks(self) -> IntArray:
        """Hits of the track of each pair, int64 [K]."""
        return self.track_hits[self.track]

    @property
    def hits_of_particles(self) -> IntArray:
        """Hits of the particle of each pair, int64 [K]."""
        return self.particle_hits[self.particle]

    def best_pairs(self, owner: IntArray, *ties: IntArray) -> IntArray:
        """The pair of each track, or of each particle, that shares most hits; of equals the smallest of `ties`, then
        the first.

        Args:
            owner: `track` or `particle`.
            ties: A number for each pair, [K].
        """
        order = np.lexsort((*ties, -self.shared, owner))
        return order[np.diff(owner[order], prepend=-1) > 0]

    @property
    def unlabelled_hits(self) -> IntArray:
        """Hits of each track that belong to no particle, int64 [T]."""
        labelled = np.bincount(self.track, weights=self.shared, minlength=self.num_tracks)
        return self.track_hits - labelled.astype(np.int64)


def find_overlaps(track_id: IntArray, particle_id: IntArray, shared_hits: IntArray | None = None) -> Overlaps:
    """Count the hits that tracks and particles share.

    Args:
        track_id: Track of each hit, negative for none, [N].
        particle_id: Particle of each hit, 0 for noise, [N].
        shared_hits: Hits and the further tracks that they lie on, [S, 2]; None for none.
    """
    member, track_of_member = memberships(track_id, shared_hits)
    _, track_of_member, track_hits = _rows(track_of_member, track_of_member >= 0)
    particle_ids, particle_of_hit, particle_hits = _rows(particle_id, particle_id != 0)
    particle_of_member = particle_of_hit[member]
    # A pair as one number; an event of noise alone has no particles.
    pair = track_of_member * max(1, len(particle_ids)) + particle_of_member
    pairs, pair_of_member, shared = _rows(pair, (track_of_member >= 0) & (particle_of_member >= 0))
    track, particle = np.divmod(pairs, max(1, len(particle_ids)))
    return Overlaps(
        particle_ids=particle_ids,
        particle_hits=particle_hits,
        track_hits=track_hits,
        particle_of_hit=particle_of_hit,
        member=member,
        track_of_member=track_of_member,
        pair_of_member=pair_of_member,
        track=track,
        particle=particle,
        shared=shared,
    )


def memberships(track_id: IntArray, shared_hits: IntArray | None) -> tuple[IntArray, IntArray]:
    """Each hit and its track, then each that is shared and its further track, [N + S] each.

    Args:
        track_id: The first track of each hit, negative for none, [N].
        shared_hits: Hits and the further tracks that they lie on, [S, 2]; None for none.
    """
    hit = np.arange(len(track_id))
    if shared_hits is None:
        return hit, track_id
    return np.concatenate([hit, shared_hits[:, 0]]), np.concatenate([track_id, shared_hits[:, 1]])


def _rows(ids: IntArray, counted: BoolArray) -> tuple[IntArray, IntArray, IntArray]:
    """Distinct ids of the hits that count, the row of each hit among them (-1 for the others), and hits of each."""
    distinct, rows, hits = np.unique(ids[counted], return_inverse=True, return_counts=True)
    row_of_hit = np.full(len(ids), -1, np.int64)
    row_of_hit[counted] = rows
    return distinct, row_of_hit, hits


# --- three styles ----------------------------------------------------------------------------------------------------

STYLES = ("atlas", "one_way", "two_way")
"""With enough of a track's hits from one particle called pure, and enough of a particle's hits on one track complete:

    atlas     a track is matched, and the particle reconstructed, if the track is pure
    one_way   a track is matched if it is pure; a particle is reconstructed if it is complete
    two_way   a track is matched, and the particle reconstructed, if both hold
"""


class StyleCounts(Model, frozen=True):
    """Counts of one style. Only matchable tracks, those with enough hits, match or reconstruct anything.

    Attributes:
        targets: Target particles with at least one hit in the event.
        reconstructed: Targets that at least one track reconstructs.
        target_pairs: (track, target) pairs in which the track reconstructs the target.
        matchable: Tracks with enough hits.
        matched: Matchable tracks matched to any particle, target or not.
        particles: Particles, target or not, that at least one track reconstructs.
        pairs: (track, particle) pairs in which the track reconstructs the particle, target or not.
        in_range: Matchable tracks that a target could have left, by the pT fitted to them.
        fakes: Those of them that match no particle, and are not unlabelled.
        unlabelled: Those of them that match no particle and of whose hits enough have none: noise, or hits that truth
            does not know.
        lost: Targets that no track reconstructs, by the reason, one of `lost.REASONS`.
    """

    targets: int
    reconstructed: int
    target_pairs: int
    matchable: int
    matched: int
    particles: int
    pairs: int
    in_range: int
    fakes: int
    unlabelled: int
    lost: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Matching:
    """Tracks and particles matched in one style.

    Attributes:
        matched: Whether each track is matchable and matched, bool [T].
        fake: Whether each is matchable, and neither matched nor unlabelled, bool [T].
        unlabelled: Whether each is matchable, not matched, and enough of its hits have no particle, bool [T].
        times_reconstructed: Matchable tracks that reconstruct each particle, int64 [P].
    """

    matched: BoolArray
    fake: BoolArray
    unlabelled: BoolArray
    times_reconstructed: IntArray

    def count(
        self, matchable: BoolArray, in_range: BoolArray, target: BoolArray, lost: Mapping[str, BoolArray]
    ) -> StyleCounts:
        """The counts, given which tracks are matchable and which in the range of the targets, [T], and which particles
        are targets, and which are lost for each reason, [P]."""
        times, of_targets = self.times_reconstructed, self.times_reconstructed[target]
        return StyleCounts(
            targets=int(target.sum()),
            reconstructed=int(np.count_nonzero(of_targets)),
            target_pairs=int(of_targets.sum()),
            matchable=int(matchable.sum()),
            matched=int(self.matched.sum()),
            particles=int(np.count_nonzero(times)),
            pairs=int(times.sum()),
            in_range=int(np.sum(matchable & in_range)),
            fakes=int(np.sum(self.fake & in_range)),
            unlabelled=int(np.sum(self.unlabelled & in_range)),
            lost={reason: int(np.sum(target & particles)) for reason, particles in lost.items()},
        )


def match(overlaps: Overlaps, cuts: TrackCuts) -> dict[str, Matching]:
    """Match tracks to particles, in each of `STYLES`."""
    matchable, pure = overlaps.track_hits >= cuts.min_hits, pure_pairs(overlaps, cuts)
    complete = matchable[overlaps.track] & cuts.agree(overlaps.shared, overlaps.hits_of_particles)
    # Of as many hits of one particle, these tracks would be pure.
    unlabelled = cuts.agree(overlaps.unlabelled_hits, overlaps.track_hits)

    def matching(matches: BoolArray, reconstructs: BoolArray) -> Matching:
        matched = np.zeros(overlaps.num_tracks, bool)
        matched[overlaps.track[matches]] = True
        alone = matchable & ~matched
        times = np.bincount(overlaps.particle[reconstructs], minlength=overlaps.num_particles)
        return Matching(matched, alone & ~unlabelled, alone & unlabelled, times)

    return {
        "atlas": matching(pure, pure),
        "one_way": matching(pure, complete),
        "two_way": matching(pure & complete, pure & complete),
    }


def pure_pairs(overlaps: Overlaps, cuts: TrackCuts) -> BoolArray:
    """Whether the track of each pair is matchable, and enough of its hits are the particle's, bool [K]."""
    hits = overlaps.hits_of_tracks
    return np.asarray((hits >= cuts.min_hits) & cuts.agree(overlaps.shared, hits))


# --- majorities ------------------------------------------------------------------------------------------------------

MIN_CLUSTER_HITS = 3
MIN_LAYERS = 3
MAX_ABS_ETA = 4.0


class MajorityCounts(Model, frozen=True):
    """Counts of gnn_tracking's `tracking_metrics`; a track is a cluster there.

    The majority particle of a cluster is the one with most of its hits: of equals noise, then the smallest id.
    Particles of interest left hits on at least 3 surfaces, have |eta| < 4 and reach a pT; those whose pT or eta is
    unknown are none. Clusters count if they have at least 3 hits and their majority particle is of interest.

    Attributes:
        clusters: Clusters that count.
        particles: Particles of interest.
        perfect: Clusters with all hits of their majority particle, which has more than 99 % of theirs.
        double_majority: Clusters with more than half of the hits of their majority particle, which has more than half
            of theirs.
        lhc: Clusters of which their majority particle has more than 75 %.
    """

    clusters: int
    particles: int
    perfect: int
    double_majority: int
    lhc: int


def count_majorities(overlaps: Overlaps, of_interest: BoolArray) -> MajorityCounts:
    """Count clusters by what their majority particle has of them, given which particles are of interest, bool [P]."""
    # The pair of each track with the particle of most of its hits, then without those that noise has more of.
    pair = overlaps.best_pairs(overlaps.track)
    track, particle = overlaps.track[pair], overlaps.particle[pair]
    counted = overlaps.shared[pair] > overlaps.unlabelled_hits[track]
    counted &= overlaps.track_hits[track] >= MIN_CLUSTER_HITS
    pair = pair[counted & of_interest[particle]]
    # Shares are compared as products of integers: no rounding at 50, 75 and 99 %.
    shared, hits = overlaps.shared[pair], overlaps.hits_of_tracks[pair]
    of_particle = overlaps.hits_of_particles[pair]
    return MajorityCounts(
        clusters=len(pair),
        particles=int(of_interest.sum()),
        perfect=int(np.sum((shared == of_particle) & (100 * shared > 99 * hits))),
        double_majority=int(np.sum((2 * shared > hits) & (2 * shared > of_particle))),
        lhc=int(np.sum(4 * shared > 3 * hits)),
    )


def trackml_score(overlaps: Overlaps, weight: FloatArray) -> float | None:
    """The score of the TrackML challenge (arXiv:1904.06778): the share of the weight of hits on good tracks.

    A track is good if more than half of its hits belong to one particle, and more than half of the particle's hits to
    it; these hits count.

    Args:
        overlaps: The tracks and particles; here a hit lies on one track at most.
        weight: Weight of each hit, [N].

    Returns:
        A number between 0 and 1, independent of the order of hits; None if no hit has a weight.
    """
    # Rounded once at the end, so the order of hits does not matter.
    total = math.fsum(weight.tolist())
    if total == 0:
        return None
    twice = 2 * overlaps.shared
    good = (twice > overlaps.hits_of_tracks) & (twice > overlaps.hits_of_particles)
    # The row -1, of hits in no pair, is the one appended.
    return math.fsum(weight[np.append(good, False)[overlaps.pair_of_member]].tolist()) / total
