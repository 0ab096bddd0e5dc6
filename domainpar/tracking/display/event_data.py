"""One event, whole and in the user's order: hits, truth, edges, scores and tracks, as plain arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from domainpar.tracking.cost.cuts import STORED, Tiling
from domainpar.tracking.events.graph import BoolArray, FloatArray, IntArray, Particles
from domainpar.tracking.events.store import EventRecord, EventStore, WholeEvent
from domainpar.tracking.reco.event_scores import Scores
from domainpar.tracking.reco.performance.truth import EventTruth, truth_of
from domainpar.tracking.training.edge_classes import edge_classes
from partitioners import TileGraph

Conditions = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class EventData:
    """One event: N hits, E edges, M particles, K tiles, hits and edges in the user's order.

    Attributes:
        event_id: Name of the event.
        hit_id: The user's own number of each hit, int64 [N].
        position: x, y, z in mm, float32 [N, 3]; None for an event without a geometry.
        volume, layer: Detector volume and layer of each hit, int32 [N].
        tile: Tile of each hit, int64 [N].
        tiles: The tiles and the edges between them.
        edge_index: Rows of `src` and `dst` of each edge, int64 [2, E].
        label: 1 for a true segment, -1 where that is not known, int8 [E]; None without truth.
        particle_id: Particle of each hit, 0 for noise, int64 [N]; None without truth.
        particles: The particle table; None where it is unknown.
        target: Whether each particle of the table is a target of tracks, bool [M]; None without a table.
        edge_class: `FAKE`, `TARGET` or `OTHER` of `training.targets`, int8 [E]; None without truth. Its targets are
            those of the training.
        scores: Its scores and tracks; None where the event was not scored.
        truth: What tracks are compared with; None where the particles of hits are unknown.
    """

    event_id: str
    hit_id: IntArray
    position: FloatArray | None
    volume: IntArray
    layer: IntArray
    tile: IntArray
    tiles: TileGraph
    edge_index: IntArray
    label: IntArray | None
    particle_id: IntArray | None
    particles: Particles | None
    target: BoolArray | None
    edge_class: IntArray | None
    scores: Scores | None
    truth: EventTruth | None

    @cached_property
    def logit(self) -> FloatArray | None:
        """`Scores.ranked_logit` in float64; None where the event was not scored."""
        return None if self.scores is None else self.scores.ranked_logit.astype(np.float64)

    @property
    def num_hits(self) -> int:
        return len(self.hit_id)

    @property
    def num_edges(self) -> int:
        return int(self.edge_index.shape[1])

    @cached_property
    def particle_row(self) -> IntArray:
        """Row of each hit's particle in the table, -1 for noise and for particles not in it, int64 [N]."""
        if self.particle_id is None or self.particles is None or len(self.particles.particle_id) == 0:
            return np.full(self.num_hits, -1, np.int64)
        order = np.argsort(self.particles.particle_id, kind="stable")
        ids = self.particles.particle_id[order]
        # A particle beyond the last of the table is searched to a row that is not there.
        at = np.minimum(np.searchsorted(ids, self.particle_id), len(ids) - 1)
        listed = (ids[at] == self.particle_id) & (self.particle_id != 0)
        return np.where(listed, order[at], -1)

    @property
    def tiling(self) -> Tiling:
        """Its tiles, as they are cut into parts; with the truth, where particles are known."""
        label = None if self.particle_id is None else self.label
        return Tiling(STORED, self.edge_index, self.tiles, self.tile, label, self.particle_id)


def read_event_data(
    store: EventStore, record: EventRecord, scores: Path | None, edge_target: Conditions, track_target: Conditions
) -> EventData:
    """Read one event of a store, and its scores.

    Args:
        scores: File of its scores; None without.
        edge_target: Conditions on the target particles of the training; empty: every particle is one.
        track_target: Those on the targets of tracks. A condition is left out where its source does not know the values.

    Raises:
        StoreError: If a file is missing or damaged.
        ValueError: If the scores are not those of this event, or it lacks values that the training's conditions ask.
    """
    with store.open(record) as event:
        whole = WholeEvent(event)
        hits: dict[str, Any] = {
            name: whole.nodes(name) for name in ("hit_id", "position", "volume", "layer", "particle_id")
        }
        hits["tile"] = np.repeat(np.arange(event.num_tiles), np.diff(event.node_ptr))[whole.node_ids]
        edges: dict[str, Any] = {"edge_index": whole.edge_index, "label": whole.edges("label")}
        tiles, truth = event.tile_graph(), truth_of(event)
    own = None if scores is None else Scores.read(scores)
    # Not by the name alone: an event that is prepared with other cuts keeps its name.
    if own is not None and not (
        np.array_equal(own.hit_id, hits["hit_id"]) and np.array_equal(own.edge_index, edges["edge_index"])
    ):
        raise ValueError(
            f"{scores} holds scores of event {own.event_id} as it was prepared another time: its hits or "
            f"edges are not those of event {record.event} in this store; run infer again."
        )
    target, particles = None, None if truth is None else truth.particles
    if truth is not None and particles is not None:
        known = {}
        for name, condition in track_target.items():
            values = getattr(particles, name, None)
            if values is None or values.dtype.kind != "f" or not np.isnan(values).all():
                known[name] = condition
        target = truth.targets_among(particles.particle_id, known)
    edge_class = None
    if edges["label"] is not None and (particles is not None or not edge_target):
        of_edge = None if hits["particle_id"] is None else hits["particle_id"][edges["edge_index"][1]]
        edge_class = edge_classes(edges["label"], of_edge, particles, edge_target)
    return EventData(
        event_id=record.event,
        **hits,
        **edges,
        tiles=tiles,
        particles=particles,
        target=target,
        edge_class=edge_class,
        scores=own,
        truth=truth,
    )
