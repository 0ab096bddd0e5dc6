"""Tracks from hits alone, by following helices: a measure for a network. No graph, no network, no truth.

The easiest tracks are looked for first: their hits are then out of the way of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

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

PROMPT_PT = (0.8, 0.4)
"""Prompt seeds are looked for down to each of these in turn, in GeV, then down to the smallest asked for."""

SOFT_PT = 0.4
PIXELS = (7, 8, 9)


@dataclass(frozen=True)
class FinderOptions:
    """Limits of the search; the defaults were chosen on simulated events.

    Attributes:
        min_pt: Smallest transverse momentum in GeV of a seed.
        d0: Largest distance in mm from the beam line of a displaced seed.
        z0: Largest |z| in mm at which a displaced seed leaves the beam line.
        prompt_d0: The same for prompt seeds, which are looked for first.
        prompt_z0: The same for prompt seeds.
        displaced_min_pt: Smallest transverse momentum in GeV of a displaced seed.
        min_hits: Fewest hits of a track.
        displaced_min_hits: Fewest hits of a track from a displaced seed: there are many more of these to pick from.
        max_holes: Most surfaces a track may cross between its hits without leaving one; at most one from displaced
            seeds and below 0.4 GeV.
        max_shared: Most hits a track may lose to better ones and still be one, if enough remain.
        gate: Largest chi^2, with 2 degrees of freedom, of a hit against the prediction.
        ways: Ways to go on that are kept at once for each seed.
        radiation_lengths: Thickness of one surface, which scatters, in radiation lengths.

    Raises:
        ValueError: If a number is not positive, or a count is too small.
    """

    min_pt: float = 0.2
    d0: float = 20.0
    z0: float = 200.0
    prompt_d0: float = 2.0
    prompt_z0: float = 30.0
    displaced_min_pt: float = 0.4
    min_hits: int = 5
    displaced_min_hits: int = 7
    max_holes: int = 2
    max_shared: int = 2
    gate: float = 16.0
    ways: int = 3
    radiation_lengths: float = 0.02

    def __post_init__(self) -> None:
        lengths = ("min_pt", "d0", "z0", "prompt_d0", "prompt_z0", "displaced_min_pt", "gate", "radiation_lengths")
        for name in lengths:
            value = getattr(self, name)
            if not (np.isfinite(value) and value > 0):
                raise ValueError(f"finder option {name} is {value}; it must be a positive number.")
        counts = {"min_hits": 4, "displaced_min_hits": 4, "max_holes": 0, "max_shared": 0, "ways": 1}
        for name, least in counts.items():
            if getattr(self, name) < least:
                raise ValueError(f"finder option {name} is {getattr(self, name)}; it must be at least {least}.")


def find_tracks(
    position: FloatArray,
    volume: IntArray,
    layer: IntArray,
    module: IntArray,
    options: FinderOptions | None = None,
) -> IntArray:
    """Find the tracks of one event of the TrackML detector.

    Seeds of three hits on neighbouring surfaces are followed through the detector by a combinatorial Kalman filter in
    the field map, outward and back; of the candidates that share hits the better ones keep them. Prompt tracks are
    looked for first, displaced ones among the hits that are left.

    Args:
        position: x, y, z of each hit in mm, [N, 3].
        volume: TrackML volume of each hit, [N].
        layer: Layer in the volume, [N].
        module: Module in the layer, [N]: two hits of a track on one surface lie on different ones.
        options: Limits; the defaults if None.

    Returns:
        Track of each hit, int64 [N]: 0, 1, ... by their first hit, or -1 for none. Equal hits give equal tracks on any
        machine to rounding, whatever the order of the hits.

    Raises:
        ValueError: If shapes do not agree, a position is not finite, or a hit lies on no TrackML surface.
    """
    options = options or FinderOptions()
    table = table_of(position, volume, layer, module)
    track_of = np.full(len(table.hits), -1, np.int64)
    count = 0
    for search in passes(options):
        count = _search(table, track_of, count, search, options)
    track_id = np.empty_like(track_of)
    track_id[table.rows] = track_of
    return number_tracks(track_id)


def _search(table: HitTable, track_of: IntArray, count: int, search: Pass, options: FinderOptions) -> int:
    """Add the tracks of one pass to `track_of`, numbered from `count`; returns the number after the last."""
    scene = _scene(table, track_of < 0, options)
    seeds = _seeds(scene, search, options)
    states = np.zeros((2, options.ways + 1), STATE_DTYPE)
    starts, rows, quality = follow_seeds(seeds, scene, search.min_hits, search.max_holes, states)
    best_first = np.argsort(-quality, kind="stable")
    return int(resolve(starts, rows, best_first, track_of, count, options.max_shared, search.min_hits))


def _scene(table: HitTable, free: npt.NDArray[np.bool_], options: FinderOptions) -> Scene:
    return Scene(
        hits=table.hits,
        phi=np.ascontiguousarray(table.hits["phi"]),
        ptr=table.ptr,
        free=free,
        places=layout().places,
        ways=layout().ways,
        field=detector.geometry().field,
        gate=options.gate,
        radiation_lengths=options.radiation_lengths,
    )


def _seeds(scene: Scene, search: Pass, options: FinderOptions) -> IntArray:
    """The seeds of all chains of surfaces, int64 [S, 3]."""
    curvature = GEV_PER_TESLA_MM * float(scene.field[:, 1].max()) / search.min_pt
    angle = 0.0136 * np.sqrt(options.radiation_lengths) / search.min_pt
    seeds = [find_seeds(chain, scene, curvature, angle, search.d0, search.z0) for chain in search.chains]
    return np.concatenate(seeds)


@dataclass(frozen=True, eq=False)
class Pass:
    """One search over the hits that earlier ones left.

    Attributes:
        chains: Places in `detector.SURFACES` of the three surfaces of a seed, outward, int64 [S, 3].
        min_pt: Smallest transverse momentum of a seed in GeV.
        d0: Its largest distance from the beam line in mm.
        z0: Largest |z| in mm at which it leaves that line.
        min_hits: Fewest hits of a track.
        max_holes: Most surfaces without a hit.
    """

    chains: IntArray
    min_pt: float
    d0: float
    z0: float
    min_hits: int
    max_holes: int


def passes(options: FinderOptions) -> list[Pass]:
    """Prompt tracks from the pixels, by falling momentum; then displaced ones from anywhere."""
    pixel, everywhere = _chains()
    searches = []
    for min_pt in [*(pt for pt in PROMPT_PT if pt > options.min_pt), options.min_pt]:
        holes = options.max_holes if min_pt >= SOFT_PT else min(options.max_holes, 1)
        searches.append(Pass(pixel, min_pt, options.prompt_d0, options.prompt_z0, options.min_hits, holes))
    min_pt, min_hits = max(options.min_pt, options.displaced_min_pt), max(options.min_hits, options.displaced_min_hits)
    return [*searches, Pass(everywhere, min_pt, options.d0, options.z0, min_hits, min(options.max_holes, 1))]


@lru_cache(maxsize=1)
def _chains() -> tuple[IntArray, IntArray]:
    """Three neighbouring surfaces: those in the pixels, and all. Neighbours are the measured layer pairs."""
    number = {(surface.volume, surface.layer): i for i, surface in enumerate(detector.SURFACES)}
    pairs = detector.DEFAULT_LAYER_PAIRS
    chains = [(a, b, c) for a, b in pairs for again, c in pairs if again == b]
    inside = [all(volume in PIXELS for volume, _layer in chain) for chain in chains]
    places = np.array([[number[layer] for layer in chain] for chain in chains], np.int64)
    pixel, other = places[np.array(inside)], places[~np.array(inside)]
    return pixel, np.concatenate([pixel, other])


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
