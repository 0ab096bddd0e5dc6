"""Files of whole events, written: the same bytes from the same values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from domainpar.common.problems import EventPlace
from domainpar.tracking.events.graph import Array, EventGraph, check_array, checked
from domainpar.tracking.events.labels import Label, check_labels, labels_in
from domainpar.tracking.events.store.arrays import write_arrays
from domainpar.tracking.events.store.event import StoredEvent
from domainpar.tracking.events.store.layout import EventRecord, Settings, event_file_name, settings_digest
from domainpar.tracking.events.store.schema import JOINING_EDGES, in_file_type, names_in
from domainpar.tracking.events.stored_order import stored_order
from partitioners import number_along_phi
from partitioners.topology import IntArray


def write_event(
    path: Path,
    graph: EventGraph,
    assignment: IntArray,
    num_tiles: int,
    *,
    settings: Settings | None = None,
    source_digest: str = "",
) -> EventRecord:
    """Write one event in stored order; the file appears under its name when it is complete, never before.

    Args:
        path: File to write. Its directory is made where it is missing; a file of this name is replaced.
        graph: The event in the user's order.
        assignment: Tile of each node, [N], in [0, num_tiles). A tile may be empty.
        num_tiles: K, at least 1. When the event has positions, tiles are numbered along phi in the file, unless they
            follow it already; otherwise they keep their numbers.
        settings: Settings of the preparation, plain JSON values. A later preparation compares them.
        source_digest: Hash of the input that the event was read from, compared likewise.

    Returns:
        What the manifest will say of it, with split `train`.

    Raises:
        Problem: If the arrays do not fit together, an edge or the assignment names what does not exist,
            a label is none, or a feature is not finite. Names event and place.
    """
    path = Path(path)
    place = EventPlace(graph.hits.event_id)
    graph = checked(graph, place)
    event_file_name(graph.hits.event_id)  # refuses what cannot name a file
    check_labels(graph.node_labels, graph.graph_labels, graph.num_nodes, place)
    assignment = np.asarray(assignment)
    if num_tiles < 1:
        raise place.problem(f"num_tiles is {num_tiles}, expected at least 1")
    check_array(place, "assignment", assignment, (graph.num_nodes,), "integers")
    if graph.num_nodes and not 0 <= assignment.min() <= assignment.max() < num_tiles:
        used = f"tiles {assignment.min()} to {assignment.max()}"
        raise place.problem(f"assignment uses {used} but num_tiles is {num_tiles}")
    if graph.hits.position is not None:
        # Ranges of tile numbers, of which ranks' parts are made, are then sectors.
        assignment = number_along_phi(assignment, graph.hits.position, num_tiles)
    arrays = _stored_arrays(graph, assignment.astype(np.int64), num_tiles)
    labels = labels_in(graph.node_labels, graph.graph_labels)
    attributes = {
        "format": "domainpar event",
        "event": graph.hits.event_id,
        "num_nodes": graph.num_nodes,
        "num_edges": graph.num_edges,
        "num_tiles": num_tiles,
        "feature_names": list(graph.feature_names),
        "edge_feature_names": list(graph.edge_feature_names),
        "settings": dict(settings or {}),
        "settings_digest": settings_digest(settings or {}),
        "source_digest": source_digest,
        "label_note": graph.label_note,
        **({"labels": _described(graph, labels)} if labels else {}),
    }
    sha256 = write_arrays(path, arrays, attributes)
    with StoredEvent(path, sha256=sha256) as event:
        return event.record


def _described(graph: EventGraph, labels: Sequence[Label]) -> list[list[Any]]:
    """Name, owner, classes and value of each label; values of nodes are in an array, one not known is None."""
    values = {name: None if value != value else value for name, value in graph.graph_labels.items()}
    return [[*label, values.get(label.name)] for label in labels]


def _stored_arrays(graph: EventGraph, assignment: IntArray, num_tiles: int) -> dict[str, Array]:
    """Every array of the file by its name in it, in stored order; what is not known is not there."""
    hits, order = graph.hits, stored_order(graph.edge_index, assignment, num_tiles)
    nodes = {name: getattr(hits, name, None) for name in names_in("nodes")} | {"features": graph.features}
    if graph.node_labels:
        nodes["labels"] = np.stack([labels.astype(np.float32) for labels in graph.node_labels.values()], axis=1)
    edges = {"label": graph.label, "features": graph.edge_features}
    arrays = {f"nodes/{name}": values[order.original_row] for name, values in nodes.items() if values is not None}
    arrays |= {f"edges/{name}": values[order.original_position] for name, values in edges.items() if values is not None}
    arrays |= {"nodes/original_row": order.original_row, JOINING_EDGES: order.joining_edges}
    arrays |= {f"edges/{name}": getattr(order, name) for name in ("src", "dst", "original_position")}
    for name in ("node_ptr", "edge_ptr", "src_tile", "dst_tile", "joining"):
        arrays[f"tiles/{name}"] = getattr(order, name)
    if hits.particles is not None:
        columns = {f"particles/{name}": getattr(hits.particles, name) for name in names_in("particles")}
        arrays |= {name: values for name, values in columns.items() if values is not None}
    try:
        return {name: in_file_type(name, values) for name, values in arrays.items()}
    except ValueError as error:
        raise EventPlace(hits.event_id).attach_to(error) from error
