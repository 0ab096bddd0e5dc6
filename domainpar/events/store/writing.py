"""One event into its file, in stored order."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from domainpar.atomic_files import write_whole
from domainpar.events.graph import Array, EventGraph, IntArray, check_graph
from domainpar.events.store.layout import EventRecord, Settings, settings_digest, sha256_of
from domainpar.events.store.schema import JOINING_EDGES, SCHEMA_VERSION, in_file_type, names_in
from domainpar.events.store.zip_files import chunks_of_rows, zip_content
from domainpar.events.stored_order import StoredOrder, stored_order
from domainpar.problems import Place
from partitioners import number_along_phi


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
            a label is not 0 or 1, or a feature is not finite. Names event and place.
    """
    path = Path(path)
    place = Place(graph.hits.event_id)
    check_graph(graph, place)
    assignment = _checked_assignment(assignment, graph.num_nodes, num_tiles, place)
    if graph.hits.position is not None:
        assignment = number_along_phi(assignment, graph.hits.position, num_tiles)
    arrays = _arrays(graph, stored_order(graph.edge_index, np.asarray(assignment, np.int64), num_tiles))
    attributes = {
        "format": "domainpar event",
        "schema_version": SCHEMA_VERSION,
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
        "arrays": {name: {"shape": list(a.shape), "dtype": str(a.dtype)} for name, a in arrays.items()},
    }
    content = zip_content(arrays, attributes, chunks_of_rows)
    write_whole(path, content)
    return EventRecord(
        event=graph.hits.event_id,
        path=path.name,
        bytes=len(content),
        sha256=sha256_of(content),
        num_nodes=graph.num_nodes,
        num_edges=graph.num_edges,
        num_tiles=num_tiles,
        has_labels=graph.label is not None,
        feature_names=tuple(graph.feature_names),
        edge_feature_names=tuple(graph.edge_feature_names),
    )


def _checked_assignment(assignment: IntArray, num_nodes: int, num_tiles: int, place: Place) -> IntArray:
    if num_tiles < 1:
        raise place.problem(f"num_tiles is {num_tiles}, expected at least 1")
    if np.shape(assignment) != (num_nodes,):
        raise place.problem(f"assignment has shape {list(np.shape(assignment))}, expected [{num_nodes}]")
    if num_nodes and not 0 <= assignment.min() <= assignment.max() < num_tiles:
        raise place.problem(
            f"assignment uses tiles {assignment.min()} to {assignment.max()} but num_tiles is {num_tiles}"
        )
    return np.asarray(assignment, np.int64)


def _arrays(graph: EventGraph, order: StoredOrder) -> dict[str, Array]:
    """Every array of the file by its name in it; what is not known is not there."""
    hits = graph.hits
    nodes = {name: getattr(hits, name, None) for name in names_in("nodes")} | {"features": graph.features}
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
        raise Place(hits.event_id).of(error) from error
