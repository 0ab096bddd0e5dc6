"""A stored event, whole and in the order of its source."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from domainpar.events.graph import Array, Hits, IntArray
from domainpar.events.store.event import StoredEvent


class WholeEvent:
    """All nodes and edges of an event, row after row as its source gave them. Arrays are read when they are asked for.

    Args:
        event: The event; it stays open as long as arrays are asked for.

    Raises:
        StoreError: From every reader, if the file is damaged.
    """

    def __init__(self, event: StoredEvent) -> None:
        self.event = event

    @cached_property
    def node_ids(self) -> IntArray:
        """Global id of each node of the source, int64 [N]."""
        return self.event.ids_in_users_order()

    @cached_property
    def edge_ids(self) -> IntArray:
        """Global id of each edge of the source, int64 [E]."""
        return _inverse(self.event.read_edges("original_position", np.arange(self.event.num_edges)))

    @cached_property
    def edge_index(self) -> IntArray:
        """Rows of `src` and `dst` of each edge, int64 [2, E]."""
        row = self.event.read_nodes("original_row", np.arange(self.event.num_nodes))
        src, dst = (self.event.read_edges(end, self.edge_ids) for end in ("src", "dst"))
        return np.asarray(row[np.stack([src, dst])])

    @cached_property
    def hits(self) -> Hits:
        """The nodes as the source gave them, with the particle table."""
        names = ("hit_id", "position", "volume", "layer", "module", "particle_id", "weight")
        columns: dict[str, Any] = {name: self.nodes(name) for name in names}
        return Hits(self.event.event_id, **columns, particles=self.event.particles())

    def nodes(self, name: str) -> Array | None:
        """One array of the nodes, [N, ...] as in the schema; None if the event has none."""
        return self.event.read_nodes(name, self.node_ids) if self.event.has(f"nodes/{name}") else None

    def edges(self, name: str) -> Array | None:
        """One array of the edges, [E, ...] as in the schema; None if the event has none."""
        return self.event.read_edges(name, self.edge_ids) if self.event.has(f"edges/{name}") else None


def _inverse(order: IntArray) -> IntArray:
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return inverse
