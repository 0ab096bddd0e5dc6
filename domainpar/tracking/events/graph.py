"""An event before it is cut: hits, particles and candidate edges in the user's order, and what they must satisfy."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.common.problems import EventPlace
from domainpar.common.words import several
from partitioners.topology import BoolArray as BoolArray
from partitioners.topology import FloatArray as FloatArray
from partitioners.topology import IntArray as IntArray

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Particles:
    """The true particles of one event, one row each.

    Attributes:
        particle_id: Unique, never 0 (0 means noise at a hit), int64 [M].
        pt: Transverse momentum at production in GeV, NaN where unknown, float32 [M].
        eta: Pseudorapidity at production, NaN where unknown, float32 [M].
        vertex: Production vertex in mm, NaN where unknown, float32 [M, 3].
        nhits: Hits the particle left in the detector, int32 [M].
        charge: Sign of the charge, 0 where unknown, int8 [M].
        primary: 1 if it comes from the collision itself, else 0, int8 [M]; None when unknown.
        pdg_id: Number of its kind by the Particle Data Group, 0 where unknown, int64 [M]; None when unknown.
        phi: Azimuth of its direction at production in rad, NaN where unknown, float32 [M]; None when unknown.
    """

    particle_id: IntArray
    pt: FloatArray
    eta: FloatArray
    vertex: FloatArray
    nhits: IntArray
    charge: IntArray
    primary: IntArray | None = None
    pdg_id: IntArray | None = None
    phi: FloatArray | None = None

    @property
    def radius(self) -> FloatArray:
        """Distance of the production vertex from the beam in mm, NaN where unknown, [M]."""
        return np.hypot(self.vertex[:, 0], self.vertex[:, 1])

    @property
    def vz(self) -> FloatArray:
        """z of the production vertex in mm, NaN where unknown, [M]."""
        return self.vertex[:, 2]

    @classmethod
    def from_table(cls, particle_id: IntArray, table: Mapping[str, Array], at_hits: IntArray) -> Particles:
        """The particles of a table of a file, and behind them, as unknown, those that left hits and are not in it.

        Args:
            particle_id: That of each row, [M].
            table: The columns that are known, [M] each: pt in GeV and eta, or px, py, pz in GeV; vx, vy, vz in mm,
                charge, nhits, primary, pdg_id. Without nhits, or where it is NaN, hits are counted.
            at_hits: The particle of each hit, 0 for noise, [N].
        """
        ids = np.concatenate([particle_id, np.setdiff1d(at_hits[at_hits != 0], particle_id)]).astype(np.int64)

        def column(name: str) -> FloatArray:
            """A column, NaN where it is unknown, float64."""
            values = np.full(len(ids), np.nan)
            if name in table:
                values[: len(particle_id)] = table[name]
            return values

        px, py, pz, nhits = (column(name) for name in ("px", "py", "pz", "nhits"))
        pt = column("pt") if "pt" in table else np.hypot(px, py)
        with np.errstate(divide="ignore", invalid="ignore"):
            eta = column("eta") if "eta" in table else np.where(pt > 0, np.arcsinh(pz / pt), np.nan)
        particles = cls(
            particle_id=ids,
            pt=pt.astype(np.float32),
            eta=eta.astype(np.float32),
            vertex=np.stack([column(name) for name in ("vx", "vy", "vz")], axis=1).astype(np.float32),
            nhits=np.zeros(len(ids), np.int32),
            charge=np.nan_to_num(np.sign(column("charge"))).astype(np.int8),
            primary=(column("primary") > 0).astype(np.int8) if "primary" in table else None,
            pdg_id=np.nan_to_num(column("pdg_id")).astype(np.int64) if "pdg_id" in table else None,
            phi=np.arctan2(py, px).astype(np.float32) if {"px", "py"} <= set(table) else None,
        ).counted_in(at_hits)
        return replace(particles, nhits=np.where(np.isnan(nhits), particles.nhits, nhits).astype(np.int32))

    def counted_in(self, particle_id: IntArray) -> Particles:
        """The same with `nhits` that count their hits among some, given the particle of each hit, [N]."""
        rows = self.rows(particle_id)
        return replace(self, nhits=np.bincount(rows[rows >= 0], minlength=len(self.nhits)).astype(np.int32))

    def rows(self, particle_id: IntArray) -> IntArray:
        """The row of each of some particles, [n], in this table; -1 of one that is not listed, int64 [n]."""
        order = np.argsort(self.particle_id, kind="stable")
        if not len(order):
            return np.full(len(particle_id), -1)
        # An id beyond the last would be looked up past the end.
        at = np.minimum(np.searchsorted(self.particle_id, particle_id, sorter=order), len(order) - 1)
        return np.where(self.particle_id[order[at]] == particle_id, order[at], -1)


@dataclass(frozen=True, eq=False)
class Hits:
    """The nodes of one event.

    Attributes:
        event_id: Name of the event, unique in its source.
        hit_id: The user's own number of each hit, int64 [N].
        position: x, y, z in mm, float32 [N, 3]; None for a graph without a geometry.
        volume: Detector volume, int32 [N]; 0 where there is none.
        layer: Layer within the volume, int32 [N].
        module: Module within the layer, int32 [N].
        particle_id: Particle of each hit, 0 for noise, int64 [N]; None when there is no truth.
        weight: Truth weight of each hit, float32 [N]; None when unknown.
        particles: The particle table; None when unknown.
        clusters: `features.OF_CLUSTERS` of each hit, float32 [N, 6]; None without.
        measured: What the hit's module measures: two axes u and v on it, unit vectors, and the errors (sigma) along
            them in mm, infinite along v where it measures u alone, float32 [N, 8]; NaN where the source does not have
            them, None where it has none.
    """

    event_id: str
    hit_id: IntArray
    position: FloatArray | None
    volume: IntArray
    layer: IntArray
    module: IntArray
    particle_id: IntArray | None = None
    weight: FloatArray | None = None
    particles: Particles | None = None
    clusters: FloatArray | None = None
    measured: FloatArray | None = None

    @classmethod
    def bare(cls, event_id: str, hit_id: IntArray, position: FloatArray | None) -> Hits:
        """Hits of which neither detector nor particles are known."""
        unknown = np.zeros(len(hit_id), np.int32)
        return cls(event_id, hit_id, position, volume=unknown, layer=unknown, module=unknown)

    def __len__(self) -> int:
        return len(self.hit_id)

    def take(self, rows: Array) -> Hits:
        """Some of the hits, by their rows or as a mask, [N]; the particle table stays as it is."""
        columns = {
            one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("event_id", "particles")
        }
        return replace(self, **{name: values[rows] for name, values in columns.items() if values is not None})

    @property
    def fingerprint(self) -> str:
        """16 digits of a hash of the numbers and positions of the hits: of an event, whatever joins or cuts it."""
        digest = hashlib.sha256(np.ascontiguousarray(self.hit_id, np.int64).tobytes())
        if self.position is not None:
            digest.update(np.ascontiguousarray(self.position, np.float32).tobytes())
        return digest.hexdigest()[:16]


def modules_of_32_bits(module: IntArray) -> IntArray:
    """Numbers of modules as `Hits` holds them, int32 [N]: the given ones, or if one needs more bits, new ones.

    Those that are new count the modules of the event, from 0 up and down, in the order of the given numbers.
    """
    # Cut off, numbers of 64 bits, as ATLAS gives its modules, would fall together.
    most = np.iinfo(np.int32)
    if len(module) and (int(module.min()) < most.min or int(module.max()) > most.max):
        given = np.unique(np.append(module, 0))
        module = np.searchsorted(given, module) - np.searchsorted(given, 0)
    return module.astype(np.int32)


def surface_numbers(volume: IntArray, layer: IntArray) -> IntArray:
    """A number for the (volume, layer) of each hit: equal for equal pairs only, 0 for (0, 0), int64 [N]."""
    # The layer in the lower 32 bits, which it never leaves.
    return volume.astype(np.int64) * (1 << 32) + layer


def volumes_and_layers(surface: IntArray) -> tuple[IntArray, IntArray]:
    """Volume and layer of each of these numbers, int64 [N] each."""
    return tuple(np.divmod(surface, 1 << 32))  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class EventGraph:
    """One event as a directed graph: `N` hits, `E` candidate edges, `src` -> `dst`.

    Attributes:
        hits: The nodes.
        features: Node features, float32 [N, F].
        feature_names: Name of each node feature, length F.
        edge_index: Rows of `src` and `dst`, int64 [2, E].
        edge_features: Edge features, float32 [E, G]; G may be 0.
        edge_feature_names: Name of each edge feature, length G.
        label: 1 for a true segment, 0 for another edge, -1 for one of which that is not known, [E]; None when there is
            no truth.
        label_note: How the labels were made, in a sentence for the user; None when the source gave them.
        node_labels: Other labels of nodes by name, [N] each, see `events.labels`.
        graph_labels: Labels of the whole event by name.
    """

    hits: Hits
    features: FloatArray
    feature_names: tuple[str, ...]
    edge_index: IntArray
    edge_features: FloatArray
    edge_feature_names: tuple[str, ...]
    label: IntArray | None = None
    label_note: str | None = None
    node_labels: Mapping[str, Array] = field(default_factory=dict)
    graph_labels: Mapping[str, int | float] = field(default_factory=dict)

    def take_edges(self, kept: Array) -> EventGraph:
        """The same with some of its edges, by their columns or as a mask, [E]."""
        return replace(
            self,
            edge_index=self.edge_index[:, kept],
            edge_features=self.edge_features[kept],
            label=None if self.label is None else self.label[kept],
        )

    @property
    def num_nodes(self) -> int:
        return len(self.hits)

    @property
    def num_edges(self) -> int:
        return int(self.edge_index.shape[1])


def checked(graph: EventGraph, place: EventPlace) -> EventGraph:
    """Refuse a graph whose arrays do not fit together or hold values that cannot be computed with.

    Args:
        graph: The event.
        place: The event and its file.

    Returns:
        The graph with its labels of edges, which may have come as any numbers, as uint8, or int8 if some are unknown.

    Raises:
        Problem: Naming event, file, the array, and the first bad value with its place in it.
    """
    check_hits(graph.hits, place)
    check_array(place, "features", graph.features, (graph.num_nodes, len(graph.feature_names)))
    check_ends(place, "edge_index", graph.edge_index, graph.num_nodes)
    check_array(place, "edge_features", graph.edge_features, (graph.num_edges, len(graph.edge_feature_names)))
    check_finite(place, "features", graph.features)
    check_finite(place, "edge_features", graph.edge_features)
    if (label := graph.label) is None:
        return graph
    check_array(place, "label", label, (graph.num_edges,))
    bad = np.flatnonzero((label != 0) & (label != 1) & (label != -1))
    if len(bad):
        what = f"label of edge {bad[0]} is {label[bad[0]]}, expected 0 or 1, or -1 where it is not known"
        raise place.problem(f"{what} ({len(bad)} such edges)")
    return replace(graph, label=label.astype(np.int8 if (label < 0).any() else np.uint8))


def check_array(
    place: EventPlace, name: str, values: Array, shape: tuple[int | str, ...], expected: str = "numbers", hint: str = ""
) -> None:
    """Refuse an array of another shape, or of other values than numbers.

    Args:
        place: The event and its file.
        name: Name of the array in the file.
        values: The array.
        shape: The shape it must have; a word stands for any size.
        expected: What it should hold; of `integers` nothing else is taken.
        hint: What to do about it.

    Raises:
        Problem: With the type and shape that it has, and those expected.
    """
    fits = values.ndim == len(shape) and all(isinstance(n, str) or n == size for n, size in zip(shape, values.shape))
    if not fits or values.dtype.kind not in ("iu" if expected == "integers" else "biuf"):
        what = f"{name} is {values.dtype} of shape {list(values.shape)}, expected {expected}"
        raise place.problem(f"{what} [{', '.join(map(str, shape))}]", hint)


def check_ends(place: EventPlace, name: str, ends: Array, num_nodes: int, least: int = 0) -> None:
    """Refuse edges that are not integers [2, E], or that name a node outside [least, num_nodes)."""
    check_array(place, name, ends, (2, "edges"), "integers")
    bad = np.flatnonzero(((ends < least) | (ends >= num_nodes)).any(axis=0))
    if len(bad):
        src, dst = ends[:, bad[0]].tolist()
        raise place.problem(
            f"{name} names nodes that do not exist in {len(bad)} edges, the first is edge {bad[0]}: "
            f"{src} -> {dst}; the event has nodes 0 to {num_nodes - 1}"
        )


def check_finite(place: EventPlace, name: str, values: FloatArray) -> None:
    """Refuse NaN and infinity, naming the first bad row."""
    # A sum is non-finite whenever a term is, and eight times faster than testing every term.
    # It may overflow without a bad term, so only its "finite" is a verdict.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum()):
            return
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        first = tuple(int(i) for i in bad[0])
        raise place.problem(
            f"{name} holds {several(len(bad), 'value')} not finite, the first is {values[first]} at {list(first)}",
            "repair or remove it in the input",
        )


def check_hits(hits: Hits, place: EventPlace) -> None:
    """Refuse columns of unequal length, and positions or weights that are not finite.

    Raises:
        Problem: Naming the column.
    """
    for name in ("volume", "layer", "module", "particle_id", "weight"):
        if (values := getattr(hits, name)) is not None:
            check_array(place, name, values, (len(hits),))
    if hits.measured is not None:
        check_array(place, "measured", hits.measured, (len(hits), 8))
    if hits.position is not None:
        check_array(place, "position", hits.position, (len(hits), 3))
        check_finite(place, "position", hits.position)
    if hits.weight is not None:
        check_finite(place, "weight", hits.weight)
