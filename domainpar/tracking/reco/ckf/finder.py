"""Tracks from hits alone, by following helices: a measure for a network. No graph, no network, no truth.

The easiest tracks are looked for first: their hits are then out of the way of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.common.compiling import compiled
from domainpar.tracking.events import detector
from domainpar.tracking.events.beam_spot import BeamSpot
from domainpar.tracking.events.detector import GEV_PER_TESLA_MM, Barrel
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.graph import BoolArray, FloatArray, IntArray
from domainpar.tracking.reco.ckf.candidates import follow_seeds
from domainpar.tracking.reco.ckf.crossing import Scene
from domainpar.tracking.reco.ckf.seeds import find_seeds
from domainpar.tracking.reco.ckf.states import STATE_DTYPE
from domainpar.tracking.reco.helix import check_finite, check_positions
from domainpar.tracking.reco.segments import number_tracks

PIXELS = (7, 8, 9)
"""Volumes of the pixel detector."""

NUMBERS = {(surface.volume, surface.layer): i for i, surface in enumerate(detector.SURFACES)}
"""Place of each (volume, layer) in `detector.SURFACES`."""

# Chosen on simulated events, as the searches below.
MAX_SHARED = 2  # hits that a track may lose to better ones and still be one, if enough remain
GATE = 16.0  # largest chi^2, with 2 degrees of freedom, of a hit against the prediction
WAYS = 3  # ways to go on that are kept at once for each seed
RADIATION_LENGTHS = 0.02  # thickness of one surface, which scatters
MIN_SURFACES = 4  # of a track found by following: any three hits nearly lie on a helix

PLACE_DTYPE = np.dtype(
    [("is_barrel", "?"), ("coordinate", "f8"), ("low", "f8"), ("high", "f8"), ("var_u", "f8"), ("var_v", "f8")]
)
"""A surface: radius of a barrel or z of a disk, its extent in z or r, and the variances in mm^2 of a hit's position
across (r phi) and along (z in a barrel, r in a disk): cell^2 / 12."""

HIT_DTYPE = np.dtype(
    [("x", "f8"), ("y", "f8"), ("z", "f8"), ("r", "f8"), ("phi", "f8"), ("module", "i8"), ("surface", "i8")]
)


@dataclass(frozen=True)
class Search:
    """A search over the hits that earlier ones left.

    Attributes:
        min_pt: Smallest transverse momentum of a seed in GeV.
        d0: Its largest distance from the beam line in mm.
        z0: Largest |z| in mm at which it leaves that line, at least; a wide beam spot makes it more, see `reach_of`.
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
    Search(min_pt=0.8, d0=2.0, z0=0.0, min_hits=5, max_holes=2),
    Search(min_pt=0.4, d0=2.0, z0=0.0, min_hits=5, max_holes=2),
    Search(min_pt=0.2, d0=2.0, z0=0.0, min_hits=5, max_holes=1),
    # There are many more displaced seeds to pick from, so more hits must agree.
    Search(min_pt=0.4, d0=20.0, z0=200.0, min_hits=7, max_holes=1, everywhere=True),
)
"""Prompt tracks from the pixels, by falling momentum; then displaced ones from anywhere."""


BEAM_MARGIN = 13.68
"""mm beyond three widths of the beam spot within which tracks may leave the beam line: they point there no better."""


def reach_of(beam_spot: BeamSpot, least: float = 0.0) -> float:
    """Largest |z| in mm at which tracks leave the beam line."""
    return max(abs(beam_spot.z) + 3 * beam_spot.width + BEAM_MARGIN, least)


def find_tracks(
    position: FloatArray,
    volume: IntArray,
    layer: IntArray,
    module: IntArray,
    field: Field | None = None,
    beam_spot: BeamSpot = detector.BEAM_SPOT,
    searches: Sequence[Search] = SEARCHES,
) -> IntArray:
    """Find the tracks of one event of the TrackML detector.

    Seeds of three hits on neighbouring surfaces are followed through the detector by a combinatorial Kalman filter in
    the field, outward and back; of the candidates that share hits the better ones keep them.

    Args:
        position: x, y, z of each hit in mm, [N, 3].
        volume: TrackML volume of each hit, [N].
        layer: Layer in the volume, [N].
        module: Module in the layer, [N]: two hits of a track on one surface lie on different ones.
        field: The field; by default that of the TrackML events.
        beam_spot: Where collisions lie along the beam.
        searches: The searches, one after the other.

    Returns:
        Track of each hit, int64 [N]: 0, 1, ... by their first hit, or -1 for none. Equal hits give equal tracks on any
        machine to rounding, whatever the order of the hits.

    Raises:
        ValueError: If shapes do not agree, a position is not finite, or a hit lies on no TrackML surface.
    """
    hits, ptr, rows_of_caller = table_of(position, volume, layer, module)
    track_of = np.full(len(hits), -1, np.int64)
    count = 0
    for search in searches:
        scene = scene_of(hits, ptr, free=track_of < 0, field=detector.geometry().field if field is None else field)
        curvature = GEV_PER_TESLA_MM * scene.field.largest / search.min_pt
        # Multiple scattering: 13.6 MeV / p sqrt(x / X0).
        angle = 0.0136 * np.sqrt(RADIATION_LENGTHS) / search.min_pt
        limits = curvature, angle, search.d0, reach_of(beam_spot, search.z0)
        seeds = np.concatenate([find_seeds(chain, scene, *limits) for chain in chains(search.everywhere)])
        starts, rows, quality = follow_seeds(seeds, scene, search.min_hits, MIN_SURFACES, search.max_holes, room())
        best_first = np.argsort(-quality, kind="stable")
        count = resolve(starts, rows, best_first, track_of, count, MAX_SHARED, search.min_hits)
    track_id = np.empty_like(track_of)
    track_id[rows_of_caller] = track_of
    return number_tracks(track_id)


# --- surfaces and hits -----------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def layout() -> tuple[npt.NDArray[np.void], IntArray]:
    """The 48 surfaces, built once a process.

    Returns:
        `PLACE_DTYPE` [48], in the order of `detector.SURFACES`. And these in the order of an outward track, int64 [3,
        48]: barrels by radius; disks at negative z by |z|; disks at positive z by z. Rows are filled up with -1.
    """
    places = np.zeros(len(detector.SURFACES), PLACE_DTYPE)
    by_way: list[list[int]] = [[], [], []]
    for i, surface in enumerate(detector.SURFACES):
        variances = surface.sensor.pitch_u**2 / 12, surface.sensor.pitch_v**2 / 12
        if isinstance(surface, Barrel):
            half = (surface.num_rows - 1) / 2 * surface.row_pitch + surface.half_v
            places[i] = True, surface.radius, -half, half, *variances
            by_way[0].append(i)
        else:
            low = min(ring.radius - ring.half_v for ring in surface.rings)
            high = max(ring.radius + ring.half_v for ring in surface.rings)
            places[i] = False, surface.z, low, high, *variances
            by_way[1 if surface.z < 0 else 2].append(i)
    ways = np.full((3, len(places)), -1, np.int64)
    for way, of_way in zip(ways, by_way):
        # Disks of two volumes may have one z: the order of the detector's table decides.
        way[: len(of_way)] = sorted(of_way, key=lambda i: (abs(places["coordinate"][i]), i))
    return places, ways


def scene_of(hits: npt.NDArray[np.void], ptr: IntArray, free: BoolArray, field: Field) -> Scene:
    """The hits of `table_of` in the detector, those that may be taken `free`, bool [N]."""
    places, ways = layout()
    return Scene(
        hits=hits,
        phi=np.ascontiguousarray(hits["phi"]),
        ptr=ptr,
        free=free,
        places=places,
        ways=ways,
        field=field,
        gate=GATE,
        radiation_lengths=RADIATION_LENGTHS,
    )


def room() -> npt.NDArray[np.void]:
    """Room for the ways on that `follow_seeds` keeps at once."""
    return np.zeros((2, WAYS + 1), STATE_DTYPE)


@lru_cache(maxsize=2)
def chains(everywhere: bool) -> IntArray:
    """Places in `detector.SURFACES` of three neighbouring surfaces, outward, int64 [S, 3]: those of the pixels first.

    Neighbours are the measured layer pairs. Without `everywhere` the chains that leave the pixels are left out.
    """
    pairs = detector.SEED_LAYER_PAIRS
    layers = [(a, b, c) for a, b in pairs for again, c in pairs if again == b]
    inside = np.array([all(volume in PIXELS for volume, _layer in chain) for chain in layers])
    places = np.array([[NUMBERS[layer] for layer in chain] for chain in layers], np.int64)
    return np.concatenate([places[inside], places[~inside]]) if everywhere else places[inside]


def table_of(
    position: FloatArray, volume: IntArray, layer: IntArray, module: IntArray
) -> tuple[npt.NDArray[np.void], IntArray, IntArray]:
    """Sort the hits of an event by (surface, phi, z, r), whatever order they come in.

    Returns:
        `HIT_DTYPE` [N]; the first hit of each surface, and N, int64 [49]; the caller's row of each, int64 [N].

    Raises:
        ValueError: If shapes do not agree, a position is not finite, or a hit lies on no TrackML surface.
    """
    position = np.asarray(position, np.float64)
    check_positions(position)
    for name, column in {"volume": volume, "layer": layer, "module": module}.items():
        if np.shape(column) != (len(position),):
            raise ValueError(f"{name} has shape {np.shape(column)} for {len(position)} hits; give one to each hit.")
    check_finite(position)
    hits = np.zeros(len(position), HIT_DTYPE)
    hits["x"], hits["y"], hits["z"] = position.T
    hits["r"], hits["phi"] = np.hypot(hits["x"], hits["y"]), np.arctan2(hits["y"], hits["x"])
    hits["module"] = module
    hits["surface"] = surface_of(np.asarray(volume), np.asarray(layer))
    # By all columns: the order of the caller's hits must not decide anything.
    rows = np.lexsort((hits["module"], hits["r"], hits["z"], hits["phi"], hits["surface"]))
    hits = hits[rows]
    return hits, np.searchsorted(hits["surface"], np.arange(len(detector.SURFACES) + 1)), rows


def surface_of(volume: IntArray, layer: IntArray) -> IntArray:
    """Place of each hit's surface in `detector.SURFACES`.

    Raises:
        ValueError: If a hit lies on none of them.
    """
    present, place = np.unique(np.stack([volume, layer], axis=1), axis=0, return_inverse=True)
    unknown = [(int(v), int(n)) for v, n in present if (int(v), int(n)) not in NUMBERS]
    if unknown:
        raise ValueError(
            f"hits lie in volume {unknown[0][0]} layer {unknown[0][1]}, which is no surface of the TrackML detector "
            f"({len(unknown)} of {len(present)} layers are unknown); following helices needs the radius or z, extent "
            "and resolution of every surface, which are known for TrackML only."
        )
    surfaces = np.array([NUMBERS[int(v), int(n)] for v, n in present], np.int64)
    return np.asarray(surfaces[place.reshape(-1)])  # numpy 2.0 gives `place` the shape of the pairs


# --- candidates ------------------------------------------------------------------------------------------------------


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
