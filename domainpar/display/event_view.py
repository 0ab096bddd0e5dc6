"""The content of the event display and of the pictures of an event: arrays of one event and its split, as small as they
go."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.display.event_data import EventData
from domainpar.display.matches import DUPLICATE, FAKE_TRACK, SHORT, match_tracks
from domainpar.display.run_files import RunFiles, Tracking
from domainpar.display.tracks import target_text
from domainpar.events.graph import FloatArray, IntArray

MOST_CUT_EDGES = 150_000
"""Of more cut edges an even choice is drawn, and the display says so."""

DEFAULT_PARTS = 8
SMALL = {"f8": np.float64, "f4": np.float32, "i4": np.int32, "u2": np.uint16, "u1": np.uint8}
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Split:
    """The split of an event over ranks or sectors.

    Attributes:
        num_parts: Ranks or sectors that share it.
        words: Their kind, in a sentence.
        naive: Whether these are the sectors of naive mode, whose edges to each other are dropped.
        grouping: The way its tiles are grouped.
        seed: Seed of the grouping.
    """

    num_parts: int
    words: str = "parts"
    naive: bool = False
    grouping: str = "contiguous"
    seed: int = 0

    @property
    def word(self) -> str:
        """The name of such a part, in a sentence."""
        return "sector" if self.naive else "part"


def split_of(run: RunFiles, num_parts: int | None) -> Split:
    """The split that was asked for, or else the run's own: its sectors or its ranks; 8 parts where one rank did all."""
    grouping = "contiguous" if run.approximate else str(run.settings.get("grouping") or "contiguous")
    seed = int(run.settings.get("seed") or 0)
    if num_parts is not None:
        return Split(num_parts, "parts, as asked for", False, grouping, seed)
    sectors = run.scores.about.get("sectors") if run.scores and run.scores.approximate else None
    if sectors := sectors or (run.settings.get("sectors") if run.approximate else None):
        return Split(int(sectors), "independent sectors (approximate: naive mode)", True, "contiguous", seed)
    if run.ranks_of_an_event > 1:
        return Split(run.ranks_of_an_event, "parts, as in the training", False, grouping, seed)
    return Split(DEFAULT_PARTS, "parts", False, grouping, seed)


@dataclass(frozen=True, eq=False)
class Borrowed:
    """Hits and edges that one part shares with the others when every edge with an end in it is computed there.

    Attributes:
        part: The part.
        owned: Its hits, as rows, int64 [n].
        ghosts: Hits of others that an edge joins to one of its own, as rows, int64 [m].
        cut: `src` and `dst` of the edges between the two, int64 [2, k].
    """

    part: int
    owned: IntArray
    ghosts: IntArray
    cut: IntArray


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
    """One event, ready to be drawn.

    Attributes:
        facts: Names and counts, plain JSON values.
        arrays: Arrays by name, each of a type in `SMALL`.
        split: Its split.
        borrowed: The first part that borrows; pictures show it.
        targets: The conditions on target particles, as a physicist writes them.
        how_scored: The way the network's tracks were made, in a few words.
    """

    facts: dict[str, Any]
    arrays: Arrays
    split: Split
    borrowed: Borrowed
    targets: str = ""
    how_scored: str = ""

    @property
    def finder(self) -> str:
        """The finder whose tracks are shown first: the network, or else the classical one; empty without tracks."""
        return next(iter(self.facts.get("finders", [])), "")

    def as_json(self) -> dict[str, Any]:
        """Facts, and arrays in base64, little-endian."""
        return {"facts": self.facts, "arrays": {name: _encoded(values) for name, values in self.arrays.items()}}


def event_view(event: EventData, split: Split, tracking: Tracking, how_scored: str = "") -> EventView | None:
    """The view of an event, split over some parts; None without positions.

    Args:
        event: The event.
        split: Its split.
        tracking: The matching of tracks and particles.
        how_scored: The way the network's tracks were made, in a few words.
    """
    if event.position is None:
        return None
    part = event.part_of_hits(split.num_parts, split.grouping, split.seed)
    cut = np.flatnonzero(part[event.edge_index[0]] != part[event.edge_index[1]])
    drawn = cut[:: -(-len(cut) // MOST_CUT_EDGES) or 1]
    layers, layer_of_hit = np.unique(np.stack([event.volume, event.layer]), axis=1, return_inverse=True)
    few = event.num_hits == 0 or (event.hit_id.min() >= -(2**31) and event.hit_id.max() < 2**31)
    facts: dict[str, Any] = {
        "event": event.event_id,
        "parts": split.num_parts,
        "hits": event.num_hits,
        "edges": event.num_edges,
        "cutEdges": len(cut),
        "cutEdgesDrawn": len(drawn),
        "layers": [f"volume {volume}, layer {layer}" for volume, layer in layers.T],
    }
    arrays: Arrays = {
        **dict(zip("xyz", event.position.T.astype(np.float32))),
        "hitId": event.hit_id.astype(np.int32 if few else np.float64),  # the numbers of a browser
        "part": part.astype(np.uint8 if split.num_parts < 256 else np.uint16),
        "layer": layer_of_hit.reshape(-1).astype(np.uint16),
        "cut": event.edge_index[:, drawn].T.astype(np.int32).reshape(-1),
    }
    kept = _add_particles(event, facts, arrays)
    for name, track_id in (("network", event.track_id), ("classical", event.classical_track_id)):
        if track_id is not None:
            _add_tracks(
                name=name, event=event, track_id=track_id, tracking=tracking, kept=kept, facts=facts, arrays=arrays
            )
    borrowed = first_that_borrows(part, event.edge_index)
    return EventView(facts, arrays, split, borrowed, target_text(tracking.cuts.target), how_scored)


@dataclass(frozen=True, eq=False)
class Paths:
    """Hits in the order of some tracks or particles.

    Attributes:
        rows: Rows of the hits, path after path, int64 [n].
        ptr: Path p holds rows[ptr[p] : ptr[p + 1]], int64 [paths + 1]; a path may be empty.
    """

    rows: IntArray
    ptr: IntArray

    @property
    def sizes(self) -> IntArray:
        """Hits of each path, int64 [paths]."""
        return np.diff(self.ptr)


def particle_paths(event: EventData) -> Paths:
    """The hits of each particle of the table, by distance from its production vertex (the origin where unknown)."""
    rows = event.particle_row
    if event.particles is None or event.position is None:
        return Paths(np.zeros(0, np.int64), np.zeros(1, np.int64))
    start = np.zeros((event.num_hits, 3))
    known = rows >= 0
    start[known] = np.nan_to_num(event.particles.vertex[rows[known]], nan=0.0)
    return _paths(rows, len(event.particles.particle_id), np.linalg.norm(event.position - start, axis=1))


def track_paths(event: EventData, track_id: IntArray) -> Paths:
    """The hits of each track, by distance from the origin."""
    distance = np.zeros(event.num_hits) if event.position is None else np.linalg.norm(event.position, axis=1)
    return _paths(track_id, int(track_id.max(initial=-1)) + 1, distance)


def _paths(owner: IntArray, num_owners: int, distance: FloatArray) -> Paths:
    """The hits of each owner, -1 for none, by increasing distance."""
    order = np.lexsort((distance, owner))
    rows = order[np.searchsorted(owner[order], 0) :]
    counts = np.bincount(owner[rows], minlength=num_owners)
    return Paths(rows, np.concatenate([[0], np.cumsum(counts)]))


def _add_particles(event: EventData, facts: dict[str, Any], arrays: Arrays) -> IntArray:
    """Add the particles that left hits, and the path of each; returns their rows in the particle table."""
    paths = particle_paths(event)
    kept = np.flatnonzero(paths.sizes)
    if event.particles is None or event.target is None:
        return kept
    arrays |= _path_arrays("particle", paths.rows, paths.sizes[kept])
    arrays["particle"] = _places(kept, len(paths.sizes))[event.particle_row]
    arrays["particleTarget"] = event.target[kept].astype(np.uint8)
    arrays["particlePt"] = event.particles.pt[kept].astype(np.float32)
    arrays["particleEta"] = event.particles.eta[kept].astype(np.float32)
    # As words: ids of TrackML need more than the 53 bits that a number has in a browser.
    facts["particleIds"] = [str(particle_id) for particle_id in event.particles.particle_id[kept]]
    return kept


def _add_tracks(
    name: str,
    event: EventData,
    track_id: IntArray,
    tracking: Tracking,
    kept: IntArray,
    facts: dict[str, Any],
    arrays: Arrays,
) -> None:
    """Add the tracks of one finder, their particles, and the particles that it missed."""
    paths = track_paths(event, track_id)
    arrays[f"{name}Track"] = track_id.astype(np.int32)
    arrays |= _path_arrays(name, paths.rows, paths.sizes)
    facts.setdefault("finders", []).append(name)
    matches = match_tracks(event, track_id, tracking.cuts, tracking.style)
    if matches is None:
        return
    arrays[f"{name}Kind"] = matches.kind.astype(np.uint8)
    arrays[f"{name}Particle"] = _places(kept, len(matches.found))[matches.particle]
    arrays[f"{name}Shared"] = matches.shared.astype(np.uint16)
    arrays[f"{name}Found"] = matches.found[kept].astype(np.uint8)
    arrays[f"{name}BestTrack"] = matches.best_track[kept].astype(np.int32)
    arrays[f"{name}BestShared"] = matches.best_shared[kept].astype(np.uint16)
    facts[f"{name}Counts"] = {
        "tracks": int((matches.kind != SHORT).sum()),
        "short": int((matches.kind == SHORT).sum()),
        "targets": int(matches.target.sum()),
        "found": int((matches.target & matches.found).sum()),
        "fakes": int((matches.kind == FAKE_TRACK).sum()),
        "duplicates": int((matches.kind == DUPLICATE).sum()),
    }


def _places(kept: IntArray, num_rows: int) -> npt.NDArray[np.int32]:
    """Place of each row among those that are kept; -1 for the others, and at the end for row -1."""
    place = np.full(num_rows + 1, -1, np.int32)
    place[kept] = np.arange(len(kept))
    return place


def _path_arrays(name: str, rows: IntArray, sizes: IntArray) -> Arrays:
    ptr = np.concatenate([[0], np.cumsum(sizes)])
    return {f"{name}Rows": rows.astype(np.int32), f"{name}Ptr": ptr.astype(np.int32)}


def _encoded(values: npt.NDArray[Any]) -> dict[str, str]:
    kind = next(name for name, dtype in SMALL.items() if values.dtype == dtype)
    data = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False)
    return {"type": kind, "data": base64.b64encode(data.tobytes()).decode()}
