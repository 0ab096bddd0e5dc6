"""The store: one zarr zip per event in stored order, and a manifest beside them. The only file that knows zarr.

A directory `store/` holds

    manifest.json                what was prepared, how, and the sha256 of every event
    event000001001.zarr.zip      one event: arrays under nodes/ edges/ tiles/ particles/, each chunk with a crc32c

Files appear under their name only when they are complete. The same event prepared with the same settings and the
same versions of the libraries gives the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.storage import MemoryStore, ZipStore

from domainpar.events.checks import check_graph
from domainpar.events.graph import EventGraph, IntArray, Particles
from domainpar.events.stored_order import StoredOrder, concatenated_ranges, stored_order
from partitioners import TileGraph, number_along_phi

Array = npt.NDArray[Any]
EdgePolicy = Literal["incoming", "incident"]
Split = Literal["train", "val", "test"]
Settings = Mapping[str, Any]

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
PARTIAL = ".partial-"
SUFFIX = ".zarr.zip"
NODES_PER_CHUNK = 16_384
EDGES_PER_CHUNK = 65_536

NODE_ARRAYS = (
    "features",
    "position",
    "volume",
    "layer",
    "module",
    "hit_id",
    "particle_id",
    "weight",
    "in_degree",
    "out_degree",
    "original_row",
)
EDGE_ARRAYS = ("src", "dst", "label", "original_position", "reverse", "features")
# Not `joining_edges`: zarr takes the chunks of an array whose name begins with another's for that other's.
JOINING_EDGES = "tiles/edges_by_src_tile"
# Kept in 32 bits where they fit, handed out in 64: an id is an int64 everywhere else.
_IDS = {
    "nodes/in_degree",
    "nodes/out_degree",
    "nodes/original_row",
    "edges/src",
    "edges/dst",
    "edges/original_position",
    "edges/reverse",
    JOINING_EDGES,
}


class StoreError(ValueError):
    """A store or one of its events is missing, damaged, or not what its manifest says."""


@dataclass(frozen=True)
class EventRecord:
    """One event of a store, as the manifest lists it.

    Attributes:
        event: Name of the event, unique in the store.
        path: File of the event, relative to the store.
        bytes: Size of the file.
        sha256: Hash of the file.
        num_nodes: N.
        num_edges: E.
        num_tiles: K.
        has_labels: Whether the edges have labels. Without them an event can be inferred on, not trained on.
        feature_names: Name of each node feature.
        edge_feature_names: Name of each edge feature.
        split: `train`, `val` or `test`.
    """

    event: str
    path: str
    bytes: int
    sha256: str
    num_nodes: int
    num_edges: int
    num_tiles: int
    has_labels: bool
    feature_names: tuple[str, ...]
    edge_feature_names: tuple[str, ...]
    split: Split = "train"


# --- writing ---------------------------------------------------------------------------------------------------------


def event_file_name(event_id: str) -> str:
    """File name of an event in a store.

    Raises:
        ValueError: If the name of the event cannot be part of a file name.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", event_id):
        raise ValueError(f"event name {event_id!r} cannot name a file; use letters, digits, '.', '_' and '-' only.")
    return f"event{event_id}{SUFFIX}"


def settings_digest(settings: Settings) -> str:
    """Hash of the settings of a preparation and of the layout of the files: equal digests mean equal stores."""
    return _sha256(json.dumps({"schema_version": SCHEMA_VERSION, "settings": dict(settings)}, sort_keys=True).encode())


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
        settings: How the event was prepared, plain JSON values. A later preparation compares them.
        source_digest: Hash of the input that the event was read from, compared likewise.

    Returns:
        What the manifest will say of it, with split `train`.

    Raises:
        ValueError: If the arrays do not fit together, an edge or the assignment names what does not exist,
            a label is not 0 or 1, or a feature is not finite. Names event and place.
    """
    path = Path(path)
    where = f"event {graph.hits.event_id}"
    check_graph(graph, where)
    assignment = _checked_assignment(assignment, graph.num_nodes, num_tiles, where)
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
    content = _zipped(_encoded(arrays, attributes))
    write_whole(path, content)
    return EventRecord(
        event=graph.hits.event_id,
        path=path.name,
        bytes=len(content),
        sha256=_sha256(content),
        num_nodes=graph.num_nodes,
        num_edges=graph.num_edges,
        num_tiles=num_tiles,
        has_labels=graph.label is not None,
        feature_names=tuple(graph.feature_names),
        edge_feature_names=tuple(graph.edge_feature_names),
    )


def write_manifest(directory: Path, records: Sequence[EventRecord], settings: Settings) -> None:
    """Write the manifest of a store, the last file of a preparation. Replaces an old one in one step.

    Raises:
        ValueError: If two events have one name, or do not have the same features.
    """
    _check_records_agree(records)
    manifest = {
        "format": "domainpar store",
        "schema_version": SCHEMA_VERSION,
        "settings": dict(settings),
        "settings_digest": settings_digest(settings),
        "events": [asdict(record) for record in records],
    }
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    write_whole(Path(directory) / MANIFEST, text.encode())


def _checked_assignment(assignment: IntArray, num_nodes: int, num_tiles: int, where: str) -> IntArray:
    if num_tiles < 1:
        raise ValueError(f"{where}: num_tiles is {num_tiles}, expected at least 1.")
    if np.shape(assignment) != (num_nodes,):
        raise ValueError(f"{where}: assignment has shape {list(np.shape(assignment))}, expected [{num_nodes}].")
    if num_nodes and not 0 <= assignment.min() <= assignment.max() < num_tiles:
        raise ValueError(
            f"{where}: assignment uses tiles {assignment.min()} to {assignment.max()} but num_tiles is {num_tiles}."
        )
    return np.asarray(assignment, np.int64)


def _arrays(graph: EventGraph, order: StoredOrder) -> dict[str, Array]:
    """Every array of the file by its name in it; what is not known is not there."""
    hits, particles = graph.hits, graph.hits.particles
    arrays: dict[str, Array | None] = {
        "nodes/features": graph.features,
        "nodes/position": hits.position,
        "nodes/volume": hits.volume,
        "nodes/layer": hits.layer,
        "nodes/module": hits.module,
        "nodes/hit_id": hits.hit_id,
        "nodes/particle_id": hits.particle_id,
        "nodes/weight": hits.weight,
    }
    arrays = {name: _in_order(a, order.original_row) for name, a in arrays.items()}
    arrays |= {
        "nodes/in_degree": order.in_degree,
        "nodes/out_degree": order.out_degree,
        "nodes/original_row": order.original_row,
        "edges/src": order.src,
        "edges/dst": order.dst,
        "edges/label": _in_order(graph.label, order.original_position),
        "edges/original_position": order.original_position,
        "edges/reverse": order.reverse,
        "edges/features": _in_order(graph.edge_features, order.original_position),
    }
    for name in ("node_ptr", "edge_ptr", "src_tile", "dst_tile", "joining"):
        arrays[f"tiles/{name}"] = getattr(order, name)
    arrays[JOINING_EDGES] = order.joining_edges
    if particles is not None:
        arrays |= {f"particles/{field.name}": getattr(particles, field.name) for field in fields(Particles)}
    return {name: _in_file_type(name, a) for name, a in arrays.items() if a is not None}


def _in_order(values: Array | None, order: IntArray) -> Array | None:
    return None if values is None else values[order]


def _in_file_type(name: str, values: Array) -> Array:
    if name in _IDS:
        fits = values.size == 0 or values.max() < 2**31
        return np.asarray(values, np.int32 if fits else np.int64)
    if name == "edges/label":
        return np.asarray(values, np.uint8)
    if name.endswith(("features", "position", "weight")):
        return np.asarray(values, np.float32)
    return np.asarray(values, np.int64) if name.startswith("tiles/") else np.asarray(values)


def write_arrays(path: Path, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> str:
    """Write named arrays as one zarr zip of their own; the file appears under its name when it is complete.

    Args:
        path: File to write. Its directory is made where it is missing; a file of this name is replaced.
        arrays: The arrays by name, cut into chunks along their last axis.
        attributes: What describes them, plain JSON values.

    Returns:
        sha256 of the file, in hex. The same arrays and attributes give the same bytes.
    """
    content = _zipped(_encoded(arrays, dict(attributes), _chunks_along_last_axis))
    write_whole(Path(path), content)
    return _sha256(content)


def _chunks_of_rows(name: str, values: Array) -> tuple[int, ...]:
    rows = EDGES_PER_CHUNK if name.startswith("edges/") or name == JOINING_EDGES else NODES_PER_CHUNK
    return (max(1, min(rows, len(values))), *(max(1, n) for n in values.shape[1:]))


def _chunks_along_last_axis(name: str, values: Array) -> tuple[int, ...]:
    return (*(max(1, n) for n in values.shape[:-1]), max(1, min(EDGES_PER_CHUNK, values.shape[-1])))


def _encoded(
    arrays: Mapping[str, Array],
    attributes: dict[str, Any],
    chunks: Callable[[str, Array], tuple[int, ...]] = _chunks_of_rows,
) -> dict[str, bytes]:
    """The members of the zip. Written to memory first, so that their order and dates do not depend on timing."""
    members: dict[str, Any] = {}
    group = zarr.create_group(MemoryStore(store_dict=members), attributes=attributes)
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
    return {name: members[name].to_bytes() for name in sorted(members)}


def _zipped(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            member = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            member.create_system, member.external_attr = 3, 0o644 << 16
            archive.writestr(member, content)
    return buffer.getvalue()


def write_whole(path: Path, content: bytes) -> None:
    """Write under a temporary name, then rename: a killed writer leaves the old file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{PARTIAL}{uuid.uuid4().hex}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    # The rename itself is only on disk when its directory is. Some file systems refuse this; the file is written then.
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _check_records_agree(records: Sequence[EventRecord]) -> None:
    seen: set[str] = set()
    for record in records:
        if record.event in seen:
            raise ValueError(f"event {record.event} appears twice; names of events are unique in a store.")
        seen.add(record.event)
        for name in ("feature_names", "edge_feature_names"):
            first, here = getattr(records[0], name), getattr(record, name)
            if first != here:
                raise ValueError(
                    f"event {record.event} has {name} {list(here)} but event {records[0].event} has {list(first)}; "
                    "all events of a store need the same."
                )


# --- reading ---------------------------------------------------------------------------------------------------------


class EventStore:
    """A prepared store: the list of its events, and access to each.

    Args:
        path: The directory that `prepare` wrote.

    Raises:
        StoreError: If there is no readable manifest of a version this program knows, or a file is missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        manifest = _read_manifest(self.path / MANIFEST)
        self.settings: dict[str, Any] = manifest["settings"]
        self.settings_digest: str = manifest["settings_digest"]
        self.records: tuple[EventRecord, ...] = manifest["events"]
        for record in self.records:
            _check_size(self.path / record.path, record)

    def events(self, split: Split | None = None) -> list[EventRecord]:
        """The events of one split, or of all, in the order of the manifest."""
        if split not in (None, "train", "val", "test"):
            raise ValueError(f"unknown split {split!r}; known: train, val, test.")
        return [record for record in self.records if split in (None, record.split)]

    def open(self, record: EventRecord) -> StoredEvent:
        """Open one event. Its sizes are checked, its bytes only as they are read (see `verify`).

        Raises:
            StoreError: If the file is missing, damaged, or is not the event that the manifest lists.
        """
        path = self.path / record.path
        _check_size(path, record)
        event = StoredEvent(path, event_id=record.event, sha256=record.sha256)
        listed = (record.event, record.num_nodes, record.num_edges, record.num_tiles, record.has_labels)
        found = (event.event_id, event.num_nodes, event.num_edges, event.num_tiles, event.has_labels)
        if listed != found:
            event.close()
            raise StoreError(
                f"event {record.event}, file {path}: the manifest lists (event, nodes, edges, tiles, labels) {listed} "
                f"but the file holds {found}; prepare the store again."
            )
        return event

    def verify(self, record: EventRecord) -> None:
        """Hash the file of one event and compare with the manifest; about 2 s per GB.

        Raises:
            StoreError: If a single bit differs.
        """
        path = self.path / record.path
        found = file_sha256(path, record.event)
        if found != record.sha256:
            raise StoreError(
                f"event {record.event}, file {path}: sha256 is {found} but the manifest says {record.sha256}; "
                "the file has changed since it was prepared. Prepare it again or copy it anew."
            )

    @property
    def digest(self) -> str:
        """Hash of all events and their splits: equal digests mean the same data, whatever the store is called."""
        listed = [[record.event, record.sha256, record.split] for record in self.records]
        return _sha256(json.dumps(listed).encode())

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Name of each node feature, the same in all events."""
        return self.records[0].feature_names if self.records else ()

    @property
    def edge_feature_names(self) -> tuple[str, ...]:
        """Name of each edge feature, the same in all events."""
        return self.records[0].edge_feature_names if self.records else ()

    def __len__(self) -> int:
        return len(self.records)


class StoredEvent:
    """One event in stored order, read piece by piece: a rank reads the chunks of its tiles, not the event.

    Use as a context manager, or call `close`.

    Args:
        path: The zarr zip.
        event_id: Name to use in messages before the file has told its own.
        sha256: Hash of the file, when it is known from a manifest.

    Attributes:
        event_id: Name of the event.
        num_nodes: N.
        num_edges: E.
        num_tiles: K.
        feature_names: Name of each node feature, length F.
        edge_feature_names: Name of each edge feature, length G.
        has_labels: Whether edges have labels.
        has_positions: Whether nodes have positions.
        has_particle_ids: Whether the particle of each hit is known.
        node_ptr: Tile t holds the nodes [node_ptr[t], node_ptr[t + 1]), int64 [K + 1].
        edge_ptr: The edges that end in tile t are [edge_ptr[t], edge_ptr[t + 1]), int64 [K + 1].
        settings: How the event was prepared.
        settings_digest: Hash of the settings.
        source_digest: Hash of the input the event was read from; empty when it was not read from files.
        label_note: How the labels were made; None when the source gave them, or there are none.

    Raises:
        StoreError: If the file is missing, damaged, of another version, or lacks an array or a chunk.
    """

    def __init__(self, path: str | Path, *, event_id: str | None = None, sha256: str | None = None) -> None:
        self.path = Path(path)
        self.event_id = event_id or self.path.name.removeprefix("event").removesuffix(SUFFIX)
        self._sha256 = sha256
        if not self.path.is_file():
            raise StoreError(f"event {self.event_id}, file {self.path}: no such file; prepare the store again.")
        with self._reading("the archive"):
            self._zip = ZipStore(self.path, mode="r")
            self._group = zarr.open_group(self._zip, mode="r")
        try:
            self._read_attributes()
            self._open_arrays()
            self._read_tiles()
        except BaseException:
            self.close()
            raise

    def _read_attributes(self) -> None:
        with self._reading("its description"):
            found: dict[str, Any] = dict(self._group.attrs)
            version = found.get("schema_version")
            if found.get("format") != "domainpar event" or version != SCHEMA_VERSION:
                raise ValueError(f"it is {found.get('format')!r} version {version!r}, not version {SCHEMA_VERSION}")
            self.event_id = str(found["event"])
            self.num_nodes, self.num_edges = int(found["num_nodes"]), int(found["num_edges"])
            self.num_tiles = int(found["num_tiles"])
            self.feature_names: tuple[str, ...] = tuple(found["feature_names"])
            self.edge_feature_names: tuple[str, ...] = tuple(found["edge_feature_names"])
            self.settings: dict[str, Any] = found["settings"]
            self.settings_digest = str(found["settings_digest"])
            self.source_digest = str(found["source_digest"])
            self.label_note: Any = found["label_note"]
            self._listed: dict[str, Any] = found["arrays"]

    def _open_arrays(self) -> None:
        self._arrays: dict[str, Any] = {}
        for name, listed in self._listed.items():
            with self._reading(name):
                array: Any = self._group[name]
                expected = (tuple(listed["shape"]), listed["dtype"])
                found = (tuple(array.shape), str(array.dtype))
                if found != expected:
                    raise ValueError(f"shape and type are {found}, expected {expected}")
                if array.nchunks_initialized != array.nchunks:
                    raise ValueError(f"{array.nchunks_initialized} of {array.nchunks} chunks are there")
                self._arrays[name] = array
        self.has_labels = "edges/label" in self._arrays
        self.has_positions = "nodes/position" in self._arrays
        self.has_particle_ids = "nodes/particle_id" in self._arrays

    def _read_tiles(self) -> None:
        tiles = {name: self._whole(f"tiles/{name}") for name in ("node_ptr", "edge_ptr")}
        pairs = {name: self._whole(f"tiles/{name}") for name in ("src_tile", "dst_tile", "joining")}
        for name, total in (("node_ptr", self.num_nodes), ("edge_ptr", self.num_edges)):
            ptr = tiles[name]
            good = len(ptr) == self.num_tiles + 1 and ptr[0] == 0 and ptr[-1] == total and (np.diff(ptr) >= 0).all()
            if not good:
                raise StoreError(
                    f"{self._where()}: tiles/{name} does not describe {self.num_tiles} ranges of 0 to {total}; "
                    "prepare the event again."
                )
        self.node_ptr, self.edge_ptr = tiles["node_ptr"], tiles["edge_ptr"]
        self._src_tile, self._dst_tile, self._joining = pairs["src_tile"], pairs["dst_tile"], pairs["joining"]
        self._joining_ptr = np.concatenate([[0], np.cumsum(self._joining)])

    @property
    def sha256(self) -> str:
        """Hash of the file, from the manifest or else computed."""
        if self._sha256 is None:
            self._sha256 = file_sha256(self.path, self.event_id)
        return self._sha256

    def tile_graph(self) -> TileGraph:
        """Nodes and edges of each tile, and the edges that join tiles: all that a grouping looks at."""
        return TileGraph(
            node_counts=np.diff(self.node_ptr),
            edge_counts=np.diff(self.edge_ptr),
            src_tile=self._src_tile.astype(np.int32),
            dst_tile=self._dst_tile.astype(np.int32),
            joining=self._joining,
        )

    def particles(self) -> Particles | None:
        """The particle table; None when it is unknown."""
        if "particles/particle_id" not in self._arrays:
            return None
        return Particles(**{field.name: self._whole(f"particles/{field.name}") for field in fields(Particles)})

    def read_nodes(self, name: str, ids: IntArray) -> Array:
        """One array of the nodes with these ids, in their order; reads only the chunks they lie in.

        Args:
            name: `features` float32 [n, F], `position` float32 [n, 3], `volume` `layer` `module` int32,
                `hit_id` `particle_id` int64, `weight` float32, `in_degree` `out_degree` `original_row` int64.
            ids: Global node ids, [n], any order.

        Raises:
            StoreError: If the file is damaged.
            ValueError: If the event has no such array, or an id does not exist.
        """
        return self._gather("nodes", name, NODE_ARRAYS, ids, self.num_nodes)

    def read_edges(self, name: str, ids: IntArray) -> Array:
        """One array of the edges with these ids, in their order; reads only the chunks they lie in.

        Args:
            name: `src` `dst` int64, `label` uint8, `original_position` int64, `reverse` int64 (-1: there is none),
                `features` float32 [n, G].
            ids: Global edge ids, [n], any order.

        Raises:
            StoreError: If the file is damaged.
            ValueError: If the event has no such array, or an id does not exist.
        """
        return self._gather("edges", name, EDGE_ARRAYS, ids, self.num_edges)

    def read_part_edges(self, tiles: IntArray, policy: EdgePolicy) -> tuple[IntArray, IntArray, IntArray]:
        """The edges that a part of these tiles computes on; reads only the chunks they lie in.

        Args:
            tiles: The part's tiles, ascending, without repeats.
            policy: `incoming`: edges that end in them. `incident`: edges that start or end in them.

        Returns:
            Global ids of the edges, int64, increasing; and `src` and `dst` of each, int64.

        Raises:
            StoreError: If the file is damaged.
            ValueError: If a tile does not exist or the policy is unknown.
        """
        if policy not in ("incoming", "incident"):
            raise ValueError(f"unknown edge policy {policy!r}; known: incoming, incident.")
        tiles = self._checked_tiles(tiles)
        edge_ids = concatenated_ranges(self.edge_ptr[tiles], self.edge_ptr[tiles + 1])
        if policy == "incident":
            edge_ids = np.sort(np.concatenate([edge_ids, self._edges_leaving(tiles)]))
        return edge_ids, self.read_edges("src", edge_ids), self.read_edges("dst", edge_ids)

    def _checked_tiles(self, tiles: IntArray) -> IntArray:
        tiles = np.asarray(tiles, np.int64)
        if len(tiles) and not (tiles[0] >= 0 and tiles[-1] < self.num_tiles and (np.diff(tiles) > 0).all()):
            raise ValueError(
                f"event {self.event_id}: tiles of a part are ascending numbers in 0 to {self.num_tiles - 1}, "
                f"got {tiles[:10].tolist()}{'...' if len(tiles) > 10 else ''}."
            )
        return tiles

    def _edges_leaving(self, tiles: IntArray) -> IntArray:
        """Edges that start in these tiles and end in others."""
        ours = np.zeros(self.num_tiles, np.bool_)
        ours[tiles] = True
        pairs = np.flatnonzero(ours[self._src_tile] & ~ours[self._dst_tile])
        return self._rows(JOINING_EDGES, concatenated_ranges(self._joining_ptr[pairs], self._joining_ptr[pairs + 1]))

    def _gather(self, kind: str, name: str, known: Sequence[str], ids: IntArray, count: int) -> Array:
        if name not in known:
            raise ValueError(f"unknown array {name!r} of {kind}; known: {', '.join(known)}.")
        if f"{kind}/{name}" not in self._arrays:
            raise ValueError(f"{self._where()}: the event has no {name} of {kind}; its source did not give any.")
        ids = np.asarray(ids, np.int64)
        if len(ids) and not (ids.min() >= 0 and ids.max() < count):
            raise ValueError(
                f"event {self.event_id}: ids of {kind} run from 0 to {count - 1}, got {ids.min()} to {ids.max()}."
            )
        return self._rows(f"{kind}/{name}", ids)

    def _rows(self, name: str, ids: IntArray) -> Array:
        """Rows of one array, reading every chunk that holds one of them once, neighbouring chunks together."""
        array = self._arrays[name]
        per_chunk = array.chunks[0]
        chunk_of = ids // per_chunk
        needed = np.zeros(max(1, array.nchunks), np.bool_)
        needed[chunk_of] = True
        chunks = np.flatnonzero(needed)
        first_row = np.zeros(len(needed), np.int64)
        first_row[chunks] = np.arange(len(chunks)) * per_chunk
        buffer = np.empty((len(chunks) * per_chunk, *array.shape[1:]), array.dtype)
        with self._reading(name):
            for run in np.split(chunks, np.flatnonzero(np.diff(chunks) > 1) + 1):
                if len(run):
                    rows = array[run[0] * per_chunk : (run[-1] + 1) * per_chunk]
                    buffer[first_row[run[0]] :][: len(rows)] = rows
        return self._in_memory_type(name, buffer[first_row[chunk_of] + ids % per_chunk])

    def _whole(self, name: str) -> Array:
        if name not in self._arrays:
            raise StoreError(f"{self._where()}: the array {name} is missing; prepare the event again.")
        with self._reading(name):
            return self._in_memory_type(name, np.asarray(self._arrays[name][...]))

    def _in_memory_type(self, name: str, values: Array) -> Array:
        return values.astype(np.int64) if name in _IDS else values

    @contextlib.contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Give every error of zarr, the zip and the codecs the event and the file, which they do not name."""
        try:
            yield
        except Exception as error:
            raise StoreError(
                f"{self._where()}: cannot read {what}: {type(error).__name__}: {error}; "
                "the file is damaged or incomplete. Prepare the event again or copy it anew."
            ) from error

    def _where(self) -> str:
        return f"event {self.event_id}, file {self.path}"

    def check_bytes(self) -> None:
        """Read the file from end to end.

        Raises:
            StoreError: If any member of it is damaged.
        """
        with self._reading("its bytes"), zipfile.ZipFile(self.path) as archive:
            damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"bad CRC of {damaged}")

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(Exception):  # a file that could not be opened cannot be closed either
            self._zip.close()

    def __enter__(self) -> StoredEvent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def inspect_event(path: Path) -> tuple[EventRecord, str, str]:
    """Read a finished file from end to end and say what it holds: its record, settings digest and source digest.

    Raises:
        StoreError: If any member of it is damaged.
    """
    with StoredEvent(path) as event:
        event.check_bytes()
        record = EventRecord(
            event=event.event_id,
            path=path.name,
            bytes=path.stat().st_size,
            sha256=event.sha256,
            num_nodes=event.num_nodes,
            num_edges=event.num_edges,
            num_tiles=event.num_tiles,
            has_labels=event.has_labels,
            feature_names=event.feature_names,
            edge_feature_names=event.edge_feature_names,
        )
        return record, event.settings_digest, event.source_digest


def file_sha256(path: Path, event_id: str) -> str:
    """sha256 of a file, in hex.

    Raises:
        StoreError: If it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StoreError(f"event {event_id}, file {path}: cannot be read: {error}.") from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _check_size(path: Path, record: EventRecord) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise StoreError(
            f"event {record.event}, file {path}: {error.strerror or error}; the manifest lists it. Prepare it again."
        ) from error
    if found != record.bytes:
        raise StoreError(
            f"event {record.event}, file {path}: {found} bytes, the manifest says {record.bytes}; "
            "the file is truncated or was replaced. Prepare it again or copy it anew."
        )


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest with its events as records."""
    if not path.is_file():
        raise StoreError(
            f"{path.parent} is not a finished store: it has no {path.name}. "
            "Run `python -m domainpar.prepare`; one that was interrupted goes on where it stopped."
        )
    try:
        manifest = json.loads(path.read_bytes())
        if manifest["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema version {manifest['schema_version']}, this program reads {SCHEMA_VERSION}")
        manifest["events"] = tuple(_record(item) for item in manifest["events"])
        return {name: manifest[name] for name in ("settings", "settings_digest", "events")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path} cannot be read: {type(error).__name__}: {error}; prepare the store again with --overwrite."
        ) from error


def _record(item: dict[str, Any]) -> EventRecord:
    record = EventRecord(**item)
    return replace(
        record, feature_names=tuple(record.feature_names), edge_feature_names=tuple(record.edge_feature_names)
    )
