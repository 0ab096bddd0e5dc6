"""A stored event without some of its edges, in tiles of its own: what `prepare` would make of it, and no file."""

from __future__ import annotations

import numpy as np

from domainpar.tracking.events.graph import Array
from domainpar.tracking.events.store.event import StoredEvent, WholeEvent
from domainpar.tracking.events.store.schema import JOINING_EDGES
from domainpar.tracking.events.stored_order import stored_order
from partitioners import number_along_phi
from partitioners.topology import BoolArray, IntArray


class FilteredEvent(StoredEvent):
    """Some edges of a stored event, read as if a file held them alone; other columns come from that event.

    Args:
        event: The event; it stays open as long as this is read.
        kept: Which edges stay, in the user's order, bool [E].
        assignment: Tile of each node, in the user's order, [N].
        num_tiles: K.
    """

    def __init__(self, event: StoredEvent, kept: BoolArray, assignment: IntArray, num_tiles: int) -> None:
        vars(self).update(vars(event))
        self._of, whole = event, WholeEvent(event)
        if (position := whole.nodes("position")) is not None:  # as `write_event` numbers them
            assignment = number_along_phi(assignment, position, num_tiles)
        order = stored_order(whole.edge_index[:, kept], assignment.astype(np.int64), num_tiles)
        self.num_edges, self.num_tiles = len(order.src), num_tiles
        self.node_ptr, self.edge_ptr = order.node_ptr, order.edge_ptr
        self._src_tile, self._dst_tile, self._joining = order.src_tile, order.dst_tile, order.joining
        self._joining_ptr = np.concatenate([[0], np.cumsum(order.joining)])
        self._own = {f"edges/{name}": getattr(order, name) for name in ("src", "dst", "original_position")}
        self._own |= {"nodes/original_row": order.original_row, JOINING_EDGES: order.joining_edges}
        self._ids = {
            "nodes": whole.node_ids[order.original_row],
            "edges": whole.edge_ids[kept][order.original_position],
        }

    def _rows(self, name: str, ids: IntArray) -> Array:
        if name in self._own:
            return np.asarray(self._own[name][ids])
        return self._of._rows(name, self._ids[name.partition("/")[0]][ids])
