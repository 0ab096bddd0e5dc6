"""The sums that all rates of tracks come from: counted in an event, added over events, written as JSON and read back.

All are integers but the TrackML score, of which every event keeps its own; so the order of events does not matter.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from domainpar.common.models import Model, read_as
from domainpar.tracking.config.texts import ConditionsOrAll
from domainpar.tracking.events import detector
from domainpar.tracking.events.graph import BoolArray, FloatArray, IntArray
from domainpar.tracking.events.truth_order import rows_of_table
from domainpar.tracking.reco.performance.layers import RESIDUALS, LayerCounts, count_layers
from domainpar.tracking.reco.performance.lost import REASONS, TrackEdges, reasons_of_losses
from domainpar.tracking.reco.performance.matching import (
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
    pure_pairs,
    trackml_score,
)
from domainpar.tracking.reco.performance.truth import (
    NUM_COLUMNS,
    EventTruth,
    cells,
    directions,
    production_vertices,
    true_perigees,
)
from partitioners import Sectors

TRUE_WEIGHTS, EQUAL_WEIGHTS, BOTH_WEIGHTS = "truth", "one per labelled hit", "truth in some events only"

EDGES: Mapping[str, tuple[float, ...]] = {
    "pt": (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0, 50.0),
    "eta": tuple(i / 2 for i in range(-8, 9)),
    "phi": tuple(i * math.pi / 8 for i in range(-8, 9)),
    "radius": (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 50.0, 100.0, 200.0, 400.0, 1000.0),
    "density": (0.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 80.0, 120.0, 200.0),
    "holes": (-0.5, 0.5, 1.5, 2.5, 3.5, 5.5),
    "d0": (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 300.0),
    "z0": (-500.0, -200.0, -150.0, -100.0, -75.0, *range(-50, 51, 10), 75.0, 100.0, 150.0, 200.0, 500.0),
    "vz": (-500.0, -200.0, -150.0, -100.0, -75.0, *range(-50, 51, 10), 75.0, 100.0, 150.0, 200.0, 500.0),
    "hits": (*(number + 0.5 for number in range(21)), 30.5, 60.5),
    "purity": tuple(i / 20 for i in range(21)),
    "completeness": tuple(i / 20 for i in range(21)),
    "border": (0.0, 0.01, 0.02, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0),
}
"""Borders of the bins: pT in GeV, eta, phi in rad, distance of the production vertex from the beam line in mm, hits
within 0.1 of eta and of phi, layers, |d0|, z0 and the production vertex's z in mm, hits, shares, Delta R. A bin holds
its lower border, the last one both."""

BINS_OF_LOST = ("pt", "eta")
"""Quantities in whose bins the reasons of losses are counted."""


class Binned(Model, frozen=True):
    """Counts of one style in bins of one quantity.

    What lies outside the outermost edges, or whose quantity is unknown, is in no bin: the totals count it.

    Attributes:
        edges: Borders of the bins, length B + 1.
        targets: Target particles by their true quantity, length B. Against pT the condition on pT is left out, so that
            the turn-on shows.
        reconstructed: Those of them that a track reconstructs.
        duplicated: Further tracks that reconstruct these particles, after the first.
        tracks: Matchable tracks in the range of the targets by the quantity of the helix fitted to them. Against pT
            those of any pT.
        fakes: Those of them that are fakes (`StyleCounts`).
        lost: Targets that no track reconstructs, by the reason (`StyleCounts`), length B each; in bins of
            `BINS_OF_LOST` alone.
    """

    edges: tuple[float, ...]
    targets: tuple[int, ...]
    reconstructed: tuple[int, ...]
    duplicated: tuple[int, ...]
    tracks: tuple[int, ...]
    fakes: tuple[int, ...]
    lost: Mapping[str, tuple[int, ...]]


class TrackCounts(Model, frozen=True):
    """Counts of the tracks of some events. `+` gives the counts of both sets of events together.

    Attributes:
        events: Number of events.
        hits: Their hits.
        tracks: Their tracks, of any length.
        hits_on_tracks: Hits on tracks.
        shared: Further tracks that these lie on, after the first, added up.
        unfitted: Matchable tracks without a fitted pT, for want of positions or of three hits apart, that are taken to
            be in the range of the targets.
        min_hits: Fewest hits of a matchable track (`TrackCuts`).
        fraction: Share of hits that had to agree (`TrackCuts`).
        target: Conditions on target particles, as the command line takes them; empty for every particle.
        majority_pt: Smallest pT in GeV of the particles of `majority`.
        border_sectors: Sectors whose borders distances are measured to, 8 or "8x2"; None: not measured.
        styles: Counts by style: `atlas`, `one_way`, `two_way`.
        majority: Counts of gnn_tracking.
        trackml_score: TrackML score of each event, None for one without weights; in the order of the sum.
        weights: Weights of hits in the score: `truth`, or `one per labelled hit` where the source gives no weights.
        binned: Counts by style and quantity, one of `EDGES`.
        residual_edges: Borders of the bins of distances in `layers`.
        layers: Hits of matched tracks by `volume.layer`.
    """

    events: int
    hits: int
    tracks: int
    hits_on_tracks: int
    shared: int
    unfitted: int
    min_hits: int
    fraction: float
    target: str
    majority_pt: float
    border_sectors: Sectors | None
    styles: Mapping[str, StyleCounts]
    majority: MajorityCounts
    trackml_score: tuple[float | None, ...]
    weights: str
    binned: Mapping[str, Mapping[str, Binned]]
    residual_edges: tuple[float, ...]
    layers: Mapping[str, LayerCounts]

    def __add__(self, other: TrackCounts) -> TrackCounts:
        """The counts of the events of both.

        Raises:
            ValueError: If they were made with different cuts, or binned differently.
        """
        for name in ("min_hits", "fraction", "target", "majority_pt", "border_sectors", "residual_edges"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                raise ValueError(f"counts with {name} {ours!r} and {theirs!r} have no sum; count all events alike.")
        added = "events", "hits", "tracks", "hits_on_tracks", "shared", "unfitted"
        kinds = "styles", "majority", "binned", "layers"
        return self.changed(
            **{name: _added(getattr(self, name), getattr(other, name)) for name in (*added, *kinds)},
            trackml_score=self.trackml_score + other.trackml_score,  # one after the other: a mean is taken at the end
            weights=self.weights if self.weights == other.weights else BOTH_WEIGHTS,
        )

    @property
    def cuts(self) -> TrackCuts:
        """Which particles and tracks were counted.

        Raises:
            ConfigError: If the target cannot be understood.
        """
        return TrackCuts(self.min_hits, self.fraction, ConditionsOrAll(self.target).value, self.majority_pt)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> TrackCounts:
        """Counts from a file.

        Raises:
            ValueError: If something is missing, or is there and unknown.
        """
        counts = read_as(cls, values)
        for style, binned in counts.binned.items():
            _check_names(f"by {style}", binned, EDGES)
            _check_names(f"lost, {style}", counts.styles[style].lost, REASONS)
        return counts


def total(counts: Iterable[TrackCounts]) -> TrackCounts:
    """The counts of all events together, given those of each. There is at least one.

    Raises:
        ValueError: If they were made with different cuts, or binned differently.
    """
    return functools.reduce(operator.add, counts)


def read_performance(tracks: Mapping[str, Any] | None) -> dict[str, dict[str, TrackCounts]]:
    """Counts by split and finder, of what `scores.json` says of tracks; none without.

    Raises:
        ValueError: If they were written by another version.
    """
    return {
        split: {finder: TrackCounts.read(counts) for finder, counts in by_finder.items()}
        for split, by_finder in ((tracks or {}).get("performance") or {}).items()
    }


def _added(ours: Any, theirs: Any) -> Any:
    """Two counts of one kind added: integers, histograms with the same bins, and what holds them by names, such as
    layers, which one of the two may lack."""
    if isinstance(ours, int):
        return ours + theirs
    if isinstance(ours, tuple):
        return tuple(map(operator.add, ours, theirs))
    if isinstance(ours, Mapping):
        both = {name: _added(counts, theirs[name]) for name, counts in ours.items() if name in theirs}
        return {**ours, **theirs, **both}
    if isinstance(ours, Binned) and ours.edges != theirs.edges:
        raise ValueError("counts in different bins have no sum; count all events with one version.")
    names = [name for name in ours.__struct_fields__ if name != "edges"]
    return ours.changed(**{name: _added(getattr(ours, name), getattr(theirs, name)) for name in names})


def _check_names(what: str, values: Iterable[str], known: Iterable[str]) -> None:
    if missing_or_unknown := set(values) ^ set(known):
        missing, unknown = sorted(missing_or_unknown & set(known)), sorted(missing_or_unknown - set(known))
        raise ValueError(
            f"counts of tracks ({what}): missing {', '.join(missing) or 'nothing'}, unknown "
            f"{', '.join(unknown) or 'nothing'}; they were written by another version. Infer again."
        )


# --- one event -------------------------------------------------------------------------------------------------------


def count_tracks(
    track_id: IntArray,
    truth: EventTruth,
    cuts: TrackCuts | None = None,
    shared_hits: IntArray | None = None,
    edges: TrackEdges | None = None,
) -> TrackCounts:
    """Count how well the tracks of one event agree with its particles.

    A shared hit counts on each of its tracks, but in the TrackML score, which knows one track a hit, on the first.

    Args:
        track_id: Track of each hit, -1 for none, [N]. Any numbers: relabelled tracks give the same counts.
        truth: The truth of these hits.
        cuts: Which particles and tracks count; by default `TrackCuts()`.
        shared_hits: Hits and the further tracks that they lie on, int64 [S, 2]; None for none.
        edges: What the tracks were built from, for the reasons why particles are lost; None for a finder without edges.

    Raises:
        ValueError: If there are not as many track ids as hits, an id is below -1, or the event lacks what its targets
            go by.
    """
    cuts = cuts or TrackCuts()
    track_id = np.asarray(track_id, np.int64)
    if track_id.shape != (len(truth),):
        raise ValueError(f"{track_id.shape} track ids for {len(truth)} hits; give one to each hit, -1 for no track.")
    if len(track_id) and track_id.min() < -1:
        raise ValueError(f"a track id is {track_id.min()}; tracks are numbered from 0, and -1 means no track.")
    overlaps = find_overlaps(track_id, truth.particle_id, shared_hits)
    of_first = overlaps if shared_hits is None else find_overlaps(track_id, truth.particle_id)
    matchable = overlaps.track_hits >= cuts.min_hits
    target, of_any_pt = (
        truth.targets_among(overlaps.particle_ids, conditions) for conditions in (cuts.target, cuts.target_without_pt)
    )
    pt, eta = (rows_of_table(truth.particles, overlaps.particle_ids, name) for name in ("pt", "eta"))
    helices = fitted(overlaps, truth)
    in_range = cuts.in_range(helices["pt"])
    bins_of_quantities = bin_all(overlaps, truth, pt, eta, helices)
    styles, binned = {}, {}
    reasons = reasons_of_losses(overlaps, truth, cuts, edges)
    for style, matching in match(overlaps, cuts).items():
        missed = matching.times_reconstructed == 0
        lost = {reason: missed & (reasons[style] == number) for number, reason in enumerate(REASONS)}
        styles[style] = matching.count(matchable, in_range, target, lost)
        binned[style] = {
            name: bins.count(
                matching,
                # A cut on pT would hide the turn-on.
                *((matchable, of_any_pt) if name == "pt" else (matchable & in_range, target)),
                lost if name in BINS_OF_LOST else {},
            )
            for name, bins in bins_of_quantities.items()
        }
    # NaN, for what is unknown, compares false: such a particle is not of interest.
    of_interest = (
        (_num_surfaces(overlaps, truth) >= MIN_LAYERS) & (np.abs(eta) < MAX_ABS_ETA) & (pt >= cuts.majority_pt)
    )
    weight = (truth.particle_id != 0).astype(np.float64) if truth.weight is None else truth.weight
    return TrackCounts(
        events=1,
        hits=len(truth),
        tracks=overlaps.num_tracks,
        hits_on_tracks=int(of_first.track_hits.sum()),
        shared=0 if shared_hits is None else len(shared_hits),
        unfitted=int(np.sum(matchable & np.isnan(helices["pt"]))) if "pt" in cuts.target else 0,
        min_hits=cuts.min_hits,
        fraction=cuts.fraction,
        target=cuts.target_text,
        majority_pt=cuts.majority_pt,
        border_sectors=truth.border_sectors,
        styles=styles,
        majority=count_majorities(overlaps, of_interest),
        trackml_score=(trackml_score(of_first, weight),),
        weights=EQUAL_WEIGHTS if truth.weight is None else TRUE_WEIGHTS,
        binned=binned,
        residual_edges=RESIDUALS,
        layers=count_layers(overlaps, truth, pure_pairs(overlaps, cuts) & target[overlaps.particle]),
    )


def _num_surfaces(overlaps: Overlaps, truth: EventTruth) -> IntArray:
    """Number of different surfaces with hits of each particle, int64 [P]."""
    surfaces, surface_of_hit = np.unique(truth.surface, return_inverse=True)
    counted = overlaps.particle_of_hit >= 0
    pairs = np.unique(overlaps.particle_of_hit[counted] * max(1, len(surfaces)) + surface_of_hit[counted])
    return np.bincount(pairs // max(1, len(surfaces)), minlength=overlaps.num_particles)


# --- bins ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Bins:
    """The bin of each particle and of each track in one quantity, -1 for none, int64 [P] and [T]."""

    edges: tuple[float, ...]
    particle: IntArray
    track: IntArray

    def count(self, matching: Matching, counted: BoolArray, target: BoolArray, lost: Mapping[str, BoolArray]) -> Binned:
        """The counts of one style, given which tracks are counted [T], which particles are targets, and which are lost
        for each reason [P]."""
        times = matching.times_reconstructed
        further = np.where(target, np.maximum(times - 1, 0), 0)
        return Binned(
            edges=self.edges,
            targets=self._histogram(self.particle[target]),
            reconstructed=self._histogram(self.particle[target & (times > 0)]),
            duplicated=self._histogram(np.repeat(self.particle, further)),
            tracks=self._histogram(self.track[counted]),
            fakes=self._histogram(self.track[counted & matching.fake]),
            lost={reason: self._histogram(self.particle[target & particles]) for reason, particles in lost.items()},
        )

    def _histogram(self, bins: IntArray) -> tuple[int, ...]:
        return tuple(np.bincount(bins[bins >= 0], minlength=len(self.edges) - 1).tolist())


def bins_of(values: FloatArray, edges: tuple[float, ...]) -> IntArray:
    """The bin of each value, -1 outside all of them and for NaN, int64."""
    values = np.asarray(values, np.float64)
    bins = np.searchsorted(edges, values, side="right") - 1
    # The last bin holds its upper border; NaN compares false and is in none.
    bins[values == edges[-1]] = len(edges) - 2
    bins[~((values >= edges[0]) & (values <= edges[-1]))] = -1
    return np.asarray(bins)


def fitted(overlaps: Overlaps, truth: EventTruth) -> dict[str, FloatArray]:
    """pt in GeV, eta, phi, |d0| and z0 in mm of the helix fitted to each track, float64 [T] each; NaN without a fit.

    A circle fits any hits alike, in whatever detector, and published rates go by it. By the filter's pT 2 % fewer
    tracks of `pretrained:quickstart` are in range.
    """
    if truth.position is None:
        return dict.fromkeys(("pt", "eta", "phi", "d0", "z0"), np.full(overlaps.num_tracks, np.nan))
    from domainpar.tracking.reco.helix import fit_helices  # its compiled code is loaded when tracks are fitted only

    pt, eta, phi, d0, z0 = fit_helices(truth.hits, overlaps.track_of_member, overlaps.num_tracks, overlaps.member).T
    return {"pt": np.abs(pt), "eta": eta, "phi": phi, "d0": np.abs(d0), "z0": z0}


def bin_all(
    overlaps: Overlaps, truth: EventTruth, pt: FloatArray, eta: FloatArray, helices: Mapping[str, FloatArray]
) -> dict[str, Bins]:
    """The bins of all particles and tracks, for each quantity of `EDGES`.

    Particles are binned by their true pT and eta, [P]; by the phi of their hit nearest to the production vertex, since
    few tables of particles hold a direction; by the distance of that vertex from the beam line and its z; by |d0| and
    z0 of their helix, where its direction is known. Tracks are binned by the helix fitted to their hits (`fitted`).
    Both are binned by their hits, by `_shares`, and by `_around`.
    """
    vertex = rows_of_table(truth.particles, overlaps.particle_ids, "vertex").T
    d0, z0 = true_perigees(truth, overlaps.particle_ids)[:, :2].T
    of_particles: dict[str, Any] = {
        "pt": pt,
        "eta": eta,
        "radius": np.hypot(*vertex[:2]),
        "d0": np.abs(d0),
        "z0": z0,
        "vz": vertex[2],
        "hits": overlaps.particle_hits,
        **_shares(overlaps, overlaps.particle, overlaps.num_particles),
    }
    of_tracks: dict[str, Any] = {
        **helices,
        "hits": overlaps.track_hits,
        **_shares(overlaps, overlaps.track, overlaps.num_tracks),
    }
    if truth.position is not None:
        density = _density(truth.position)
        hit = np.flatnonzero(overlaps.particle_of_hit >= 0)
        particle, position = overlaps.particle_of_hit[hit], truth.position[hit]
        away = np.linalg.norm(position - production_vertices(truth, overlaps.particle_ids)[particle], axis=1)
        of_particles |= _around(particle, hit, away, density, truth, overlaps.num_particles)
        phi_of_hit = directions(position)[1]
        order = np.lexsort((phi_of_hit, -away, particle))
        of_particles["phi"] = np.empty(overlaps.num_particles)
        of_particles["phi"][particle[order]] = phi_of_hit[order]  # of several, the last one stays: the nearest
        on = overlaps.track_of_member >= 0
        member, track = overlaps.member[on], overlaps.track_of_member[on]
        away = np.linalg.norm(truth.position[member], axis=1)
        of_tracks |= _around(track, member, away, density, truth, overlaps.num_tracks)
    unknown_particles, unknown_tracks = np.full(overlaps.num_particles, np.nan), np.full(overlaps.num_tracks, np.nan)
    return {
        name: Bins(
            edges,
            bins_of(of_particles.get(name, unknown_particles), edges),
            bins_of(of_tracks.get(name, unknown_tracks), edges),
        )
        for name, edges in EDGES.items()
    }


def _shares(overlaps: Overlaps, owner: IntArray, count: int) -> dict[str, FloatArray]:
    """Purity and completeness of the best pair of each track, or of each particle; of several of that with the fewest
    other hits; 0 without a pair. Arguments as of `Overlaps.best_pairs`, and the number of owners."""
    hits = {"purity": overlaps.hits_of_tracks, "completeness": overlaps.hits_of_particles}
    pair = overlaps.best_pairs(owner, hits["purity"] + hits["completeness"])
    shared = {name: overlaps.shared[pair] / of[pair] for name, of in hits.items()}
    return {name: np.asarray(np.bincount(owner[pair], part, count), np.float64) for name, part in shared.items()}


def _density(position: FloatArray) -> FloatArray:
    """Hits in the same cell of eta and phi as each hit, itself counted, as seen from the origin, float64 [N]."""
    row, column = cells(*directions(position))
    _, cell, hits = np.unique(row * NUM_COLUMNS + column, return_inverse=True, return_counts=True)
    return np.asarray(hits[cell], np.float64)


def _around(
    row: IntArray, hit: IntArray, away: FloatArray, density: FloatArray, truth: EventTruth, count: int
) -> dict[str, FloatArray]:
    """What is around the hits of each track, or of each particle, float64 [count].

    `density`: mean over its hits. `holes`: layers that it crosses between two of its hits without a hit; NaN where
    layers are unknown. `border`: the smallest distance of a hit from a border, if that was measured.

    Args:
        row: Track or particle of each of its hits, int64 [n].
        hit: These hits, int64 [n].
        away: Distance in mm from where it begins, by which its hits follow each other, [n].
        density: Density at each hit of the event, [N].
        truth: The truth of the event, with positions.
        count: Number of tracks or particles.
    """
    assert truth.position is not None
    order = np.lexsort((truth.surface[hit], away, row))
    along, surface = row[order], truth.surface[hit[order]]
    follows = np.append(False, along[1:] == along[:-1])[: len(along)]
    holes = np.zeros(count)
    np.add.at(holes, along, detector.layers_passed(surface, truth.position[hit[order]], follows))
    holes[along[~np.isin(surface, detector.known_surfaces())]] = np.nan
    density = np.bincount(row, density[hit], count) / np.bincount(row, minlength=count)
    values: dict[str, FloatArray] = {"density": density, "holes": holes}
    if truth.border is not None:
        values["border"] = np.full(count, np.inf)
        np.minimum.at(values["border"], row, truth.border[hit].astype(np.float64))
    return values
