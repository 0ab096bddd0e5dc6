"""What an event is, before anybody cuts it: hits, particles and candidate edges, in the user's own order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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
    """

    particle_id: IntArray
    pt: FloatArray
    eta: FloatArray
    vertex: FloatArray
    nhits: IntArray
    charge: IntArray
    primary: IntArray | None = None
    pdg_id: IntArray | None = None


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

    def __len__(self) -> int:
        return len(self.hit_id)


def surface_numbers(volume: IntArray, layer: IntArray) -> IntArray:
    """A number for the (volume, layer) of each hit: equal for equal pairs only, 0 for (0, 0), int64 [N]."""
    return volume.astype(np.int64) * (1 << 32) + layer


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
        label: 1 for a true segment, 0 otherwise, uint8 [E]; None when there is no truth.
        label_note: How the labels were made, in a sentence for the user; None when the source gave them.
    """

    hits: Hits
    features: FloatArray
    feature_names: tuple[str, ...]
    edge_index: IntArray
    edge_features: FloatArray
    edge_feature_names: tuple[str, ...]
    label: IntArray | None = None
    label_note: str | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.hits)

    @property
    def num_edges(self) -> int:
        return int(self.edge_index.shape[1])
