"""What gnn_tracking and the TrackML challenge count: each track stands for the particle most of its hits belong to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from domainpar.events.graph import BoolArray, FloatArray
from domainpar.reco.performance.overlaps import Overlaps

MIN_CLUSTER_HITS = 3
MIN_LAYERS = 3
MAX_ABS_ETA = 4.0


@dataclass(frozen=True)
class MajorityCounts:
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
    pair = _majority_pairs(overlaps)
    hits = overlaps.track_hits[overlaps.track[pair]]
    pair = pair[(hits >= MIN_CLUSTER_HITS) & of_interest[overlaps.particle[pair]]]
    shared = overlaps.shared[pair]
    hits = overlaps.track_hits[overlaps.track[pair]]
    of_particle = overlaps.particle_hits[overlaps.particle[pair]]
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
        overlaps: The tracks and particles.
        weight: Weight of each hit, [N].

    Returns:
        A number between 0 and 1, independent of the order of hits; None if no hit has a weight.
    """
    total = math.fsum(weight.tolist())
    if total == 0:
        return None
    good = (2 * overlaps.shared > overlaps.track_hits[overlaps.track]) & (
        2 * overlaps.shared > overlaps.particle_hits[overlaps.particle]
    )
    # One more row: that of hits on no track, which have no good particle.
    particle_of_track = np.full(overlaps.num_tracks + 1, -2)
    particle_of_track[overlaps.track[good]] = overlaps.particle[good]
    counted = particle_of_track[overlaps.track_of_hit] == overlaps.particle_of_hit
    return math.fsum(weight[counted].tolist()) / total


def _majority_pairs(overlaps: Overlaps) -> npt.NDArray[np.int64]:
    """The pair of each track with its majority particle; none for a track with noise in the majority."""
    order = np.lexsort((overlaps.particle, -overlaps.shared, overlaps.track))
    first = np.ones(len(order), bool)
    first[1:] = np.diff(overlaps.track[order]) > 0
    pairs = order[first]
    labelled = np.bincount(overlaps.track, weights=overlaps.shared, minlength=overlaps.num_tracks)
    noise = overlaps.track_hits - labelled.astype(np.int64)
    return np.asarray(pairs[overlaps.shared[pairs] > noise[overlaps.track[pairs]]])
