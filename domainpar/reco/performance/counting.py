"""From the tracks and the truth of one event to its counts."""

from __future__ import annotations

import numpy as np

from domainpar.events.graph import FloatArray, IntArray
from domainpar.reco.performance.binned import Binned, bin_all
from domainpar.reco.performance.counts import EQUAL_WEIGHTS, TRUE_WEIGHTS, TrackCounts
from domainpar.reco.performance.cuts import TrackCuts
from domainpar.reco.performance.majority import MAX_ABS_ETA, MIN_LAYERS, count_majorities, trackml_score
from domainpar.reco.performance.overlaps import Overlaps, find_overlaps
from domainpar.reco.performance.styles import Matching, match, matchable_tracks
from domainpar.reco.performance.truth import EventTruth, rows_of_table, targets_among


def count_tracks(track_id: IntArray, truth: EventTruth, cuts: TrackCuts | None = None) -> TrackCounts:
    """Count how well the tracks of one event agree with its particles.

    Args:
        track_id: Track of each hit, -1 for none, [N]. Any numbers: relabelled tracks give the same counts.
        truth: What is true of these hits.
        cuts: What to count; by default `TrackCuts()`.

    Raises:
        ValueError: If there are not as many track ids as hits, an id is below -1, or the event cannot tell its targets.
    """
    cuts = cuts or TrackCuts()
    overlaps = find_overlaps(_checked(track_id, truth), truth.particle_id)
    matchings = match(overlaps, cuts)
    matchable = matchable_tracks(overlaps, cuts)
    target = targets_among(overlaps.particle_ids, truth.particles, cuts.target)
    pt, eta = (rows_of_table(truth, overlaps.particle_ids, name) for name in ("pt", "eta"))
    of_interest = (_num_surfaces(overlaps, truth) >= MIN_LAYERS) & (np.abs(eta) < MAX_ABS_ETA)
    of_interest &= pt >= cuts.majority_pt
    return TrackCounts(
        events=1,
        hits=len(truth),
        tracks=overlaps.num_tracks,
        hits_on_tracks=int(overlaps.track_hits.sum()),
        min_hits=cuts.min_hits,
        fraction=cuts.fraction,
        target=cuts.target_text,
        majority_pt=cuts.majority_pt,
        border_sectors=truth.border_sectors,
        styles={style: matching.count(matchable, target) for style, matching in matchings.items()},
        majority=count_majorities(overlaps, of_interest),
        trackml_score=(trackml_score(overlaps, _weight(truth)),),
        weights=EQUAL_WEIGHTS if truth.weight is None else TRUE_WEIGHTS,
        binned=_binned(overlaps, truth, cuts, matchings, pt, eta),
    )


def _checked(track_id: IntArray, truth: EventTruth) -> IntArray:
    track_id = np.asarray(track_id, np.int64)
    if track_id.shape != (len(truth),):
        raise ValueError(f"{track_id.shape} track ids for {len(truth)} hits; give one to each hit, -1 for no track.")
    if len(track_id) and track_id.min() < -1:
        raise ValueError(f"a track id is {track_id.min()}; tracks are numbered from 0, and -1 means no track.")
    return track_id


def _binned(
    overlaps: Overlaps,
    truth: EventTruth,
    cuts: TrackCuts,
    matchings: dict[str, Matching],
    pt: FloatArray,
    eta: FloatArray,
) -> dict[str, dict[str, Binned]]:
    matchable = matchable_tracks(overlaps, cuts)
    target = targets_among(overlaps.particle_ids, truth.particles, cuts.target)
    of_any_pt = targets_among(overlaps.particle_ids, truth.particles, cuts.target_without_pt)
    bins = bin_all(overlaps, truth, pt, eta)
    return {
        style: {
            name: each.count(matching, matchable, of_any_pt if name == "pt" else target) for name, each in bins.items()
        }
        for style, matching in matchings.items()
    }


def _num_surfaces(overlaps: Overlaps, truth: EventTruth) -> IntArray:
    """Number of different surfaces with hits of each particle, int64 [P]."""
    surfaces, surface_of_hit = np.unique(truth.surface, return_inverse=True)
    counted = overlaps.particle_of_hit >= 0
    pairs = np.unique(overlaps.particle_of_hit[counted] * max(1, len(surfaces)) + surface_of_hit[counted])
    return np.bincount(pairs // max(1, len(surfaces)), minlength=overlaps.num_particles)


def _weight(truth: EventTruth) -> FloatArray:
    return (truth.particle_id != 0).astype(np.float64) if truth.weight is None else truth.weight
