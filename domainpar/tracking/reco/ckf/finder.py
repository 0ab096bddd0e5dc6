"""Tracks from hits alone, by following helices: a measure for a network. No graph, no network, no truth.

The easiest tracks are looked for first: their hits are then out of the way of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.common.compiling import compiled
from domainpar.tracking.events import detector
from domainpar.tracking.events.beam_spot import BeamSpot
from domainpar.tracking.events.detector import GEV_PER_TESLA_MM
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.graph import BoolArray, IntArray
from domainpar.tracking.events.motion import HIGHLAND
from domainpar.tracking.reco.ckf.candidates import follow_seeds
from domainpar.tracking.reco.ckf.crossing import Scene
from domainpar.tracking.reco.ckf.detector_layout import Layout
from domainpar.tracking.reco.ckf.seeds import find_seeds
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.kalman import room
from domainpar.tracking.reco.segments import number_tracks

# Chosen on simulated events, as the searches below.
MAX_SHARED = 2  # hits that a track may lose to better ones and still be one, if enough remain
GATE = 16.0  # largest chi^2, with 2 degrees of freedom, of a hit against the prediction
WAYS = 3  # ways to go on that are kept at once for each seed
MIN_SURFACES = 4  # of a track found by following: any three hits nearly lie on a helix


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
    hits: TrackHits, beam_spot: BeamSpot = detector.BEAM_SPOT, searches: Sequence[Search] = SEARCHES
) -> IntArray:
    """Find the tracks of one event.

    Seeds of three hits on neighbouring surfaces are followed through the detector by a combinatorial Kalman filter in
    the field, outward and back; of the candidates that share hits the better ones keep them.

    Args:
        hits: The hits; two of a track on one surface lie on different modules.
        beam_spot: Where collisions lie along the beam.
        searches: The searches, one after the other.

    Returns:
        Track of each hit, int64 [N]: 0, 1, ... by their first hit, or -1 for none. Equal hits give equal tracks on any
        machine to rounding, whatever the order of the hits.

    Raises:
        ValueError: As `TrackHits.by_surface`.
    """
    layout = hits.surfaces
    table, ptr, rows_of_caller = hits.by_surface()
    track_of = np.full(len(table), -1, np.int64)
    count, thickest = 0, layout.places["material"].max()
    scene = scene_of(table, ptr, track_of < 0, Field.of(hits.field), layout)
    for search in searches:
        scene = scene._replace(free=track_of < 0)
        curvature = GEV_PER_TESLA_MM * scene.field.largest / search.min_pt
        angle = HIGHLAND * np.sqrt(thickest) / search.min_pt
        limits = curvature, angle, search.d0, reach_of(beam_spot, search.z0)
        chains = layout.everywhere if search.everywhere else layout.prompt
        seeds = np.concatenate([find_seeds(chain, scene, *limits) for chain in chains])
        limits_of_tracks = search.min_hits, MIN_SURFACES, search.max_holes
        starts, rows, quality = follow_seeds(seeds, scene, *limits_of_tracks, room((2, WAYS + 1)), False)
        best_first = np.argsort(-quality, kind="stable")
        count = resolve(starts, rows, best_first, track_of, count, MAX_SHARED, search.min_hits)
    track_id = np.empty_like(track_of)
    track_id[rows_of_caller] = track_of
    return number_tracks(track_id)


# --- surfaces and hits -----------------------------------------------------------------------------------------------


def scene_of(hits: npt.NDArray[np.void], ptr: IntArray, free: BoolArray, field: Field, layout: Layout) -> Scene:
    """The hits of `TrackHits.by_surface` in the detector, those that may be taken `free`, bool [N].

    A surface is as wide as the worst of its hits is measured there, across and along. The errors of `hits` are set to
    those of one cell: with the smaller ones of several cells, which fits take, the hits of fewer real tracks are found.
    """
    hits["thickness"] = 0.0
    places = layout.places.copy()
    sine, cosine, met = np.sin(hits["phi"]), np.cos(hits["phi"]), np.flatnonzero(np.diff(ptr))
    aside, along = np.stack([-sine, cosine, 0 * sine], axis=1), np.stack([cosine, sine, 0 * sine], axis=1)
    along[places["is_barrel"][hits["surface"]]] = [0.0, 0.0, 1.0]
    for name, axis in (("var_u", aside), ("var_v", along)):
        variance = sum(hits[f"var_{of}"] * np.einsum("ni,ni->n", hits[of], axis) ** 2 for of in "uv")
        if len(met):
            places[name][met] = np.maximum(places[name][met], np.maximum.reduceat(variance, ptr[met]))
    return Scene(
        hits=hits,
        phi=np.ascontiguousarray(hits["phi"]),
        ptr=ptr,
        free=free,
        places=places,
        ways=layout.ways,
        field=field,
        gate=GATE,
    )


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
