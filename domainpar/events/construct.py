"""Candidate edges of an event: pairs of hits on neighbouring layers that one particle from the beam could have left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

from domainpar.events import detector
from domainpar.events.detector import Layer, LayerPair
from domainpar.events.graph import EventGraph, Hits, check_hits, surface_numbers
from domainpar.problems import Place
from partitioners.topology import BoolArray, FloatArray, IntArray

NODE_FEATURES = ("r", "phi", "z")
EDGE_FEATURES = ("dr", "dphi", "dz", "deta", "phi_slope", "r_phi_slope")

NODE_SCALE = (1000.0, float(np.pi), 1000.0)
"""Node features are r, phi and z over these: m, half turns, m."""

SLOPE_LIMIT = 100.0
"""`phi_slope` as an edge feature is clamped to this; hits at one radius have none."""

TWO_PI = 2 * np.pi

# Two hits of one overlap are this close in r phi beyond what the slope cut allows: some resolutions, in mm.
OVERLAP_U = 0.3


@dataclass(frozen=True)
class Cuts:
    """Cuts on the pairs of hits that become candidate edges.

    Attributes:
        phi_slope: Largest |change of phi over change of r| in rad/mm; 0.0006 keeps particles above some 0.5 GeV.
        z0: Largest |z| in mm at which the straight line through both hits meets the beam.
        layer_pairs: (inner, outer) layers that may be joined, each a (volume, layer). An edge runs from inner to outer.
        same_layer: Also join hits of overlapping modules of one TrackML surface, from the one nearer to the origin.

    Raises:
        ValueError: If a cut is not a positive number, or the pairs are repeated or join a layer to itself.
    """

    phi_slope: float = 6e-4
    z0: float = 200.0
    layer_pairs: tuple[LayerPair, ...] = detector.DEFAULT_LAYER_PAIRS
    same_layer: bool = False

    def __post_init__(self) -> None:
        for name in ("phi_slope", "z0"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value > 0):
                raise ValueError(f"cut {name} is {value}; it must be a positive number.")
        seen: set[LayerPair] = set()
        for inner, outer in self.layer_pairs:
            if inner == outer:
                raise ValueError(f"layer pair {inner} -> {outer} joins a layer to itself; ask for same-layer edges.")
            if (inner, outer) in seen:
                raise ValueError(f"layer pair {inner} -> {outer} is given twice.")
            seen.add((inner, outer))


def build_graph(hits: Hits, cuts: Cuts) -> EventGraph:
    """Join the hits of an event by candidate edges, and label those when there is truth.

    Every edge runs outward: from the inner to the outer layer of its pair, to a larger radius. An edge is true when its
    hits belong to one particle and are next to each other along it: the particle's hits on one surface form one group,
    groups are ordered by distance from the production vertex (see `label_note`), and neighbours lie in one group or in
    consecutive ones. Noise is never true.

    Args:
        hits: The hits, with positions; labels need `particle_id`.
        cuts: The pairs to join.

    Returns:
        The graph in the order of `hits`. Node features r, phi, z over (1000 mm, pi, 1000 mm); edge features dr, dphi
        (wrapped to half a turn either way), dz of the scaled values, deta, phi_slope = dphi / dr (0 where undefined,
        clamped to 100) and r_phi_slope = mean scaled r x phi_slope. Edges follow the layer pairs, then phi of `src`.

    Raises:
        ValueError: If the event has no positions, columns of unequal length, positions that are not finite, hit ids
            used twice, or layers that are neither TrackML's nor named by the pairs.
    """
    place = Place(hits.event_id)
    if hits.position is None:
        raise place.problem("hits have no positions; candidate edges need x, y and z")
    check_hits(hits, place)
    ids, counts = np.unique(hits.hit_id, return_counts=True)
    if len(ids) != len(hits):
        raise place.problem(f"{len(hits) - len(ids)} hit ids are repeated, such as {ids[counts > 1][0]}")
    cylinder = _cylindrical(hits.position.astype(np.float64))
    rows = _rows_by_layer(hits, cylinder)
    _refuse_unknown_layers(rows, cuts, place)
    edge_index = np.concatenate([np.empty((2, 0), np.int64), *_joined(hits, rows, cuts, cylinder)], axis=1)
    return EventGraph(
        hits=hits,
        features=(cylinder[:, :3] / NODE_SCALE).astype(np.float32),
        feature_names=NODE_FEATURES,
        edge_index=edge_index,
        edge_features=_edge_features(edge_index, cylinder),
        edge_feature_names=EDGE_FEATURES,
        label=_label(hits, edge_index),
        label_note=label_note(hits),
    )


def edge_features(position: FloatArray, edge_index: IntArray) -> FloatArray:
    """The edge features of `build_graph`, named `EDGE_FEATURES`, for edges that came from elsewhere.

    Args:
        position: x, y, z of each node in mm, [N, 3].
        edge_index: `src` and `dst` of each edge, int64 [2, E].

    Returns:
        float32 [E, 6].
    """
    return np.asarray(_edge_features(edge_index, _cylindrical(np.asarray(position, np.float64))))


def label_note(hits: Hits) -> str | None:
    """A sentence on the order of hits along a particle that the labels follow; None without truth."""
    if hits.particle_id is None:
        return None
    has_vertex = np.isfinite(_production_vertex(hits)[hits.particle_id != 0]).all(axis=1)
    if has_vertex.all():
        return "hits ordered along a particle by distance from its production vertex"
    if not has_vertex.any():
        return "no production vertices: hits ordered along a particle by distance from the origin"
    return (
        f"hits ordered along a particle by distance from its production vertex, and from the origin for "
        f"{np.sum(~has_vertex)} of {len(has_vertex)} hits whose particle has no known vertex"
    )


# --- what enters -----------------------------------------------------------------------------------------------------


def _cylindrical(position: FloatArray) -> FloatArray:
    """r, phi in [-pi, pi), z and pseudorapidity of each hit, float64 [N, 4]."""
    x, y, z = position.T
    r = np.hypot(x, y)
    phi = np.arctan2(y, x)
    phi[phi >= np.pi] = -np.pi  # arctan2 gives pi itself, and the windows below are half open
    # A hit on the beam line has no pseudorapidity; a micrometre away it has a finite one.
    return np.stack([r, phi, z, np.arcsinh(z / np.maximum(r, 1e-3))], axis=1)


def _rows_by_layer(hits: Hits, cylinder: FloatArray) -> dict[Layer, IntArray]:
    """Rows of the hits of each (volume, layer) that has any, by phi."""
    present, layer_of_hit = np.unique(np.stack([hits.volume, hits.layer], axis=1), axis=0, return_inverse=True)
    layer_of_hit = layer_of_hit.reshape(-1)
    rows = np.lexsort((cylinder[:, 1], layer_of_hit))
    borders = np.searchsorted(layer_of_hit[rows], np.arange(1, len(present)))
    return dict(zip([(int(volume), int(layer)) for volume, layer in present], np.split(rows, borders)))


def _refuse_unknown_layers(rows: Mapping[Layer, IntArray], cuts: Cuts, place: Place) -> None:
    """Refuse hits on layers that nothing joins: all of them are listed, as --layer-pairs takes them."""
    named = {layer for pair in cuts.layer_pairs for layer in pair}
    unknown = sorted(set(rows) - named - detector.KNOWN_LAYERS)
    if not unknown:
        return
    own_pairs = cuts.layer_pairs != detector.DEFAULT_LAYER_PAIRS
    names = [f"{volume}.{layer}" for volume, layer in unknown]
    listed = ", ".join(f"{name} ({len(rows[layer]):,})" for name, layer in zip(names, unknown))
    pair = f"{names[0]}-{names[1] if len(names) > 1 else 'VOLUME.LAYER'}"
    how = "name each in a pair too" if own_pairs else "name what to join, from the inside out"
    raise place.problem(
        f"{sum(len(rows[layer]) for layer in unknown):,} of {sum(map(len, rows.values())):,} hits lie on layers that "
        f"are {'in none of the --layer-pairs given' if own_pairs else 'in no layer pair'} and not TrackML's, "
        f"VOLUME.LAYER (hits): {listed}",
        f"{how}: --layer-pairs '{pair}, ...'; docs/another_detector.md shows it, and how to find the pairs",
    )


# --- edges -----------------------------------------------------------------------------------------------------------


def _joined(hits: Hits, rows: Mapping[Layer, IntArray], cuts: Cuts, cylinder: FloatArray) -> Iterator[IntArray]:
    """Edges of each layer pair that has hits at both ends, then of each surface with overlaps, int64 [2, E]."""
    for inner, outer in cuts.layer_pairs:
        if inner in rows and outer in rows:
            yield _join_layers(rows[inner], rows[outer], cylinder, cuts.phi_slope, cuts.z0)
    module = np.asarray(hits.module, np.int64)
    for surface in detector.SURFACES if cuts.same_layer else ():
        if (layer := (surface.volume, surface.layer)) in rows:
            # The cuts are loosened by the resolution along a cell, which lies along z in a barrel, along r in a disk.
            cell = surface.sensor.pitch_v
            along_z, along_r = (cell, 0.0) if isinstance(surface, detector.Barrel) else (0.0, cell)
            yield _join_modules(rows[layer], cylinder, module, cuts.phi_slope, cuts.z0, along_z, along_r)


@numba.njit(cache=True)
def _wrapped(angle: float) -> float:
    """An angle in (-3 pi, 3 pi) brought into [-pi, pi)."""
    if angle >= np.pi:
        return angle - TWO_PI
    return angle + TWO_PI if angle < -np.pi else angle


@numba.njit(cache=True)
def _longer(edges: Any) -> Any:
    """The same edges with room for twice as many."""
    room = np.empty((2, 2 * edges.shape[1]), np.int64)
    room[:, : edges.shape[1]] = edges
    return room


@numba.njit(cache=True)
def _join_layers(inner: Any, outer: Any, cylinder: Any, phi_slope: float, z0: float) -> Any:
    """Edges from the hits `inner` to the hits `outer`, rows of two layers sorted by phi, int64 [2, E]."""
    phi = cylinder[outer, 1]
    largest_r = np.max(cylinder[outer, 0])
    edges = np.empty((2, 4 * len(inner) + 16), np.int64)
    count = 0
    for src in inner:
        r1, phi1, z1 = cylinder[src, 0], cylinder[src, 1], cylinder[src, 2]
        if largest_r <= r1:
            continue
        window = min(phi_slope * (largest_r - r1) * (1 + 1e-9) + 1e-12, np.pi)
        # The window may reach over +-pi at either end: then part of it lies a turn away.
        for turn in range(-1, 2):
            low, high = phi1 - window + turn * TWO_PI, phi1 + window + turn * TWO_PI
            if low >= np.pi or high < -np.pi:
                continue
            for j in range(np.searchsorted(phi, low), np.searchsorted(phi, high)):
                dst = outer[j]
                dr = cylinder[dst, 0] - r1
                # Refuses every dr <= 0 as well, so that edges run outward and the division below is safe.
                if abs(_wrapped(phi[j] - phi1)) >= phi_slope * dr:
                    continue
                if abs(z1 - r1 * (cylinder[dst, 2] - z1) / dr) >= z0:
                    continue
                if count == edges.shape[1]:
                    edges = _longer(edges)
                edges[0, count], edges[1, count] = src, dst
                count += 1
    return edges[:, :count].copy()


@numba.njit(cache=True)
def _join_modules(rows: Any, cylinder: Any, module: Any, phi_slope: float, z0: float, along_z: float, along_r: float
                  ) -> Any:  # fmt: skip
    """Edges between hits of one surface, sorted by phi, that lie on different modules; from nearer the origin outward.

    The cuts of layer pairs with both sides multiplied by |dr|, which may be nearly zero here, plus the resolution.
    """
    count = 0
    edges = np.empty((2, 4 * len(rows) + 16), np.int64)
    r_spread = np.max(cylinder[rows, 0]) - np.min(cylinder[rows, 0])
    for i in range(len(rows)):
        a = rows[i]
        ra, za = cylinder[a, 0], cylinder[a, 2]
        reach = min(phi_slope * r_spread + OVERLAP_U / max(ra, 1.0), np.pi)
        for step in range(1, len(rows)):
            b = rows[(i + step) % len(rows)]
            dphi = cylinder[b, 1] - cylinder[a, 1] + (TWO_PI if i + step >= len(rows) else 0.0)
            # Each pair is met once, from the hit that comes first when turning left by less than half a turn.
            if dphi > reach or dphi >= np.pi:
                break
            rb, zb = cylinder[b, 0], cylinder[b, 2]
            dr = rb - ra
            if module[a] == module[b] or dphi >= phi_slope * abs(dr) + OVERLAP_U / max(min(ra, rb), 1.0):
                continue
            if abs(za * dr - ra * (zb - za)) >= z0 * abs(dr) + ra * along_z + abs(za) * along_r:
                continue
            if count == edges.shape[1]:
                edges = _longer(edges)
            outward = ra * ra + za * za <= rb * rb + zb * zb
            edges[0, count], edges[1, count] = (a, b) if outward else (b, a)
            count += 1
    return edges[:, :count].copy()


@numba.njit(cache=True)
def _edge_features(edge_index: Any, cylinder: Any) -> Any:
    features = np.empty((edge_index.shape[1], 6), np.float32)
    for e in range(edge_index.shape[1]):
        src, dst = edge_index[0, e], edge_index[1, e]
        dr = (cylinder[dst, 0] - cylinder[src, 0]) / 1000.0
        dphi = _wrapped(cylinder[dst, 1] - cylinder[src, 1]) / np.pi
        # 0 / 0 has no slope and is 0; anything else over 0 is as steep as the limit.
        slope = 0.0
        if dphi != 0.0:
            slope = min(max(dphi / dr, -SLOPE_LIMIT), SLOPE_LIMIT) if dr != 0.0 else np.copysign(SLOPE_LIMIT, dphi)
        features[e, 0], features[e, 1] = dr, dphi
        features[e, 2] = (cylinder[dst, 2] - cylinder[src, 2]) / 1000.0
        features[e, 3] = cylinder[dst, 3] - cylinder[src, 3]
        features[e, 4] = slope
        features[e, 5] = 0.5 * (cylinder[src, 0] + cylinder[dst, 0]) / 1000.0 * slope
    return features


# --- truth -----------------------------------------------------------------------------------------------------------


def _production_vertex(hits: Hits) -> FloatArray:
    """Production vertex of the particle of each hit in mm, NaN where unknown, float64 [N, 3]."""
    vertex = np.full((len(hits), 3), np.nan)
    if hits.particles is None or hits.particle_id is None or len(hits.particles.particle_id) == 0:
        return vertex
    order = np.argsort(hits.particles.particle_id, kind="stable")
    ids = hits.particles.particle_id[order]
    at = np.minimum(np.searchsorted(ids, hits.particle_id), len(ids) - 1)
    listed = (ids[at] == hits.particle_id) & (hits.particle_id != 0)
    vertex[listed] = hits.particles.vertex[order[at[listed]]]
    return vertex


def _places_along_particles(hits: Hits) -> IntArray:
    """Place of each hit's group along its particle, 0 for the first; -1 for noise, int64 [N]."""
    assert hits.particle_id is not None
    assert hits.position is not None
    places = np.full(len(hits), -1, np.int64)
    rows = np.flatnonzero(hits.particle_id != 0)
    if len(rows) == 0:
        return places
    vertex = _production_vertex(hits)[rows]
    vertex[~np.isfinite(vertex).all(axis=1)] = 0.0
    distance = np.linalg.norm(hits.position[rows] - vertex, axis=1)
    particle = hits.particle_id[rows]
    surface = surface_numbers(hits.volume[rows], hits.layer[rows])
    # Nearest hit first within each group, so that a group's first row gives its distance.
    order = np.lexsort((distance, surface, particle))
    starts = _run_starts(particle[order], surface[order])
    group_of_row = np.cumsum(starts) - 1
    first = order[starts]
    by_distance = np.lexsort((surface[first], distance[first], particle[first]))
    # 0, 1, 2, ... along each particle: the count less that of the particle's first group.
    count = np.arange(len(first))
    place_of_group = np.empty(len(first), np.int64)
    place_of_group[by_distance] = count - np.maximum.accumulate(count * _run_starts(particle[first][by_distance]))
    places[rows[order]] = place_of_group[group_of_row]
    return places


def _run_starts(*columns: IntArray) -> BoolArray:
    """True where a row differs from the row before it."""
    starts = np.ones(len(columns[0]), bool)
    starts[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return starts


def _label(hits: Hits, edge_index: IntArray) -> IntArray | None:
    if hits.particle_id is None:
        return None
    places = _places_along_particles(hits)
    src, dst = edge_index
    one_particle = (hits.particle_id[src] == hits.particle_id[dst]) & (hits.particle_id[src] != 0)
    return np.asarray(one_particle & (np.abs(places[src] - places[dst]) <= 1), np.uint8)
