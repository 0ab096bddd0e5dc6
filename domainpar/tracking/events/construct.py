"""Candidate edges of an event: pairs of hits on neighbouring layers that one particle from the beam could have left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from domainpar.common.compiling import compiled
from domainpar.common.models import plain
from domainpar.common.problems import EventPlace
from domainpar.tracking.events import detector
from domainpar.tracking.events.detector import LayerPair
from domainpar.tracking.events.features import CLUSTER_FEATURES, EDGE_FEATURES, NODE_FEATURES, NODE_SCALE, SLOPE_LIMIT
from domainpar.tracking.events.graph import EventGraph, Hits, check_hits, surface_numbers
from domainpar.tracking.events.joining import DR, TWO_PI, Boxes, Regions, cylindrical, longer, wrapped
from domainpar.tracking.events.truth_order import places_along_particles, rows_of_table
from partitioners.topology import FloatArray, IntArray

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

    @property
    def settings(self) -> dict[str, Any]:
        """The cuts as plain JSON values: all that decides the edges."""
        settings: dict[str, Any] = plain(self)
        return settings

    def boxes(self) -> Boxes:
        """The layer pairs as regions with one box each."""
        layers, ends = np.unique(np.array(self.layer_pairs, np.int64).reshape(-1, 2), axis=0, return_inverse=True)
        src, dst = ends.reshape(-1, 2).T
        bounds = np.tile([self.phi_slope, self.z0, np.inf, np.inf, np.inf], (len(src), 1))
        low = -bounds
        low[:, DR] = 0.0
        regions = Regions(np.pad(layers, ((0, 0), (0, 1))))
        return Boxes(regions, np.empty(0), np.empty(0), src, dst, np.zeros(len(src), np.int64), low, bounds)

    def edges(self, hits: Hits, cylinder: FloatArray) -> IntArray:
        """Pairs of hits that pass (see `Candidates`): those of layer pairs, then those of surfaces with overlaps."""
        self._refuse_unknown_layers(hits)
        pairs = self.boxes().join(hits, cylinder)[:2]
        return np.concatenate([pairs, *self._same_layer(hits, cylinder)], axis=1)

    def _same_layer(self, hits: Hits, cylinder: FloatArray) -> Iterator[IntArray]:
        module = np.asarray(hits.module, np.int64)
        for surface in detector.SURFACES if self.same_layer else ():
            rows = np.flatnonzero((hits.volume == surface.volume) & (hits.layer == surface.layer))
            if len(rows):
                # The cuts are loosened by the resolution along a cell: along z in a barrel, along r in a disk.
                cell = surface.sensor.pitch_v
                along_z, along_r = (cell, 0.0) if surface.is_barrel else (0.0, cell)
                by_phi = rows[np.argsort(cylinder[rows, 1], kind="stable")]
                yield _join_modules(by_phi, cylinder, module, self.phi_slope, self.z0, along_z, along_r)

    def _refuse_unknown_layers(self, hits: Hits) -> None:
        """Refuse hits on layers that nothing joins: all of them are listed, as --layer-pairs takes them."""
        layers, counts = np.unique(np.stack([hits.volume, hits.layer], axis=1), axis=0, return_counts=True)
        named = {layer for pair in self.layer_pairs for layer in pair} | detector.KNOWN_LAYERS
        unknown = {(v, la): n for (v, la), n in zip(layers.tolist(), counts.tolist()) if (v, la) not in named}
        if not unknown:
            return
        own_pairs = self.layer_pairs != detector.DEFAULT_LAYER_PAIRS
        names = [f"{volume}.{layer}" for volume, layer in unknown]
        listed = ", ".join(f"{name} ({count:,})" for name, count in zip(names, unknown.values()))
        pair = f"{names[0]}-{names[1] if len(names) > 1 else 'VOLUME.LAYER'}"
        how = "name each in a pair too" if own_pairs else "name what to join, from the inside out"
        raise EventPlace(hits.event_id).problem(
            f"{sum(unknown.values()):,} of {len(hits):,} hits lie on layers that "
            f"are {'in none of the --layer-pairs given' if own_pairs else 'in no layer pair'} and not TrackML's, "
            f"VOLUME.LAYER (hits): {listed}",
            f"{how}: --layer-pairs '{pair}, ...'; docs/another_detector.md shows it, and how to find the pairs",
        )


class Candidates(Protocol):
    """What decides which pairs of hits become candidate edges."""

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides the edges, as plain JSON values."""

    def edges(self, hits: Hits, cylinder: FloatArray) -> IntArray:
        """Pairs of hits, each once.

        Args:
            hits: The hits of an event, with positions.
            cylinder: Theirs, of `cylindrical`.

        Returns:
            `src` and `dst` as rows of the hits, int64 [2, E].

        Raises:
            ValueError: If the hits are of another detector.
        """


def build_graph(hits: Hits, cuts: Candidates) -> EventGraph:
    """Join the hits of an event by candidate edges, and label those when there is truth.

    Every edge runs outward: from the inner to the outer layer of its pair, to a larger radius. An edge is true when its
    hits belong to one particle and are next to each other along it: the particle's hits on one surface form one group,
    groups are ordered by distance from the production vertex (see `label_note`), and neighbours lie in one group or in
    consecutive ones. Noise is never true.

    Args:
        hits: The hits, with positions; labels need `particle_id`.
        cuts: What decides the pairs to join.

    Returns:
        The graph in the order of `hits`, with the features of `features.FEATURES`; those of clusters where the hits
        have them. Edges follow the layer pairs, then phi of `src`.

    Raises:
        ValueError: If the event has no positions, columns of unequal length, positions that are not finite, hit ids
            used twice, or layers that are neither TrackML's nor named by the pairs.
    """
    place = EventPlace(hits.event_id)
    if hits.position is None:
        raise place.problem("hits have no positions; candidate edges need x, y and z")
    check_hits(hits, place)
    ids, counts = np.unique(hits.hit_id, return_counts=True)
    if len(ids) != len(hits):
        raise place.problem(f"{len(hits) - len(ids)} hit ids are repeated, such as {ids[counts > 1][0]}")
    cylinder = cylindrical(hits.position)
    edge_index = cuts.edges(hits, cylinder)
    label = None
    if hits.particle_id is not None:
        surface = surface_numbers(hits.volume, hits.layer)
        places = places_along_particles(hits.particle_id, surface, hits.position, hits.particles)
        src, dst = edge_index
        one_particle = (hits.particle_id[src] == hits.particle_id[dst]) & (hits.particle_id[src] != 0)
        label = np.asarray(one_particle & (np.abs(places[src] - places[dst]) <= 1), np.uint8)
    features = (cylinder[:, :3] / NODE_SCALE).astype(np.float32)
    of_clusters = () if hits.clusters is None else CLUSTER_FEATURES
    if hits.clusters is not None:
        features = np.concatenate([features, hits.clusters], axis=1)
    return EventGraph(
        hits=hits,
        features=features,
        feature_names=NODE_FEATURES + of_clusters,
        edge_index=edge_index,
        edge_features=_edge_features(edge_index, cylinder),
        edge_feature_names=EDGE_FEATURES,
        label=label,
        label_note=label_note(hits),
    )


def edge_features(position: FloatArray, edge_index: IntArray) -> FloatArray:
    """The edge features of `build_graph`, `features.OF_EDGES`, for edges that came from elsewhere.

    Args:
        position: x, y, z of each node in mm, [N, 3].
        edge_index: `src` and `dst` of each edge, int64 [2, E].

    Returns:
        float32 [E, 6].
    """
    return np.asarray(_edge_features(edge_index, cylindrical(np.asarray(position))))


def label_note(hits: Hits) -> str | None:
    """A sentence on the order of hits along a particle that the labels follow; None without truth."""
    if hits.particle_id is None:
        return None
    vertex = rows_of_table(hits.particles, hits.particle_id[hits.particle_id != 0], "vertex")
    has_vertex = np.asarray(np.isfinite(vertex).all(axis=1))
    if has_vertex.all():
        return "hits ordered along a particle by distance from its production vertex"
    if not has_vertex.any():
        return "no production vertices: hits ordered along a particle by distance from the origin"
    return (
        f"hits ordered along a particle by distance from its production vertex, and from the origin for "
        f"{np.sum(~has_vertex)} of {len(has_vertex)} hits whose particle has no known vertex"
    )


# --- edges -----------------------------------------------------------------------------------------------------------


@compiled
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
                edges = longer(edges)
            outward = ra * ra + za * za <= rb * rb + zb * zb
            edges[0, count], edges[1, count] = (a, b) if outward else (b, a)
            count += 1
    return edges[:, :count].copy()


@compiled
def _edge_features(edge_index: Any, cylinder: Any) -> Any:
    features = np.empty((edge_index.shape[1], 6), np.float32)
    for e in range(edge_index.shape[1]):
        src, dst = edge_index[0, e], edge_index[1, e]
        dr = (cylinder[dst, 0] - cylinder[src, 0]) / 1000.0
        dphi = wrapped(cylinder[dst, 1] - cylinder[src, 1]) / np.pi
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
