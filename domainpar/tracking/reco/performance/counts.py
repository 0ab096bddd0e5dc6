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
    matchable_tracks,
    trackml_score,
)
from domainpar.tracking.reco.performance.truth import EventTruth, directions, production_vertices, true_perigees
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
        ValueError: If there are not as many track ids as hits, an id is below -1, or the event cannot tell its targets.
    """
    cuts = cuts or TrackCuts()
    track_id = np.asarray(track_id, np.int64)
    if track_id.shape != (len(truth),):
        raise ValueError(f"{track_id.shape} track ids for {len(truth)} hits; give one to each hit, -1 for no track.")
    if len(track_id) and track_id.min() < -1:
        raise ValueError(f"a track id is {track_id.min()}; tracks are numbered from 0, and -1 means no track.")
    overlaps = find_overlaps(track_id, truth.particle_id, shared_hits)
    of_first = overlaps if shared_hits is None else find_overlaps(track_id, truth.particle_id)
    matchable = matchable_tracks(overlaps, cuts)
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
    pure = matchable[overlaps.track] & cuts.agree(overlaps.shared, overlaps.track_hits[overlaps.track])
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
        layers=count_layers(overlaps, truth, pure & target[overlaps.particle]),
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
    """pt in GeV, eta, phi, |d0| and z0 in mm of the helix fitted to each track, float64 [T] each; NaN without a fit."""
    if truth.position is None:
        return dict.fromkeys(("pt", "eta", "phi", "d0", "z0"), np.full(overlaps.num_tracks, np.nan))
    from domainpar.tracking.reco.helix import fit_helices  # its compiled code is loaded when tracks are fitted only

    of_members = truth.position[overlaps.member]
    helices = fit_helices(of_members, overlaps.track_of_member, overlaps.num_tracks, truth.field)
    return {
        "pt": helices.pt, "eta": helices.eta, "phi": helices.phi, "d0": np.abs(helices.d0), "z0": helices.z0,
    }  # fmt: skip


def bin_all(
    overlaps: Overlaps, truth: EventTruth, pt: FloatArray, eta: FloatArray, helices: Mapping[str, FloatArray]
) -> dict[str, Bins]:
    """The bins of all particles and tracks, for each quantity of `EDGES`.

    Particles are binned by their true pT and eta, given here, [P]; by the phi of their hit nearest to the production
    vertex, since few tables of particles hold a direction; by the distance of that vertex from the beam line
    and its z; by |d0| and z0 of their helix, where its direction is known; by their hits, and by the share of these on
    the track with most of them, and of that track's hits that are theirs; by the density of hits near theirs; by their
    holes; and by the smallest border distance of their hits. Tracks are binned by the helix fitted to their hits
    (`fitted`), by their hits, by the share of their majority particle among these, and of its hits on them, by the
    density around them, by their holes, and by the smallest border distance.
    """
    vertex = rows_of_table(truth.particles, overlaps.particle_ids, "vertex").T
    d0, z0 = true_perigees(truth, overlaps.particle_ids)[:, :2].T
    shares = _shares(overlaps)
    of_particles = {
        "pt": pt,
        "eta": eta,
        "phi": _phi_of_first_hits(overlaps, truth),
        "radius": np.hypot(*vertex[:2]),
        "d0": np.abs(d0),
        "z0": z0,
        "vz": vertex[2],
        "hits": overlaps.particle_hits,
        **shares["particle"],
        "density": np.full(overlaps.num_particles, np.nan),
        "holes": np.full(overlaps.num_particles, np.nan),
        "border": _smallest(truth.border, overlaps.particle_of_hit, overlaps.num_particles),
    }
    unknown = dict.fromkeys(("radius", "vz", "density", "holes"), np.full(overlaps.num_tracks, np.nan))
    of_tracks = {**helices, **unknown, "hits": overlaps.track_hits, **shares["track"]}
    if truth.position is not None:
        density = _density(truth.position)
        of_particles["density"] = _mean(density, overlaps.particle_of_hit, overlaps.num_particles)
        hits, member = np.flatnonzero(overlaps.particle_of_hit >= 0), overlaps.member
        of_particles["holes"] = _holes(
            overlaps.particle_of_hit[hits],
            hits,
            _distance_from_vertex(hits, overlaps, truth),
            truth,
            overlaps.num_particles,
        )
        of_tracks["holes"] = _holes(
            overlaps.track_of_member,
            member,
            np.linalg.norm(truth.position[member], axis=1),
            truth,
            overlaps.num_tracks,
        )
        of_tracks["density"] = _mean(density[overlaps.member], overlaps.track_of_member, overlaps.num_tracks)
    border = None if truth.border is None else truth.border[overlaps.member]
    of_tracks["border"] = _smallest(border, overlaps.track_of_member, overlaps.num_tracks)
    return {
        name: Bins(edges, bins_of(of_particles[name], edges), bins_of(of_tracks[name], edges))
        for name, edges in EDGES.items()
    }


def _shares(overlaps: Overlaps) -> dict[str, dict[str, FloatArray]]:
    """Purity and completeness of each track with regard to the particle that has most of its hits, and of each particle
    with regard to the track that has most of its hits; of several that with the fewest others; else 0."""
    of_track, of_particle = overlaps.track_hits[overlaps.track], overlaps.particle_hits[overlaps.particle]
    shares: dict[str, dict[str, FloatArray]] = {}
    for whose, count in (("track", overlaps.num_tracks), ("particle", overlaps.num_particles)):
        mine = getattr(overlaps, whose)
        order = np.lexsort((of_track + of_particle, -overlaps.shared, mine))
        pair = order[np.diff(mine[order], prepend=-1) > 0]
        shares[whose] = {}
        for name, hits in (("purity", of_track), ("completeness", of_particle)):
            shares[whose][name] = np.asarray(
                np.bincount(mine[pair], overlaps.shared[pair] / hits[pair], count), np.float64
            )
    return shares


def _density(position: FloatArray) -> FloatArray:
    """Hits in the same cell of eta and phi as each hit, itself counted, as seen from the origin, float64 [N].

    Cells are 0.1 wide in eta, and 63 go round in phi.
    """
    eta, phi = directions(position)
    around = np.floor((phi + math.pi) * 63 / (2 * math.pi)).astype(np.int64)
    _, cell, hits = np.unique(
        np.floor(10 * eta).astype(np.int64) * 64 + around, return_inverse=True, return_counts=True
    )  # fmt: skip
    return np.asarray(hits[cell], np.float64)


def _mean(values: FloatArray, row_of_hit: IntArray, count: int) -> FloatArray:
    """The mean over the hits of each row, each of which has some."""
    counted = row_of_hit >= 0
    rows = row_of_hit[counted]
    return np.bincount(rows, values[counted], count) / np.bincount(rows, minlength=count)


def _smallest(values: FloatArray | None, row_of_hit: IntArray, count: int) -> FloatArray:
    """The smallest value among the hits of each row; NaN without values."""
    smallest = np.full(count, np.nan if values is None else np.inf)
    if values is not None:
        counted = row_of_hit >= 0
        np.minimum.at(smallest, row_of_hit[counted], values[counted].astype(np.float64))
    return smallest


def _phi_of_first_hits(overlaps: Overlaps, truth: EventTruth) -> FloatArray:
    """phi of the hit of each particle that is nearest to its production vertex, or to the origin if that is unknown."""
    phi = np.full(overlaps.num_particles, np.nan)
    if truth.position is None:
        return phi
    hits = np.flatnonzero(overlaps.particle_of_hit >= 0)
    particle = overlaps.particle_of_hit[hits]
    phi_of_hit = directions(truth.position[hits])[1]
    order = np.lexsort((phi_of_hit, -_distance_from_vertex(hits, overlaps, truth), particle))
    phi[particle[order]] = phi_of_hit[order]  # of several, the last one stays: the nearest
    return phi


def _distance_from_vertex(hits: IntArray, overlaps: Overlaps, truth: EventTruth) -> FloatArray:
    """Distance of hits of particles from where these were produced, or from the origin if that is unknown, in mm."""
    assert truth.position is not None
    vertices = production_vertices(truth, overlaps.particle_ids)[overlaps.particle_of_hit[hits]]
    distance: FloatArray = np.linalg.norm(truth.position[hits] - vertices, axis=1)
    return distance


def _holes(row_of_hit: IntArray, hits: IntArray, distance: FloatArray, truth: EventTruth, count: int) -> FloatArray:
    """Layers that the hits of each row pass over: crossed between two of them, without a hit. NaN: unknown layers.

    Hits follow each other by distance.
    """
    assert truth.position is not None
    order = np.lexsort((truth.surface[hits], distance, row_of_hit))
    order = order[row_of_hit[order] >= 0]
    row, along = row_of_hit[order], hits[order]
    follows = np.append(False, row[1:] == row[:-1])[: len(row)]
    holes = np.zeros(count)
    np.add.at(holes, row, detector.layers_passed(truth.surface[along], truth.position[along], follows))
    holes[row[~np.isin(truth.surface[along], detector.known_surfaces())]] = np.nan
    return holes
