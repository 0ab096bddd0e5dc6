"""zarr zips of named arrays and of whole events: the same bytes from the same values."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from domainpar.common.atomic_files import write_whole
from domainpar.common.problems import EventPlace
from domainpar.tracking.events.beam_spot import BeamSpot
from domainpar.tracking.events.graph import Array, EventGraph, check_array, checked
from domainpar.tracking.events.labels import Label, check_labels, labels_in
from domainpar.tracking.events.store.archive import Archive
from domainpar.tracking.events.store.layout import EventRecord, Settings, StoreError, settings_digest, sha256_of
from domainpar.tracking.events.store.schema import JOINING_EDGES, SCHEMA_VERSION, in_file_type, names_in
from domainpar.tracking.events.stored_order import stored_order
from partitioners import number_along_phi
from partitioners.topology import IntArray

NODES_PER_CHUNK = 16_384
EDGES_PER_CHUNK = 65_536


def write_arrays(path: Path, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> str:
    """Write named arrays as one zarr zip of their own; the file appears under its name when it is complete.

    Args:
        path: File to write. Its directory is made where it is missing; a file of this name is replaced.
        arrays: The arrays by name, cut into chunks along their last axis.
        attributes: Their description, plain JSON values.

    Returns:
        sha256 of the file, in hex. The same arrays and attributes give the same bytes.
    """
    content = _zipped(arrays, attributes, _chunks_along_last_axis)
    write_whole(Path(path), content)
    return sha256_of(content)


def read_attributes(path: Path) -> dict[str, Any]:
    """What describes the arrays of a file that `write_arrays` wrote; of them none is read.

    Raises:
        StoreError: If the file is missing or damaged.
    """
    try:
        with Archive(path) as archive:
            return archive.attributes
    except Exception as error:  # of the zip, which does not name the file
        raise StoreError(f"cannot be read: {type(error).__name__}: {error}", file=path) from error


def read_arrays(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """The named arrays of a file that `write_arrays` wrote, and what describes them.

    Raises:
        StoreError: If the file is missing or damaged.
    """
    if not path.is_file():
        raise StoreError("no such file", file=path)
    try:
        with Archive(path) as archive:
            return {name: archive.whole(name) for name in archive.layouts}, archive.attributes
    except Exception as error:  # of the zip and the codecs, none of which names the file
        raise StoreError(f"cannot be read: {type(error).__name__}: {error}", "write it again", file=path) from error


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
        **({"labels": _described(graph, labels)} if labels else {}),
        "arrays": {name: {"shape": list(a.shape), "dtype": str(a.dtype)} for name, a in arrays.items()},
    }
    content = _zipped(arrays, attributes, _chunks_of_rows)
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
        labels=labels,
        beam_spot=BeamSpot.of_particles(graph.hits.particles),
    )


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
        raise EventPlace(hits.event_id).of(error) from error


def _chunks_of_rows(name: str, values: Array) -> tuple[int, ...]:
    """Chunks of a stored event: rows of nodes or edges, so that a rank reads those of its tiles."""
    rows = EDGES_PER_CHUNK if name.startswith("edges/") or name == JOINING_EDGES else NODES_PER_CHUNK
    return (max(1, min(rows, len(values))), *(max(1, n) for n in values.shape[1:]))


def _chunks_along_last_axis(name: str, values: Array) -> tuple[int, ...]:
    return (*(max(1, n) for n in values.shape[:-1]), max(1, min(EDGES_PER_CHUNK, values.shape[-1])))


def _zipped(
    arrays: Mapping[str, Array], attributes: Mapping[str, Any], chunks: Callable[[str, Array], tuple[int, ...]]
) -> bytes:
    """The bytes of a zarr zip of named arrays, each cut into the chunks that `chunks(name, values)` says."""
    import zarr  # by those who write alone: it takes a while
    from zarr.codecs import Crc32cCodec, ZstdCodec
    from zarr.storage import MemoryStore

    # Written to memory first, so that the order and the dates of the members do not depend on timing.
    members: dict[str, Any] = {}
    group = zarr.create_group(MemoryStore(store_dict=members), attributes=dict(attributes))
    for name, values in arrays.items():
        array = group.create_array(
            name,
            shape=values.shape,
            dtype=values.dtype,
            chunks=chunks(name, values),
            compressors=[ZstdCodec(level=1), Crc32cCodec()],
            # A chunk of zeros is written too: a missing chunk reads as zeros, and must be told from a real one.
            config={"write_empty_chunks": True},
        )
        array[...] = values
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(members):
            member = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            # Unix and rw-r--r--, whatever the machine: else the same arrays would give other bytes elsewhere.
            member.create_system, member.external_attr = 3, 0o644 << 16
            archive.writestr(member, members[name].to_bytes())
    return buffer.getvalue()
