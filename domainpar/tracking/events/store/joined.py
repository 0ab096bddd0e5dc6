"""Several events of a store, read as if they were one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from domainpar.tracking.events.graph import Array
from domainpar.tracking.events.store.event import StoredEvent
from partitioners import TileGraph
from partitioners.topology import EdgePolicy, IntArray


class JoinedEvents:
    """Several stored events as one graph, in which no edge joins two of them.

    Ids of nodes, edges and tiles count on from event to event. What computes on an event then computes on all of them
    at once, on any number of ranks, and a network whose bits do not depend on the grouping of tiles gives each event
    the bits that it has alone.

    Args:
        events: Events of one store, at least one; they stay open as long as this is read.

    Attributes:
        events: The same.
        event_id: Their names, for messages.
        place: The names, and the file of the first.
        has_labels: Whether the edges of all have labels.
        num_nodes, num_edges, num_tiles: Of all together.
        node_ptr, edge_ptr: As of `StoredEvent`.
    """

    def __init__(self, events: Sequence[StoredEvent]) -> None:
        self.events = tuple(events)
        self.event_id = ", ".join(event.event_id for event in events)
        self.place = replace(events[0].place, event=self.event_id)
        self.has_labels = all(event.has_labels for event in events)
        self._nodes, self._edges, self._tiles = (
            np.cumsum([0, *(getattr(event, name) for event in events)])
            for name in ("num_nodes", "num_edges", "num_tiles")
        )  # the first of each event, and the end of the last
        self.num_nodes, self.num_edges, self.num_tiles = (
            int(first[-1]) for first in (self._nodes, self._edges, self._tiles)
        )
        self.node_ptr, self.edge_ptr = (
            np.concatenate([[0], *(ptr[1:] + start for ptr, start in zip(ptrs, first))])
            for ptrs, first in (
                ([event.node_ptr for event in events], self._nodes),
                ([event.edge_ptr for event in events], self._edges),
            )
        )

    def tile_graph(self) -> TileGraph:
        """As of `StoredEvent`."""
        graphs = [event.tile_graph() for event in self.events]
        src, dst = (
            [getattr(graph, name) + np.int32(first) for graph, first in zip(graphs, self._tiles)]
            for name in ("src_tile", "dst_tile")
        )
        return TileGraph(
            node_counts=np.diff(self.node_ptr),
            edge_counts=np.diff(self.edge_ptr),
            src_tile=np.concatenate(src),
            dst_tile=np.concatenate(dst),
            joining=np.concatenate([graph.joining for graph in graphs]),
        )

    def read_nodes(self, name: str, ids: IntArray) -> Array:
        """As of `StoredEvent`."""
        return self._gathered(lambda event, own: event.read_nodes(name, own), ids, self._nodes)

    def read_edges(self, name: str, ids: IntArray) -> Array:
        """As of `StoredEvent`."""
        return self._gathered(lambda event, own: event.read_edges(name, own), ids, self._edges)

    def read_part_edges(self, tiles: IntArray, policy: EdgePolicy) -> tuple[IntArray, IntArray, IntArray]:
        """As of `StoredEvent`."""
        bounds = np.searchsorted(tiles, self._tiles)
        columns = []
        for number, event in enumerate(self.events):
            own = tiles[bounds[number] : bounds[number + 1]] - self._tiles[number]
            edge_ids, src, dst = event.read_part_edges(own, policy)
            columns.append((edge_ids + self._edges[number], src + self._nodes[number], dst + self._nodes[number]))
        edge_ids, src, dst = map(np.concatenate, zip(*columns))
        return edge_ids, src, dst

    def _gathered(self, read: Callable[[StoredEvent, IntArray], Array], ids: IntArray, first: IntArray) -> Array:
        """Rows with these ids, in any order, given the first id of each event."""
        event_of = np.searchsorted(first, ids, side="right") - 1
        order = np.argsort(event_of, kind="stable")
        own = np.split(ids[order], np.searchsorted(event_of[order], np.arange(1, len(self.events))))
        rows = np.concatenate([read(event, some - start) for event, some, start in zip(self.events, own, first)])
        in_order = np.empty_like(rows)
        in_order[order] = rows
        return in_order


Events = StoredEvent | JoinedEvents
"""One event, or several read as one."""
