"""What the event display draws: arrays of one event, as small as they go, and the lists to choose from."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.display.event_data import EventData
from domainpar.display.matching import DUPLICATE, FAKE_TRACK, SHORT, match_tracks
from domainpar.display.paths import particle_paths, track_paths
from domainpar.display.reading import Tracking
from domainpar.events.graph import IntArray

MOST_CUT_EDGES = 150_000
"""Of more cut edges an even choice is drawn, and the display says so."""

SMALL = {"f8": np.float64, "f4": np.float32, "i4": np.int32, "u2": np.uint16, "u1": np.uint8}


@dataclass(frozen=True, eq=False)
class EventView:
    """One event, ready to be drawn.

    Attributes:
        facts: Names and counts, plain JSON values.
        arrays: Arrays by name, each of a type in `SMALL`.
    """

    facts: dict[str, Any]
    arrays: dict[str, npt.NDArray[Any]]

    def as_json(self) -> dict[str, Any]:
        """Facts, and arrays in base64, little-endian."""
        return {"facts": self.facts, "arrays": {name: _encoded(values) for name, values in self.arrays.items()}}


def event_view(
    event: EventData, num_parts: int, tracking: Tracking, grouping: str = "contiguous", seed: int = 0
) -> EventView | None:
    """What to draw of an event that so many ranks share; None without positions.

    Args:
        event: The event.
        num_parts: Ranks (or sectors of naive mode) that share it.
        tracking: How tracks are matched to particles.
        grouping: How its tiles are grouped.
        seed: Seed of the grouping.
    """
    if event.position is None:
        return None
    part = event.part_of_hits(num_parts, grouping, seed)
    cut = np.flatnonzero(part[event.edge_index[0]] != part[event.edge_index[1]])
    drawn = cut[:: -(-len(cut) // MOST_CUT_EDGES) or 1]
    layers, layer_of_hit = _layers(event)
    facts: dict[str, Any] = {
        "event": event.event_id,
        "split": event.split,
        "parts": num_parts,
        "hits": event.num_hits,
        "edges": event.num_edges,
        "cutEdges": len(cut),
        "cutEdgesDrawn": len(drawn),
        "layers": layers,
        "noise": event.particle_id is not None,
    }
    arrays: dict[str, npt.NDArray[Any]] = {
        **dict(zip("xyz", event.position.T.astype(np.float32))),
        "hitId": _numbers(event.hit_id),
        "part": part.astype(np.uint8 if num_parts < 256 else np.uint16),
        "layer": layer_of_hit,
        "cut": event.edge_index[:, drawn].T.astype(np.int32).reshape(-1),
    }
    _add_particles(event, facts, arrays)
    for name, track_id in (("network", event.track_id), ("classical", event.classical_track_id)):
        if track_id is not None:
            _add_tracks(name, event, track_id, tracking, facts, arrays)
    return EventView(facts, arrays)


def _layers(event: EventData) -> tuple[list[str], npt.NDArray[np.uint16]]:
    """Names of the layers, and the layer of each hit as a row of them."""
    pairs, which = np.unique(np.stack([event.volume, event.layer]), axis=1, return_inverse=True)
    return [f"volume {volume}, layer {layer}" for volume, layer in pairs.T], which.reshape(-1).astype(np.uint16)


def _add_particles(event: EventData, facts: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> None:
    """The particles that left hits, and the way each of them took."""
    if event.particles is None or event.target is None:
        return
    paths = particle_paths(event)
    kept = np.flatnonzero(paths.sizes)
    arrays |= _path_arrays("particle", paths.rows, paths.sizes[kept])
    row = np.full(len(paths.sizes) + 1, -1, np.int32)
    row[kept] = np.arange(len(kept))
    arrays["particle"] = row[event.particle_row]
    arrays["particleTarget"] = event.target[kept].astype(np.uint8)
    arrays["particlePt"] = event.particles.pt[kept].astype(np.float32)
    arrays["particleEta"] = event.particles.eta[kept].astype(np.float32)
    # As words: ids of TrackML need more than the 53 bits that a number has in a browser.
    facts["particleIds"] = [str(one) for one in event.particles.particle_id[kept]]


def _add_tracks(
    name: str,
    event: EventData,
    track_id: IntArray,
    tracking: Tracking,
    facts: dict[str, Any],
    arrays: dict[str, npt.NDArray[Any]],
) -> None:
    """The tracks of one finder, whose they are, and whom it missed."""
    paths = track_paths(event, track_id)
    arrays[f"{name}Track"] = track_id.astype(np.int32)
    arrays |= _path_arrays(name, paths.rows, paths.sizes)
    facts.setdefault("finders", []).append(name)
    matches = match_tracks(event, track_id, tracking.cuts, tracking.style)
    if matches is None:
        return
    kept = np.flatnonzero(particle_paths(event).sizes)
    row = np.full(len(matches.found) + 1, -1, np.int32)
    row[kept] = np.arange(len(kept))
    arrays[f"{name}Kind"] = matches.kind.astype(np.uint8)
    arrays[f"{name}Particle"] = row[matches.particle]
    arrays[f"{name}Shared"] = matches.shared.astype(np.uint16)
    arrays[f"{name}Found"] = matches.found[kept].astype(np.uint8)
    arrays[f"{name}BestTrack"] = matches.best_track[kept].astype(np.int32)
    arrays[f"{name}BestShared"] = matches.best_shared[kept].astype(np.uint16)
    facts[f"{name}Counts"] = {
        "tracks": int((matches.kind != SHORT).sum()),
        "short": int((matches.kind == SHORT).sum()),
        "targets": int(matches.wanted.sum()),
        "found": int((matches.wanted & matches.found).sum()),
        "fakes": int((matches.kind == FAKE_TRACK).sum()),
        "duplicates": int((matches.kind == DUPLICATE).sum()),
    }


def _numbers(ids: IntArray) -> npt.NDArray[Any]:
    """Ids as numbers of a browser."""
    fits = len(ids) == 0 or (ids.min() >= -(2**31) and ids.max() < 2**31)
    return ids.astype(np.int32 if fits else np.float64)


def _path_arrays(name: str, rows: IntArray, sizes: IntArray) -> dict[str, npt.NDArray[Any]]:
    ptr = np.concatenate([[0], np.cumsum(sizes)])
    return {f"{name}Rows": rows.astype(np.int32), f"{name}Ptr": ptr.astype(np.int32)}


def _encoded(values: npt.NDArray[Any]) -> dict[str, str]:
    kind = next(name for name, dtype in SMALL.items() if values.dtype == dtype)
    data = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False)
    return {"type": kind, "data": base64.b64encode(data.tobytes()).decode()}
