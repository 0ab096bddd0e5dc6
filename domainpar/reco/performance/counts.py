"""The sums that all rates of tracks come from: counted in an event, added over events, written as JSON and read back.

All are integers but the TrackML score, of which every event keeps its own; so the order of events does not matter.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from domainpar.events.graph import FloatArray, IntArray
from domainpar.reco.performance.binned import Binned, bin_all
from domainpar.reco.performance.matching import (
    MAX_ABS_ETA,
    MIN_LAYERS,
    MajorityCounts,
    Matching,
    Overlaps,
    StyleCounts,
    TrackCuts,
    count_majorities,
    find_overlaps,
    match,
    matchable_tracks,
    trackml_score,
)
from domainpar.reco.performance.truth import EventTruth, rows_of_table, targets_among

TRUE_WEIGHTS, EQUAL_WEIGHTS, BOTH_WEIGHTS = "truth", "one per labelled hit", "truth in some events only"

_CONDITIONS = ("min_hits", "fraction", "target", "majority_pt", "border_sectors")
_SUMS = ("events", "hits", "tracks", "hits_on_tracks", "trackml_score")


@dataclass(frozen=True)
class TrackCounts:
    """Counts of the tracks of some events. `+` gives the counts of both sets of events together.

    Attributes:
        events: Number of events.
        hits: Their hits.
        tracks: Their tracks, of any length.
        hits_on_tracks: Hits on tracks.
        min_hits: Fewest hits of a matchable track (`TrackCuts`).
        fraction: Share of hits that had to agree (`TrackCuts`).
        target: Conditions on target particles, as the command line takes them; empty for every particle.
        majority_pt: Smallest pT in GeV of the particles of `majority`.
        border_sectors: Number of sectors whose borders distances are measured to; None: not measured.
        styles: Counts by style: `atlas`, `one_way`, `two_way`.
        majority: Counts of gnn_tracking.
        trackml_score: TrackML score of each event, None for one without weights; in the order of the sum.
        weights: Weights of hits in the score: `truth`, or `one per labelled hit` where the source gives no weights.
        binned: Counts by style and quantity: `pt`, `eta`, `phi`, `border`.
    """

    events: int
    hits: int
    tracks: int
    hits_on_tracks: int
    min_hits: int
    fraction: float
    target: str
    majority_pt: float
    border_sectors: int | None
    styles: Mapping[str, StyleCounts]
    majority: MajorityCounts
    trackml_score: tuple[float | None, ...]
    weights: str
    binned: Mapping[str, Mapping[str, Binned]]

    def __add__(self, other: TrackCounts) -> TrackCounts:
        """The counts of the events of both.

        Raises:
            ValueError: If they were made with different cuts, or binned differently.
        """
        for name in _CONDITIONS:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                raise ValueError(f"counts with {name} {ours!r} and {theirs!r} have no sum; count all events alike.")
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMS}
        parts = {name: _added(getattr(self, name), getattr(other, name)) for name in ("styles", "majority", "binned")}
        return replace(self, weights=self.weights if self.weights == other.weights else BOTH_WEIGHTS, **sums, **parts)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        values: dict[str, Any] = _lists(asdict(self))
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrackCounts:
        """Counts from the values of `to_json`.

        Raises:
            ValueError: If something is missing, or is there and unknown.
        """
        values = _checked(cls, values)
        values["styles"] = {
            name: StyleCounts(**_checked(StyleCounts, style)) for name, style in values["styles"].items()
        }
        values["majority"] = MajorityCounts(**_checked(MajorityCounts, values["majority"]))
        values["trackml_score"] = tuple(values["trackml_score"])
        values["binned"] = {
            style: {name: _binned(binned) for name, binned in quantities.items()}
            for style, quantities in values["binned"].items()
        }
        return cls(**values)


def total(counts: Iterable[TrackCounts]) -> TrackCounts:
    """The counts of all events together, given those of each. There is at least one.

    Raises:
        ValueError: If they were made with different cuts, or binned differently.
    """
    return functools.reduce(operator.add, counts)


def _added(ours: Any, theirs: Any) -> Any:
    """Two counts of one kind added: integers, what holds them by name, and histograms with the same bins."""
    if isinstance(ours, int):
        return ours + theirs
    if isinstance(ours, tuple):
        return tuple(map(operator.add, ours, theirs))
    if isinstance(ours, Mapping):
        return {name: _added(counts, theirs[name]) for name, counts in ours.items()}
    if isinstance(ours, Binned) and ours.edges != theirs.edges:
        raise ValueError("counts in different bins have no sum; count all events with one version.")
    names = [each.name for each in fields(ours) if each.name != "edges"]
    return replace(ours, **{name: _added(getattr(ours, name), getattr(theirs, name)) for name in names})


def _binned(values: Mapping[str, Any]) -> Binned:
    return Binned(**{name: tuple(values) for name, values in _checked(Binned, values).items()})


def _checked(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, if there is one for each field of a dataclass and no other."""
    wanted = {each.name for each in fields(kind)}
    if set(values) != wanted:
        missing, unknown = sorted(wanted - set(values)), sorted(set(values) - wanted)
        raise ValueError(
            f"counts of tracks ({kind.__name__}): missing {', '.join(missing) or 'nothing'}, unknown "
            f"{', '.join(unknown) or 'nothing'}; they were written by another version. Infer again."
        )
    return dict(values)


def _lists(value: Any) -> Any:
    """The same with lists for tuples: JSON knows no tuples, and both are to compare equal."""
    if isinstance(value, Mapping):
        return {name: _lists(part) for name, part in value.items()}
    return [_lists(part) for part in value] if isinstance(value, tuple | list) else value


# --- one event -------------------------------------------------------------------------------------------------------


def count_tracks(track_id: IntArray, truth: EventTruth, cuts: TrackCuts | None = None) -> TrackCounts:
    """Count how well the tracks of one event agree with its particles.

    Args:
        track_id: Track of each hit, -1 for none, [N]. Any numbers: relabelled tracks give the same counts.
        truth: The truth of these hits.
        cuts: Which particles and tracks count; by default `TrackCuts()`.

    Raises:
        ValueError: If there are not as many track ids as hits, an id is below -1, or the event cannot tell its targets.
    """
    cuts = cuts or TrackCuts()
    overlaps = find_overlaps(_checked_ids(track_id, truth), truth.particle_id)
    matchings = match(overlaps, cuts)
    matchable = matchable_tracks(overlaps, cuts)
    target = targets_among(overlaps.particle_ids, truth.particles, cuts.target)
    pt, eta = (rows_of_table(truth.particles, overlaps.particle_ids, name) for name in ("pt", "eta"))
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
        binned=_count_bins(overlaps, truth, cuts, matchings, pt, eta),
    )


def _checked_ids(track_id: IntArray, truth: EventTruth) -> IntArray:
    track_id = np.asarray(track_id, np.int64)
    if track_id.shape != (len(truth),):
        raise ValueError(f"{track_id.shape} track ids for {len(truth)} hits; give one to each hit, -1 for no track.")
    if len(track_id) and track_id.min() < -1:
        raise ValueError(f"a track id is {track_id.min()}; tracks are numbered from 0, and -1 means no track.")
    return track_id


def _count_bins(
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
