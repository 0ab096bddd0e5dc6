"""Tracks from hits alone, by following helices: what a network is held against. No graph, no network, no truth."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from domainpar.events import detector
from domainpar.events.detector import GEV_PER_TESLA_MM
from domainpar.events.graph import FloatArray, IntArray
from domainpar.reco.classical.ambiguity import resolve
from domainpar.reco.classical.crossing import Scene
from domainpar.reco.classical.following import follow_seeds
from domainpar.reco.classical.options import FinderOptions
from domainpar.reco.classical.passes import Pass, passes
from domainpar.reco.classical.seeds import find_seeds
from domainpar.reco.classical.states import STATE_DTYPE
from domainpar.reco.classical.surfaces import HitTable, layout, table_of
from domainpar.reco.tracks import number_tracks


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
        options: How far to look; the defaults if None.

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
    found = np.empty_like(track_of)
    found[table.rows] = track_of
    return number_tracks(found)


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
    found = [find_seeds(chain, scene, curvature, angle, search.d0, search.z0) for chain in search.chains]
    return np.concatenate(found)
