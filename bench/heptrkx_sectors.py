"""The graphs of heptrkx's recipes: events to selected hits, candidate edges and sectors, and what the borders cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.tracking.events.construct import Cuts, build_graph
from domainpar.tracking.events.graph import Hits, IntArray

BARREL = ((8, 2), (8, 4), (8, 6), (8, 8), (13, 2), (13, 4), (13, 6), (13, 8), (17, 2), (17, 4))
"""(volume, layer) of the surfaces that heptrkx uses, outward; neighbours are joined."""

TARGET_PT, TARGET_HITS = 1.0, 3
"""Particles above this transverse momentum in GeV, with as many selected hits, are those that people want to find."""


@dataclass(frozen=True)
class Recipe:
    """Settings by which heptrkx prepares one set.

    Attributes:
        pt_min: Hits of particles up to this transverse momentum in GeV are removed, by truth.
        phi_slope: Cut on edges in rad/mm.
        z0: Cut on edges in mm.
        num_phi: Sectors in phi.
        num_eta: Sectors in eta.
        eta: Largest |eta| of a hit in a sector.
        true_weight: Weight of true edges in the loss; others have 1.
    """

    pt_min: float
    phi_slope: float
    z0: float
    num_phi: int
    num_eta: int
    eta: float
    true_weight: float

    @property
    def num_sectors(self) -> int:
        return self.num_phi * self.num_eta


RECIPES = {
    "small": Recipe(1.0, 1e-3, 200.0, 4, 1, 5.0, 3.0),
    "med": Recipe(0.5, 6e-4, 150.0, 4, 2, 5.0, 2.5),
    "big": Recipe(0.0, 6e-4, 100.0, 8, 2, 5.0, 5.0),
    "high": Recipe(0.0, 6e-4, 100.0, 8, 1, 2.0, 3.0),
}


@dataclass(frozen=True, eq=False)
class Graph:
    """The graph of an event or of a sector of it.

    Attributes:
        features: r and z in m, phi in units of half a sector, measured from its middle, float32 [N, 3].
        edge_index: Rows of `src` and `dst`, int64 [2, E].
        label: 1 where both ends belong to one particle, float32 [E].
    """

    features: npt.NDArray[np.float32]
    edge_index: IntArray
    label: npt.NDArray[np.float32]

    @property
    def num_nodes(self) -> int:
        return len(self.features)

    @property
    def num_edges(self) -> int:
        return len(self.label)

    @property
    def true_share(self) -> float:
        return float(self.label.mean()) if self.num_edges else 0.0


@dataclass(frozen=True, eq=False)
class Divided:
    """One event by one recipe.

    Attributes:
        whole: All its selected hits, without sectors.
        particle_id: Particle of each node of `whole`, int64 [N].
        is_target: Whether it is one that people want to find, bool [N].
        sector: Sector of each node of `whole`, -1 for those in none, int64 [N].
        sectors: Their graphs.
    """

    whole: Graph
    particle_id: IntArray
    is_target: npt.NDArray[np.bool_]
    sector: IntArray
    sectors: list[Graph]


def select_hits(hits: Hits, pt_min: float) -> Hits:
    """Those on barrel layers of particles above `pt_min`, the one with the smallest r of each particle and layer.

    Raises:
        ValueError: If the event lacks positions, truth or particles.
    """
    if hits.position is None or hits.particle_id is None or hits.particles is None:
        raise ValueError(f"event {hits.event_id}: these recipes select by truth; hits, truth and particles are needed.")
    passing = hits.particles.particle_id[hits.particles.pt > pt_min]  # not those whose momentum is unknown, NaN
    layer = np.full(len(hits), -1)
    for number, surface in enumerate(BARREL):
        layer[(hits.volume == surface[0]) & (hits.layer == surface[1])] = number
    rows = np.flatnonzero((layer >= 0) & np.isin(hits.particle_id, passing))
    r = np.hypot(*hits.position[rows, :2].T.astype(np.float64))
    # By particle, layer, then r: the first of each particle and layer is the one nearest to the beam.
    rows = rows[np.lexsort((r, layer[rows], hits.particle_id[rows]))]
    keys = np.stack([hits.particle_id[rows], layer[rows]])
    rows = rows[np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0))] if len(rows) else rows
    columns = ("hit_id", "position", "volume", "layer", "module", "particle_id")
    return replace(hits, **{name: getattr(hits, name)[rows] for name in columns}, weight=None)


def divide(hits: Hits, recipe: Recipe) -> Divided:
    """Select hits, join them, and cut the graph into sectors: an edge with ends in two of them is in none."""
    hits = select_hits(hits, recipe.pt_min)
    cuts = Cuts(phi_slope=recipe.phi_slope, z0=recipe.z0, layer_pairs=tuple(pairwise(BARREL)))
    src, dst = edge_index = build_graph(hits, cuts).edge_index
    assert hits.position is not None
    assert hits.particle_id is not None
    assert hits.particles is not None
    x, y, z = hits.position.T.astype(np.float64)
    r, phi = np.hypot(x, y), np.arctan2(y, x)
    label = (hits.particle_id[src] == hits.particle_id[dst]).astype(np.float32)
    whole = Graph(_features(r, phi, z, np.pi), edge_index, label)
    at_phi = _between(phi, np.linspace(-np.pi, np.pi, recipe.num_phi + 1))
    at_eta = _between(np.arcsinh(z / r), np.linspace(-recipe.eta, recipe.eta, recipe.num_eta + 1))
    sector = np.where((at_phi >= 0) & (at_eta >= 0), at_phi * recipe.num_eta + at_eta, -1)
    half = np.pi / recipe.num_phi
    features = _features(r, phi + np.pi - (2 * at_phi + 1) * half, z, half)
    graphs = []
    for number in range(recipe.num_sectors):
        inside = sector == number
        kept, row = inside[edge_index].all(axis=0), np.cumsum(inside) - 1
        graphs.append(Graph(features[inside], row[edge_index[:, kept]], label[kept]))
    fast = hits.particles.particle_id[hits.particles.pt > TARGET_PT]
    _, at, counts = np.unique(hits.particle_id, return_inverse=True, return_counts=True)
    is_target = np.isin(hits.particle_id, fast) & (counts[at] >= TARGET_HITS)
    return Divided(whole, hits.particle_id, is_target, sector, graphs)


def _features(r: Any, phi: Any, z: Any, half_turn: float) -> npt.NDArray[np.float32]:
    return np.stack([r / 1000, phi / half_turn, z / 1000], axis=1).astype(np.float32)


def _between(values: npt.NDArray[Any], borders: npt.NDArray[Any]) -> IntArray:
    """The interval of each value, -1 outside of all and on a border."""
    number = np.searchsorted(borders, values) - 1
    inside = (number >= 0) & (number < len(borders) - 1) & ~np.isin(values, borders)
    return np.where(inside, number, -1)


def losses_of(event: Divided) -> dict[str, int]:
    """Numbers of things that borders cut in one event, and of all such things."""
    (src, dst), true = event.whole.edge_index, event.whole.label > 0
    cut = (event.sector[src] != event.sector[dst]) | (event.sector[src] < 0)
    target = true & event.is_target[src]
    masks = {"edges": np.ones_like(true), "true": true, "target": target}
    losses = {name: int(np.sum(cut & mask)) for name, mask in masks.items()}
    losses |= {f"{name}_of": int(np.sum(mask)) for name, mask in masks.items()}
    losses["broken"] = len(np.unique(event.particle_id[src[cut & target]]))
    losses["broken_of"] = len(np.unique(event.particle_id[src[target]]))
    losses["nodes"], losses["nodes_of"] = int(np.sum(event.sector < 0)), event.whole.num_nodes
    return losses
