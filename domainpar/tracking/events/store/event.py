"""One event of a store, read piece by piece, or whole and in the order of its source."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.common.problems import EventPlace
from domainpar.tracking.events.beam_spot import BeamSpot
from domainpar.tracking.events.graph import Array, EventGraph, Hits, Particles
from domainpar.tracking.events.labels import OF_PARTICLES, Label, particle_label
from domainpar.tracking.events.store.arrays import ArrayFile
from domainpar.tracking.events.store.layout import (
    COPY_ANEW,
    NAME,
    SUFFIX,
    EventRecord,
    OtherVersion,
    StoreError,
    file_sha256,
)
from domainpar.tracking.events.store.schema import JOINING_EDGES, check_arrays, in_memory_type, names_in
from domainpar.tracking.events.stored_order import concatenated_ranges
from partitioners import TileGraph
from partitioners.topology import EdgePolicy, IntArray


class StoredEvent:
    """One event in stored order, read piece by piece: a rank reads the chunks of its tiles, not the event.

    Use as a context manager, or call `close`. Children of a fork read an open event as their parent does; pickled, as
    for a worker that is spawned, it is its path, and opens anew.

    Args:
        path: The zarr zip.
        event_id: Name to use in messages before that of the file is read.
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
        settings: Settings of its preparation.
        settings_digest: Hash of the settings.
        source_digest: Hash of the input the event was read from; empty when it was not read from files.
        label_note: How the labels were made; None when the source gave them, or there are none.
        labels: Labels of the nodes and of the event itself.
        graph_labels: Those of the event, by name; NaN, or -1 of a class, where it is not known.

    Raises:
        StoreError: If the file is missing, damaged, of another version, or lacks an array or a chunk.
    """

    def __init__(self, path: str | Path, *, event_id: str | None = None, sha256: str | None = None) -> None:
        self.path = Path(path)
        self.event_id = event_id or self.path.name.removeprefix("event").removesuffix(SUFFIX)
        self._sha256 = sha256
        if not self.path.is_file():
            raise StoreError("no such file", "prepare the store again", event=self.event_id, file=self.path)
        with contextlib.ExitStack() as opened:
            with self._reading("the file"):
                self._file = opened.enter_context(ArrayFile(self.path))
            self._read_attributes()
            self._check_arrays()
            self._read_tiles()
            opened.pop_all()  # it stays open

    def _read_attributes(self) -> None:
        with self._reading("its description"):
            attributes = self._file.attributes
            if attributes.get("format") != "domainpar event":
                raise ValueError(f"it is {attributes.get('format')!r}, not 'domainpar event'")
            name = str(attributes["event"])
            if not NAME.fullmatch(name):
                raise ValueError(f"the event is called {name[:80]!r}, which cannot name a file")
            self.event_id = name
            self.num_nodes, self.num_edges = int(attributes["num_nodes"]), int(attributes["num_edges"])
            self.num_tiles = int(attributes["num_tiles"])
            self.feature_names: tuple[str, ...] = tuple(attributes["feature_names"])
            self.edge_feature_names: tuple[str, ...] = tuple(attributes["edge_feature_names"])
            self.settings: dict[str, Any] = attributes["settings"]
            self.settings_digest = str(attributes["settings_digest"])
            self.source_digest = str(attributes["source_digest"])
            self.label_note: Any = attributes["label_note"]
            described = attributes.get("labels", [])
            self.labels: tuple[Label, ...] = tuple(Label(*label) for *label, _ in described)
            # That of a class that is not known is -1 in the file.
            self.graph_labels = {name: np.nan if value is None else value
                                 for name, of, _, value in described if of == "graph"}  # fmt: skip

    def _check_arrays(self) -> None:
        """Hold the arrays against the schema."""
        with self._reading("its arrays"):
            sizes = {"N": self.num_nodes, "E": self.num_edges, "K": self.num_tiles, "K+1": self.num_tiles + 1}
            sizes |= {"F": len(self.feature_names), "G": len(self.edge_feature_names)}
            sizes |= {"L": len(self._names_of_node_labels)}
            check_arrays({name: layout[:2] for name, layout in self._file.layouts.items()}, sizes)
        self._names = frozenset(self._file.layouts)
        self.has_labels = "edges/label" in self._names
        self.has_positions = "nodes/position" in self._names
        self.has_particle_ids = "nodes/particle_id" in self._names

    def _read_tiles(self) -> None:
        self.node_ptr, self.edge_ptr = self._whole("tiles/node_ptr"), self._whole("tiles/edge_ptr")
        self._src_tile, self._dst_tile = self._whole("tiles/src_tile"), self._whole("tiles/dst_tile")
        self._joining = self._whole("tiles/joining")
        with self._reading("the tiles"):
            # Offsets that do not ascend would give a tile the rows of another, without any error.
            for name, total in (("node_ptr", self.num_nodes), ("edge_ptr", self.num_edges)):
                ptr = getattr(self, name)
                if not (ptr[0] == 0 and ptr[-1] == total and (np.diff(ptr) >= 0).all()):
                    raise ValueError(f"tiles/{name} does not describe {self.num_tiles} ranges of 0 to {total}")
            for tiles in (self._src_tile, self._dst_tile):
                if len(tiles) and (tiles.min() < 0 or tiles.max() >= self.num_tiles):
                    raise ValueError(f"a tile is not one of {self.num_tiles}")
            joined, listed = self._joining.sum(), self._file.layouts[JOINING_EDGES].shape[0]
            if (self._joining < 1).any() or joined != listed:
                raise ValueError(f"pairs of tiles join {joined} edges, {listed} are listed")
        self._joining_ptr = np.concatenate([[0], np.cumsum(self._joining)])

    @property
    def events(self) -> tuple[StoredEvent, ...]:
        """This one, as `JoinedEvents` has several."""
        return (self,)

    @property
    def sha256(self) -> str:
        """Hash of the file, from the manifest or else computed."""
        if self._sha256 is None:
            self._sha256 = file_sha256(self.path, self.event_id)
        return self._sha256

    @property
    def record(self) -> EventRecord:
        """What a manifest says of it, with split `train`."""
        sizes = ("num_nodes", "num_edges", "num_tiles", "has_labels", "feature_names", "edge_feature_names", "labels")
        return EventRecord(
            event=self.event_id,
            path=self.path.name,
            bytes=self.path.stat().st_size,
            sha256=self.sha256,
            beam_spot=BeamSpot.from_particles(self.particles()),
            **{name: getattr(self, name) for name in sizes},
        )

    def has(self, name: str) -> bool:
        """Whether the file has an array of the schema: `nodes/weight`, ..."""
        return name in self._names

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
        if "particles/particle_id" not in self._names:
            return None
        names = [name for name in names_in("particles") if f"particles/{name}" in self._names]
        return Particles(**{name: self._whole(f"particles/{name}") for name in names})

    def ids_in_users_order(self) -> IntArray:
        """Global id of each node in the user's order, int64 [N]: given to `read_nodes`, arrays come back in that order.

        Raises:
            StoreError: If the file is damaged.
        """
        return _inverse(self.read_nodes("original_row", np.arange(self.num_nodes)))

    def read_nodes(self, name: str, ids: IntArray) -> Array:
        """One array of the nodes with these ids, in their order; reads only the chunks they lie in.

        Args:
            name: An array of `nodes/` in the schema, in its type in memory.
            ids: Global node ids, [n], any order.

        Raises:
            StoreError: If the file is damaged.
            Problem: If the event has no such array, or an id does not exist.
        """
        return self._gather("nodes", name, ids, self.num_nodes)

    def read_label(self, name: str, ids: IntArray) -> npt.NDArray[np.float64]:
        """A label of the nodes with these ids, in their order: stored, or known from their particles; float64 [n].

        Raises:
            StoreError: If the file is damaged.
            Problem: If the event has no such label.
        """
        if name in (names := self._names_of_node_labels):
            return self.read_nodes("labels", ids)[:, names.index(name)].astype(np.float64)
        particles = self.particles()
        if particles is None or not self.has_particle_ids or name not in {label.name for label in OF_PARTICLES}:
            raise self.place.problem(f"the event has no label {name}")
        return particle_label(name, self.read_nodes("particle_id", ids), particles)

    @property
    def _names_of_node_labels(self) -> list[str]:
        return [label.name for label in self.labels if label.of == "node"]

    def read_edges(self, name: str, ids: IntArray) -> Array:
        """One array of the edges with these ids, in their order; reads only the chunks they lie in.

        Args:
            name: An array of `edges/` in the schema, in its type in memory.
            ids: Global edge ids, [n], any order.

        Raises:
            StoreError: If the file is damaged.
            Problem: If the event has no such array, or an id does not exist.
        """
        return self._gather("edges", name, ids, self.num_edges)

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
        tiles = np.asarray(tiles, np.int64)
        if len(tiles) and not (tiles[0] >= 0 and tiles[-1] < self.num_tiles and (np.diff(tiles) > 0).all()):
            raise self.place.problem(
                f"tiles of a part are ascending numbers in 0 to {self.num_tiles - 1}, "
                f"got {tiles[:10].tolist()}{'...' if len(tiles) > 10 else ''}"
            )
        edge_ids = concatenated_ranges(self.edge_ptr[tiles], self.edge_ptr[tiles + 1])
        if policy == "incident":  # also the edges that start in these tiles and end in others
            ours = np.zeros(self.num_tiles, np.bool_)
            ours[tiles] = True
            pairs = np.flatnonzero(ours[self._src_tile] & ~ours[self._dst_tile])
            rows = concatenated_ranges(self._joining_ptr[pairs], self._joining_ptr[pairs + 1])
            edge_ids = np.sort(np.concatenate([edge_ids, self._rows(JOINING_EDGES, rows)]))
        return edge_ids, self.read_edges("src", edge_ids), self.read_edges("dst", edge_ids)

    def _gather(self, kind: str, name: str, ids: IntArray, count: int) -> Array:
        if name not in names_in(kind):
            raise ValueError(f"unknown array {name!r} of {kind}; known: {', '.join(names_in(kind))}.")
        if f"{kind}/{name}" not in self._names:
            raise self.place.problem(f"the event has no {name} of {kind}", "its source did not give any")
        ids = np.asarray(ids, np.int64)
        if len(ids) and not (ids.min() >= 0 and ids.max() < count):
            raise self.place.problem(f"ids of {kind} run from 0 to {count - 1}, got {ids.min()} to {ids.max()}")
        return self._rows(f"{kind}/{name}", ids)

    def _rows(self, name: str, ids: IntArray) -> Array:
        with self._reading(name):
            return in_memory_type(name, self._file.rows(name, ids))

    def _whole(self, name: str) -> Array:
        with self._reading(name):
            return in_memory_type(name, self._file.whole(name))

    @contextlib.contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Give every error of the zip the event and the file, which it does not name."""
        try:
            yield
        except OtherVersion as error:
            raise OtherVersion(error.version, self.path, self.event_id) from None
        except Exception as error:
            what = f"cannot read {what}: {type(error).__name__}: {error}"
            hint = f"the file is damaged or incomplete; {COPY_ANEW}"
            raise StoreError(what, hint, event=self.event_id, file=self.path) from error

    @property
    def place(self) -> EventPlace:
        """The event and its file, for errors about them."""
        return EventPlace(self.event_id, self.path)

    def check_bytes(self, share: int = 0, of: int = 1) -> None:
        """Read every array, or one of several shares of them.

        Raises:
            StoreError: If any of them is damaged.
        """
        with self._reading("its bytes"):
            self._file.check_bytes(share, of)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(StoredEvent, event_id=self.event_id, sha256=self._sha256), (self.path.absolute(),)

    def __enter__(self) -> StoredEvent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WholeEvent:
    """All nodes and edges of an event, row after row as its source gave them. Arrays are read at their first use.

    Args:
        event: The event; it stays open as long as arrays are read.

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
        names = {one.name for one in fields(Hits)} & set(names_in("nodes"))
        columns: dict[str, Any] = {name: self.nodes(name) for name in names}
        return Hits(self.event.event_id, **columns, particles=self.event.particles())

    def graph(self) -> EventGraph:
        """The event."""
        features, edge_features = self.nodes("features"), self.edges("features")
        assert features is not None  # every event has them
        assert edge_features is not None
        return EventGraph(
            hits=self.hits,
            features=features,
            feature_names=self.event.feature_names,
            edge_index=self.edge_index,
            edge_features=edge_features,
            edge_feature_names=self.event.edge_feature_names,
            label=self.edges("label"),
            label_note=self.event.label_note,
            node_labels=self.node_labels,
            graph_labels=self.event.graph_labels,
        )

    def nodes(self, name: str) -> Array | None:
        """One array of the nodes, [N, ...] as in the schema; None if the event has none."""
        return self.event.read_nodes(name, self.node_ids) if self.event.has(f"nodes/{name}") else None

    @property
    def node_labels(self) -> dict[str, Array]:
        """Stored labels of the nodes by name, [N] each: classes as integers, else numbers."""
        of_nodes = [label for label in self.event.labels if label.of == "node"]
        values = {label: self.event.read_label(label.name, self.node_ids) for label in of_nodes}
        return {label.name: of.astype(np.int64) if label.classes else of for label, of in values.items()}

    def edges(self, name: str) -> Array | None:
        """One array of the edges, [E, ...] as in the schema; None if the event has none."""
        return self.event.read_edges(name, self.edge_ids) if self.event.has(f"edges/{name}") else None


def inspect_event(path: Path) -> tuple[EventRecord, str, str]:
    """Read a finished file from end to end and say what it holds: its record, settings digest and source digest.

    Raises:
        StoreError: If any member of it is damaged.
    """
    with StoredEvent(path) as event:
        event.check_bytes()
        return event.record, event.settings_digest, event.source_digest


def _inverse(order: IntArray) -> IntArray:
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return inverse
