"""Tracks from hits alone, by following helices: a measure for a network. No graph, no network, no truth.

The easiest tracks are looked for first: their hits are then out of the way of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from domainpar.events import detector
from domainpar.events.detector import GEV_PER_TESLA_MM
from domainpar.events.graph import FloatArray, IntArray
from domainpar.nn.compiled import compiled
from domainpar.reco.classical.candidates import follow_seeds
from domainpar.reco.classical.crossing import Scene
from domainpar.reco.classical.seeds import find_seeds
from domainpar.reco.classical.states import STATE_DTYPE
from domainpar.reco.classical.surfaces import HitTable, layout, table_of
from domainpar.reco.tracks import number_tracks

PIXELS = (7, 8, 9)
"""Volumes of the pixel detector."""

# Chosen on simulated events, as the searches below.
MAX_SHARED = 2  # hits that a track may lose to better ones and still be one, if enough remain
GATE = 16.0  # largest chi^2, with 2 degrees of freedom, of a hit against the prediction
WAYS = 3  # ways to go on that are kept at once for each seed
RADIATION_LENGTHS = 0.02  # thickness of one surface, which scatters


@dataclass(frozen=True)
class Search:
    """A search over the hits that earlier ones left.

    Attributes:
        min_pt: Smallest transverse momentum of a seed in GeV.
        d0: Its largest distance from the beam line in mm.
        z0: Largest |z| in mm at which it leaves that line.
        min_hits: Fewest hits of a track.
        max_holes: Most surfaces that a track may cross between its hits without leaving one.
        everywhere: Seeds lie on any neighbouring surfaces, not only on those of the pixels.
    """

    min_pt: float
    d0: float
    z0: float
    min_hits: int
    max_holes: int
    everywhere: bool = False


SEARCHES = (
    Search(min_pt=0.8, d0=2.0, z0=30.0, min_hits=5, max_holes=2),
    Search(min_pt=0.4, d0=2.0, z0=30.0, min_hits=5, max_holes=2),
    Search(min_pt=0.2, d0=2.0, z0=30.0, min_hits=5, max_holes=1),
    # There are many more displaced seeds to pick from, so more hits must agree.
    Search(min_pt=0.4, d0=20.0, z0=200.0, min_hits=7, max_holes=1, everywhere=True),
)
"""Prompt tracks from the pixels, by falling momentum; then displaced ones from anywhere."""


def find_tracks(
    position: FloatArray, volume: IntArray, layer: IntArray, module: IntArray, searches: Sequence[Search] = SEARCHES
) -> IntArray:
    """Find the tracks of one event of the TrackML detector.

    Seeds of three hits on neighbouring surfaces are followed through the detector by a combinatorial Kalman filter in
    the field map, outward and back; of the candidates that share hits the better ones keep them.

    Args:
        position: x, y, z of each hit in mm, [N, 3].
        volume: TrackML volume of each hit, [N].
        layer: Layer in the volume, [N].
        module: Module in the layer, [N]: two hits of a track on one surface lie on different ones.
        searches: The searches, one after the other.

    Returns:
        Track of each hit, int64 [N]: 0, 1, ... by their first hit, or -1 for none. Equal hits give equal tracks on any
        machine to rounding, whatever the order of the hits.

    Raises:
        ValueError: If shapes do not agree, a position is not finite, or a hit lies on no TrackML surface.
    """
    table = table_of(position, volume, layer, module)
    track_of = np.full(len(table.hits), -1, np.int64)
    count = 0
    for search in searches:
        count = _search(table, track_of, count, search)
    track_id = np.empty_like(track_of)
    track_id[table.rows] = track_of
    return number_tracks(track_id)


def _search(table: HitTable, track_of: IntArray, count: int, search: Search) -> int:
    """Add the tracks of one search to `track_of`, numbered from `count`; returns the number after the last."""
    scene = Scene(
        hits=table.hits,
        phi=np.ascontiguousarray(table.hits["phi"]),
        ptr=table.ptr,
        free=track_of < 0,
        places=layout().places,
        ways=layout().ways,
        field=detector.geometry().field,
        gate=GATE,
        radiation_lengths=RADIATION_LENGTHS,
    )
    curvature = GEV_PER_TESLA_MM * float(scene.field[:, 1].max()) / search.min_pt
    # Multiple scattering: 13.6 MeV / p sqrt(x / X0).
    angle = 0.0136 * np.sqrt(RADIATION_LENGTHS) / search.min_pt
    seeds = [find_seeds(chain, scene, curvature, angle, search.d0, search.z0) for chain in chains(search.everywhere)]
    states = np.zeros((2, WAYS + 1), STATE_DTYPE)
    starts, rows, quality = follow_seeds(np.concatenate(seeds), scene, search.min_hits, search.max_holes, states)
    best_first = np.argsort(-quality, kind="stable")
    return int(resolve(starts, rows, best_first, track_of, count, MAX_SHARED, search.min_hits))


@lru_cache(maxsize=2)
def chains(everywhere: bool) -> IntArray:
    """Places in `detector.SURFACES` of three neighbouring surfaces, outward, int64 [S, 3]: those of the pixels first.

    Neighbours are the measured layer pairs. Without `everywhere` the chains that leave the pixels are left out.
    """
    number = {(surface.volume, surface.layer): i for i, surface in enumerate(detector.SURFACES)}
    pairs = detector.DEFAULT_LAYER_PAIRS
    layers = [(a, b, c) for a, b in pairs for again, c in pairs if again == b]
    inside = np.array([all(volume in PIXELS for volume, _layer in chain) for chain in layers])
    places = np.array([[number[layer] for layer in chain] for chain in layers], np.int64)
    return np.concatenate([places[inside], places[~inside]]) if everywhere else places[inside]


@compiled
def resolve(starts: Any, rows: Any, order: Any, track_of: Any, next_track: int, max_shared: int, min_hits: int) -> int:
    """Accept candidates in turn: each takes its hits that are still free.

    Args:
        starts: First hit of each candidate, and their number, int64 [C + 1].
        rows: Their hits.
        order: Candidates, best first, int64 [C].
        track_of: Track of each hit, -1 for none, int64 [N]; filled in.
        next_track: Number of the next track.
        max_shared: A candidate that has lost more hits than this to better tracks is dropped.
        min_hits: So is one with fewer hits left than this.

    Returns:
        The number after the last track's.
    """
    for candidate in order:
        mine = rows[starts[candidate] : starts[candidate + 1]]
        left = 0
        for row in mine:
            left += track_of[row] < 0
        if len(mine) - left > max_shared or left < min_hits:
            continue
        for row in mine:
            if track_of[row] < 0:
                track_of[row] = next_track
        next_track += 1
    return next_track
