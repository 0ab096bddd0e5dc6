"""The list of the events of a store: written last, read first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from domainpar.events.store.event import StoredEvent
from domainpar.events.store.layout import (
    MANIFEST,
    SCHEMA_VERSION,
    EventRecord,
    Settings,
    Split,
    StoreError,
    file_sha256,
    settings_digest,
    sha256_of,
)
from domainpar.events.store.zip_files import write_whole


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
        return sha256_of(json.dumps(listed).encode())

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
