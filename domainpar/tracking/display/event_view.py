"""The content of the event display and of the pictures of an event: arrays of one event, its split and its tracks, as
small as they go.

Tracks are matched by the rules of the efficiencies, so that the display shows what those count. In the `atlas` style a
track with more than half of its hits from one particle belongs to it, the particle is found, and a track of no particle
is a fake, if truth knows most of its hits and its pT is one that targets may have.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.tracking.display.event_data import EventData
from domainpar.tracking.display.finders import target_text
from domainpar.tracking.display.run_files import RunFiles, Tracking
from domainpar.tracking.events.graph import BoolArray, FloatArray, IntArray
from domainpar.tracking.reco.performance.counts import fitted
from domainpar.tracking.reco.performance.lost import REASONS, TrackEdges, reasons_of_losses
from domainpar.tracking.reco.performance.matching import Overlaps, TrackCuts, find_overlaps, match, memberships
from domainpar.tracking.reco.performance.rates import NETWORK
from partitioners import Sectors, group, number_of_sectors, sectors_of_tiles

MOST_CUT_EDGES = 150_000
"""Of more cut edges an even choice is drawn, and the display says so."""

DEFAULT_PARTS = 8
SMALL = {"f8": np.float64, "f4": np.float32, "i4": np.int32, "u2": np.uint16, "u1": np.uint8}
Arrays = dict[str, npt.NDArray[Any]]

OF_TARGET, OF_OTHER, DUPLICATE, FAKE_TRACK, SHORT, UNLABELLED, OUTSIDE = range(7)
"""Kinds of tracks: of a target, of another particle, of a particle that has a better one, fakes, too short, unlabelled,
and of no particle outside the range of pT in which fakes and unlabelled ones are counted."""


@dataclass(frozen=True)
class Split:
    """The split of an event over ranks or sectors."""

    num_parts: int  # ranks or sectors that share it
    words: str = "parts"  # their kind, in a sentence
    grouping: str = "contiguous"  # the way its tiles are grouped
    seed: int = 0  # seed of the grouping
    sectors: Sectors | None = None  # the sectors of naive mode, whose edges to each other are dropped; None of ranks

    @property
    def naive(self) -> bool:
        """Whether these are independent sectors."""
        return self.sectors is not None

    @property
    def word(self) -> str:
        """The name of such a part, in a sentence."""
        return "sector" if self.naive else "part"

    def part_of_hits(self, event: EventData) -> IntArray:
        """Part of each hit of an event, int32 [N]."""
        if self.sectors is not None:
            return sectors_of_tiles(event.tiles, self.sectors, event.tile, event.position)[event.tile]
        return group(event.tiles, self.num_parts, self.grouping, self.seed)[event.tile]


def split_of(run: RunFiles, num_parts: int | None) -> Split:
    """The split that was asked for, or else the run's own: its sectors or its ranks; 8 parts where one rank did all."""
    grouping = "contiguous" if run.approximate else str(run.settings.get("grouping") or "contiguous")
    seed = int(run.settings.get("seed") or 0)
    if num_parts is not None:
        return Split(num_parts, "parts, as asked for", grouping, seed)
    sectors = run.scores.record.sectors if run.scores and run.scored_naive else None
    if sectors := sectors or (run.settings.get("sectors") if run.approximate else None):
        words = "independent sectors (approximate: naive mode)"
        return Split(number_of_sectors(sectors), words, "contiguous", seed, sectors)
    num_ranks = run.record.domain_size or 1
    if num_ranks > 1:
        return Split(num_ranks, "parts, as in the training", grouping, seed)
    return Split(DEFAULT_PARTS, "parts", grouping, seed)


@dataclass(frozen=True, eq=False)
class Borrowed:
    """Hits and edges that one part shares with the others when every edge with an end in it is computed there."""

    part: int  # the part
    owned: IntArray  # its hits, as rows, int64 [n]
    ghosts: IntArray  # hits of others that an edge joins to one of its own, as rows, int64 [m]
    cut: IntArray  # `src` and `dst` of the edges between the two, int64 [2, k]


def first_that_borrows(part_of_hit: IntArray, edge_index: IntArray) -> Borrowed:
    """The first part with ghosts; where no edge is cut, the first with hits.

    Args:
        part_of_hit: Part of each hit, [N]; 0 without any.
        edge_index: `src` and `dst` of each edge, [2, E].
    """
    parts = part_of_hit[edge_index]
    is_cut = parts[0] != parts[1]
    part = int(parts[:, is_cut].min() if is_cut.any() else part_of_hit.min() if len(part_of_hit) else 0)
    cut = edge_index[:, is_cut & (parts == part).any(axis=0)]
    ends = np.unique(cut)
    return Borrowed(part, np.flatnonzero(part_of_hit == part), ends[part_of_hit[ends] != part], cut)


@dataclass(frozen=True, eq=False)
class EventView:
    """One event, ready to be drawn."""

    facts: dict[str, Any]  # names and counts, plain JSON values
    arrays: Arrays  # arrays by name, each of a type in `SMALL`
    split: Split  # its split
    borrowed: Borrowed  # the first part that borrows; pictures show it
    targets: str = ""  # the conditions on target particles, as a physicist writes them
    how_scored: str = ""  # the way the network's tracks were made, in a few words

    @property
    def finder(self) -> str:
        """The finder whose tracks are shown first: the network, or else the CKF; empty without tracks."""
        return next(iter(self.facts.get("finders", [])), "")

    def as_json(self) -> dict[str, Any]:
        """Facts, and arrays in base64, little-endian."""
        arrays = {}
        for name, values in self.arrays.items():
            kind = next(kind for kind, dtype in SMALL.items() if values.dtype == dtype)
            data = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False)
            arrays[name] = {"type": kind, "data": base64.b64encode(data.tobytes()).decode()}
        return {"facts": self.facts, "arrays": arrays}


def event_view(event: EventData, split: Split, tracking: Tracking, how_scored: str = "") -> EventView | None:
    """The view of an event, split over some parts; None without positions.

    Args:
        tracking: The matching of tracks and particles.
        how_scored: The way the network's tracks were made, in a few words.
    """
    if event.position is None:
        return None
    part = split.part_of_hits(event)
    cut = np.flatnonzero(part[event.edge_index[0]] != part[event.edge_index[1]])
    # Every n-th of them, rounded up; the step of a slice must not be 0.
    drawn = cut[:: -(-len(cut) // MOST_CUT_EDGES) or 1]
    layers, layer_of_hit = np.unique(np.stack([event.volume, event.layer]), axis=1, return_inverse=True)
    small = event.num_hits == 0 or (event.hit_id.min() >= -(2**31) and event.hit_id.max() < 2**31)
    facts: dict[str, Any] = {
        "event": event.event_id,
        "parts": split.num_parts,
        "hits": event.num_hits,
        "edges": event.num_edges,
        "cutEdges": len(cut),
        "cutEdgesDrawn": len(drawn),
        "reasons": [f"{reason}: {why}" for reason, why in REASONS.items()],
        "layers": [f"volume {volume}, layer {layer}" for volume, layer in layers.T],
    }
    arrays: Arrays = {
        **dict(zip("xyz", event.position.T.astype(np.float32))),
        "hitId": event.hit_id.astype(np.int32 if small else np.float64),  # the numbers of a browser
        "part": part.astype(np.uint8 if split.num_parts < 256 else np.uint16),
        "layer": layer_of_hit.reshape(-1).astype(np.uint16),
        "cut": event.edge_index[:, drawn].T.astype(np.int32).reshape(-1),
    }
    kept = _add_particles(event, event.position, facts, arrays)
    for name, found in ({} if event.scores is None else event.scores.tracks).items():
        track_id, shared_hits = found.track_id, found.shared_hits
        facts.setdefault("finders", []).append(name)
        arrays[f"{name}Track"] = track_id.astype(np.int32)
        hit, track = memberships(track_id, shared_hits)
        distance = np.linalg.norm(event.position, axis=1)[hit]
        arrays |= _paths(name, hit, track, int(track_id.max(initial=-1)) + 1, distance)
        edges = None
        if name == NETWORK and event.logit is not None:
            scored = event.logit > -np.inf
            edges = TrackEdges.of(event.edge_index, event.logit, scored, tracking.score_cut, found.built_track_id)
        if (matches := match_tracks(event, track_id, tracking.cuts, tracking.style, shared_hits, edges)) is not None:
            _add_matches(name, matches, kept, facts, arrays)
    borrowed = first_that_borrows(part, event.edge_index)
    return EventView(facts, arrays, split, borrowed, target_text(tracking.cuts.target), how_scored)


def _add_particles(event: EventData, position: FloatArray, facts: dict[str, Any], arrays: Arrays) -> IntArray:
    """Add the particles that left hits, and the path of each; returns their rows in the particle table."""
    row = event.particle_row
    listed = row >= 0
    kept = np.unique(row[listed])
    if event.particles is None or event.target is None:
        return kept
    # Along a path hits lie by the distance from where the particle came from: the origin where that is unknown.
    start = np.zeros((event.num_hits, 3))
    start[listed] = np.nan_to_num(event.particles.vertex[row[listed]], nan=0.0)
    place = _places(kept, len(event.particles.particle_id))[row]
    distance = np.linalg.norm(position - start, axis=1)
    arrays |= _paths("particle", np.arange(event.num_hits), place, len(kept), distance)
    arrays["particle"] = place
    arrays["particleTarget"] = event.target[kept].astype(np.uint8)
    arrays["particlePt"] = event.particles.pt[kept].astype(np.float32)
    arrays["particleEta"] = event.particles.eta[kept].astype(np.float32)
    # As words: ids of TrackML need more than the 53 bits that a number has in a browser.
    facts["particleIds"] = [str(particle_id) for particle_id in event.particles.particle_id[kept]]
    return kept


def _add_matches(name: str, matches: Matches, kept: IntArray, facts: dict[str, Any], arrays: Arrays) -> None:
    """Add the particles of the tracks of one finder, and the particles that it missed."""
    arrays[f"{name}Kind"] = matches.kind.astype(np.uint8)
    arrays[f"{name}Particle"] = _places(kept, len(matches.found))[matches.particle]
    arrays[f"{name}Shared"] = matches.shared.astype(np.uint16)
    arrays[f"{name}Found"] = matches.found[kept].astype(np.uint8)
    arrays[f"{name}Lost"] = matches.lost[kept].astype(np.uint8)
    arrays[f"{name}BestTrack"] = matches.best_track[kept].astype(np.int32)
    arrays[f"{name}BestShared"] = matches.best_shared[kept].astype(np.uint16)
    facts[f"{name}Counts"] = {
        "tracks": int((matches.kind != SHORT).sum()),
        "short": int((matches.kind == SHORT).sum()),
        "targets": int(matches.target.sum()),
        "found": int((matches.target & matches.found).sum()),
        "fakes": int((matches.kind == FAKE_TRACK).sum()),
        "unlabelled": int((matches.kind == UNLABELLED).sum()),
        "duplicates": int((matches.kind == DUPLICATE).sum()),
    }


def _paths(name: str, hit: IntArray, owner: IntArray, num_owners: int, distance: FloatArray) -> Arrays:
    """The hits of each owner (-1: of none) by increasing distance, path p being rows[ptr[p] : ptr[p + 1]]."""
    order = np.lexsort((distance, owner))
    order = order[np.searchsorted(owner[order], 0) :]
    ptr = np.concatenate([[0], np.cumsum(np.bincount(owner[order], minlength=num_owners))])
    return {f"{name}Rows": hit[order].astype(np.int32), f"{name}Ptr": ptr.astype(np.int32)}


def _places(kept: IntArray, num_rows: int) -> npt.NDArray[np.int32]:
    """Place of each row among those that are kept; -1 for the others, and at the end for row -1."""
    place = np.full(num_rows + 1, -1, np.int32)
    place[kept] = np.arange(len(kept))
    return place


# --- tracks and particles, matched -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Matches:
    """Tracks (T) and particles of the table (M) of one event, matched."""

    particle: IntArray  # row of the particle that made most hits of each track, -1 for none, int64 [T]
    shared: IntArray  # the number of these hits, int64 [T]
    # one of `OF_TARGET`, `OF_OTHER`, `DUPLICATE`, `FAKE_TRACK`, `SHORT`, `UNLABELLED`, `OUTSIDE`, uint8 [T]
    kind: IntArray
    best_track: IntArray  # the track that holds most hits of each particle, -1 where none holds any, int64 [M]
    best_shared: IntArray  # the number of these hits, int64 [M]
    target: BoolArray  # whether each particle is a target with hits in the event, bool [M]
    found: BoolArray  # whether a track belongs to each particle, bool [M]
    lost: IntArray  # why none does: a place in `lost.REASONS`, int64 [M]; 0 without hits


def match_tracks(
    event: EventData,
    track_id: IntArray,
    cuts: TrackCuts,
    style: str = "atlas",
    shared_hits: IntArray | None = None,
    edges: TrackEdges | None = None,
) -> Matches | None:
    """Match the tracks of an event with its particles; None without a particle table.

    Args:
        track_id: Track of each hit, numbered from 0, -1 for none, [N].
        cuts: Conditions on the tracks that count, and on the share of hits. Its targets are those of the event already.
        style: One of `styles.STYLES`.
        shared_hits: Hits and the further tracks that they lie on, [S, 2]; None for none.
        edges: What the tracks were built from; None for a finder without edges.
    """
    if event.particles is None or event.target is None or event.truth is None:
        return None
    overlaps = find_overlaps(track_id, event.truth.particle_id, shared_hits)
    matching = match(overlaps, cuts)[style]
    num_particles = len(event.particles.particle_id)
    # Particles with hits that are in the table: their rows among the overlaps and in the table.
    _, here, row = np.intersect1d(overlaps.particle_ids, event.particles.particle_id, return_indices=True)
    found, target = np.zeros(num_particles, bool), np.zeros(num_particles, bool)
    found[row] = matching.times_reconstructed[here] > 0
    target[row] = event.target[row]
    lost = np.zeros(num_particles, np.int64)
    lost[row] = reasons_of_losses(overlaps, event.truth, cuts, edges)[style][here]
    majority, shared = _most(overlaps, overlaps.track, overlaps.particle, overlaps.num_tracks)
    tracks, counts = _most(overlaps, overlaps.particle, overlaps.track, overlaps.num_particles)
    best_track, best_shared = np.full(num_particles, -1, np.int64), np.zeros(num_particles, np.int64)
    best_track[row], best_shared[row] = tracks[here], counts[here]
    # One place more than there are particles: a track without any has the majority -1, which is the last.
    to_table = np.full(overlaps.num_particles + 1, -1, np.int64)
    to_table[here] = row
    # The row -1, of no particle in the table, is the one appended: no target.
    of_target = np.append(event.target, False)[to_table[majority]]
    kind = np.full(overlaps.num_tracks, SHORT, np.uint8)
    kind[matching.fake], kind[matching.unlabelled] = FAKE_TRACK, UNLABELLED
    in_range = cuts.in_range(fitted(overlaps, event.truth)["pt"])
    kind[(matching.fake | matching.unlabelled) & ~in_range] = OUTSIDE
    matched = np.flatnonzero(matching.matched)
    kind[matched] = np.where(of_target[matched], OF_TARGET, OF_OTHER)
    # Of the tracks of a particle the one with most hits counts; of equal ones the first.
    order = matched[np.lexsort((matched, -shared[matched], majority[matched]))]
    kind[order[1:][majority[order][1:] == majority[order][:-1]]] = DUPLICATE
    return Matches(to_table[majority], shared, kind, best_track, best_shared, target, found, lost)


def _most(overlaps: Overlaps, owner: IntArray, other: IntArray, num_owners: int) -> tuple[IntArray, IntArray]:
    """Of each owner the other that it shares most with, and the number; -1 and 0 where it shares nothing."""
    pair = overlaps.best_pairs(owner)
    which, shared = np.full(num_owners, -1, np.int64), np.zeros(num_owners, np.int64)
    which[owner[pair]], shared[owner[pair]] = other[pair], overlaps.shared[pair]
    return which, shared
