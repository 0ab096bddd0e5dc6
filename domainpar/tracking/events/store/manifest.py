"""The list of the events of a store: written last, read first."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from domainpar.common.atomic_files import write_whole
from domainpar.common.models import plain, read_as
from domainpar.common.problems import Problem
from domainpar.nn.standard import Standard, standard_of
from domainpar.tracking.events.beam_spot import BeamSpot
from domainpar.tracking.events.features import FEATURES
from domainpar.tracking.events.labels import Label
from domainpar.tracking.events.store.event import StoredEvent
from domainpar.tracking.events.store.layout import (
    COPY_ANEW,
    LEARNED,
    MANIFEST,
    NAME,
    EventRecord,
    OtherVersion,
    Settings,
    Split,
    StoreError,
    file_sha256,
    settings_digest,
    sha256_of,
)
from domainpar.tracking.events.store.schema import SCHEMA_VERSION
from domainpar.tracking.events.store.survey import EventSurvey, survey_of

LARGEST_MANIFEST = 2**28
"""Bytes of a manifest: some hundred times what a million events need."""

_SPLITS = ("train", "val", "test")
_KEYS = (
    "format", "schema_version", "settings", "settings_digest", "events", "split_settings", "standard", "learned_from",
    "survey", "content_sha256",
)  # fmt: skip


class EventStore:
    """A prepared store: the list of its events, and access to each.

    Args:
        path: The directory that `prepare` wrote.
        check_files: Whether every file has to be there, in its size.

    Attributes:
        settings: All that decides the bytes of an event's file, besides its input.
        split_settings: Shares and seed of the splits; None where the source gave the splits, or none are recorded.
        standard: Constants that standardise features, of the events of `standardised_by`.
        survey: What these events have in common (`survey_of`); empty in a store of before that was kept.
        learned_from: Fingerprint (`Hits`) of each event that the module map or embedding behind its candidate edges was
            learned from, by name; empty without.
        unreadable: The errors of events that cannot be read and are to be left out, by name; filled by the reader
            that checks them. `open` raises them.

    Raises:
        StoreError: If there is no readable manifest of a version this program knows, or a file is missing.
    """

    def __init__(self, path: str | Path, check_files: bool = True) -> None:
        self.unreadable: dict[str, Problem] = {}
        self.path = Path(path)
        manifest = _read_manifest(self.path / MANIFEST)
        self.settings: dict[str, Any] = manifest["settings"]
        self.settings_digest: str = manifest["settings_digest"]
        self.split_settings: dict[str, Any] | None = manifest["split_settings"]
        self.standard: Standard = manifest["standard"]
        self.survey: dict[str, Any] = manifest["survey"]
        self.learned_from: dict[str, str] = manifest["learned_from"]
        self.records: tuple[EventRecord, ...] = manifest["events"]
        for record in self.records if check_files else ():
            _check_size(self.path / record.path, record)

    def events(self, split: Split | None = None) -> list[EventRecord]:
        """The events of one split, or of all, in the order of the manifest."""
        if split not in (None, *_SPLITS):
            raise ValueError(f"unknown split {split!r}; known: train, val, test.")
        return [record for record in self.records if split in (None, record.split)]

    def readable(self, split: Split | None = None) -> list[EventRecord]:
        """Those of `events` that are not known to be unreadable."""
        return [record for record in self.events(split) if record.event not in self.unreadable]

    def only(self, records: Sequence[EventRecord]) -> EventStore:
        """The same store as if it held these of its events only, in this order and in these splits."""
        other = copy.copy(self)
        other.records = tuple(records)
        return other

    def open(self, record: EventRecord) -> StoredEvent:
        """Open one event. Its sizes are checked, its bytes only as they are read (see `verify`).

        Raises:
            StoreError: If the file is missing, damaged, or is not the event that the manifest lists.
        """
        path = self.path / record.path
        if (problem := self.unreadable.get(record.event)) is not None:
            raise StoreError(problem.what, problem.hint, event=record.event, file=path)
        _check_size(path, record)
        event = StoredEvent(path, event_id=record.event, sha256=record.sha256)
        sizes = ("num_nodes", "num_edges", "num_tiles", "has_labels")
        listed = (record.event, *(getattr(record, name) for name in sizes))
        held = (event.event_id, *(getattr(event, name) for name in sizes))
        if listed != held:
            event.close()
            what = f"the manifest lists (event, nodes, edges, tiles, labels) {listed} but the file holds {held}"
            raise StoreError(what, "prepare the store again", event=record.event, file=path)
        return event

    def own_settings(self, record: EventRecord) -> dict[str, Any]:
        """Settings of one event alone, such as the field of one that came from another store.

        Raises:
            StoreError: As of `open`.
        """
        with self.open(record) as event:
            return {name: value for name, value in event.settings.items() if self.settings.get(name, self) != value}

    def verify(self, record: EventRecord) -> None:
        """Hash the file of one event and compare with the manifest; about 2 s per GB.

        Raises:
            StoreError: If a single bit differs.
        """
        path = self.path / record.path
        sha256 = file_sha256(path, record.event)
        if sha256 != record.sha256:
            what = f"sha256 is {sha256} but the manifest says {record.sha256}"
            hint = f"the file has changed since it was prepared; {COPY_ANEW}"
            raise StoreError(what, hint, event=record.event, file=path)

    @property
    def beam_spot(self) -> BeamSpot | None:
        """Where collisions lie along the beam: as given, or measured from the events with truth; None without."""
        given = self.settings.get("beam_spot")
        return BeamSpot.from_events(record.beam_spot for record in self.records) if given is None else BeamSpot(*given)

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

    @property
    def scales(self) -> dict[str, list[float]]:
        """Divisors of node and edge features that were read with scales; empty for features that are made here."""
        if "node_scales" not in self.settings:
            return {}
        of_edges = self.settings["edge_scales"] or [1.0] * len(self.edge_feature_names)
        return {"node_scales": self.settings["node_scales"], "edge_scales": of_edges}

    @property
    def feature_definitions(self) -> dict[str, list[tuple[float | None, str | None]]]:
        """Divisor and definition of each of `node_features` and `edge_features`, in order.

        Divisors are those of lengths in mm and angles in rad. A definition is formula, unit, divisor and sign; of a
        column of a file its name and scale. Both are None of features that files of `pyg` or a program of one's own
        bring along.
        """
        found: dict[str, list[tuple[float | None, str | None]]] = {}
        for of, names in (("node_features", self.feature_names), ("edge_features", self.edge_feature_names)):
            known = FEATURES if "source" in self.settings else {}
            found[of] = [(known[name].divisor, known[name].words) if name in known else (None, None) for name in names]
            if self.settings.get(of):
                how = ", where a file lacks it the difference of scaled values" if of == "edge_features" else ""
                scales = zip(names, self.scales[f"{of[:4]}_scales"])
                found[of] = [(scale, f"column {name} of the files{how}, over {scale:g}") for name, scale in scales]
        return found

    @property
    def labels(self) -> dict[str, Label]:
        """Labels of nodes and events by name, with as many classes as any event has.

        Raises:
            Problem: If a name means one thing in one event and another in the next.
        """
        return _labels_of(self.records)

    def __len__(self) -> int:
        return len(self.records)


def standardised_by(records: Sequence[EventRecord]) -> list[EventRecord]:
    """The events whose features the constants count: those to train on, so with truth; all where there are none."""
    return [record for record in records if record.split == "train" and (record.has_labels or record.labels)] or list(
        records
    )


def write_manifest(
    directory: Path,
    records: Sequence[EventRecord],
    settings: Settings,
    split_settings: Settings | None = None,
    surveys: Sequence[EventSurvey] | None = None,
    learned_from: Mapping[str, str] | None = None,
) -> None:
    """Write the manifest of a store, the last file of a preparation. Replaces an old one in one step.

    Args:
        directory: The store, with the files of its events.
        records: The events.
        settings: See `EventStore`.
        split_settings: See `EventStore`.
        surveys: Of each event of `standardised_by`, for `standard` and `survey`. Default: made here, of the files.
        learned_from: See `EventStore`; written where there is a module map or an embedding.

    Raises:
        ValueError: If two events have one name, or do not have the same features.
        StoreError: If an event has to be looked at, and cannot be read.
    """
    seen: set[str] = set()
    for record in records:
        if record.event in seen:
            raise Problem("the event appears twice", "names of events are unique in a store", event=record.event)
        seen.add(record.event)
        for name in ("feature_names", "edge_feature_names"):
            first, other = getattr(records[0], name), getattr(record, name)
            if first != other:
                what = f"the event has {name} {list(other)} but event {records[0].event} has {list(first)}"
                raise Problem(what, "all events of a store need the same", event=record.event)
    _labels_of(records)  # refuses those of two kinds
    counted = standardised_by(records)
    if surveys is None:
        surveys = []
        for record in counted:
            with StoredEvent(Path(directory) / record.path, event_id=record.event) as event:
                surveys.append(EventSurvey.of(event))
    manifest = {
        "format": "domainpar store",
        "schema_version": SCHEMA_VERSION,
        "settings": dict(settings),
        "settings_digest": settings_digest(settings),
        "events": plain(records),
        "standard": standard_of([(survey.nodes, survey.edges) for survey in surveys])._asdict(),
        "survey": survey_of(surveys, counted, settings),
    } | ({} if split_settings is None else {"split_settings": dict(split_settings)})
    if learned_from or LEARNED.keys() & settings.keys():
        manifest["learned_from"] = dict(learned_from or {})
    manifest["content_sha256"] = _digest(manifest)  # of all but itself
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    write_whole(Path(directory) / MANIFEST, text.encode())


def _labels_of(records: Sequence[EventRecord]) -> dict[str, Label]:
    labels: dict[str, Label] = {}
    for record in records:
        for label in record.labels:
            known = labels.setdefault(label.name, label)
            if (known.of, bool(known.classes)) != (label.of, bool(label.classes)):
                what = f"label {label.name} is {label.what} here and {known.what} in another event"
                hint = "integers are classes, floats are numbers"
                if known.of != label.of:
                    hint = f"name it {known.of}_{label.name} or {label.of}_{label.name} in all files"
                raise Problem(what, hint, event=record.event)
            labels[label.name] = known._replace(classes=max(known.classes, label.classes))
    return labels


def _check_size(path: Path, record: EventRecord) -> None:
    try:
        size = path.stat().st_size  # a look at each file; hashing them all would take minutes
    except OSError as error:
        what = f"{error.strerror or error}; the manifest lists it"
        raise StoreError(what, COPY_ANEW, event=record.event, file=path) from error
    if size != record.bytes:
        hint = f"the file is truncated or was replaced; {COPY_ANEW}"
        raise StoreError(f"{size} bytes, the manifest says {record.bytes}", hint, event=record.event, file=path)


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest with its events as records."""
    if not path.is_file():
        what = f"{path.parent} is not a finished store: it has no {path.name}"
        raise StoreError(what, "run python -m domainpar.prepare; one that was interrupted goes on where it stopped")
    try:
        if (size := path.stat().st_size) > LARGEST_MANIFEST:
            raise ValueError(f"it has {size} bytes, at most {LARGEST_MANIFEST} are read")
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        if (version := manifest["schema_version"]) != SCHEMA_VERSION:
            raise OtherVersion(version, path)
        if unknown := sorted(set(manifest) - set(_KEYS)):
            raise ValueError(f"unknown key {unknown[0]!r}")
        sha256 = manifest.pop("content_sha256")
        if sha256 != (digest := _digest(manifest)):
            raise ValueError(f"sha256 of its content is {digest} but it says {sha256}; it was damaged or edited")
        manifest["events"] = records = read_as(tuple[EventRecord, ...], manifest["events"])
        for what, name in ((what, getattr(record, what)) for record in records for what in ("event", "path")):
            # An event's name becomes part of names of files, and a path would lead out of the store.
            if not NAME.fullmatch(name):
                raise ValueError(f"{what} {name[:80]!r} is not a plain name")
        drawn = manifest.get("split_settings")
        manifest["split_settings"] = None if drawn is None else dict(drawn)
        manifest["standard"] = Standard.from_json(manifest["standard"])
        manifest["survey"] = dict(manifest.get("survey", {}))
        learned = manifest["learned_from"] if LEARNED.keys() & manifest["settings"].keys() else {}
        manifest["learned_from"] = {name: str(learned[name]) for name in learned}
        return manifest
    except OtherVersion:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"{path.name} cannot be read: {type(error).__name__}: {error}"
        raise StoreError(what, "copy it anew, or prepare the store again with --overwrite", file=path) from error


def _digest(manifest: dict[str, Any]) -> str:
    """Hash of all that a manifest says, however it is laid out."""
    return sha256_of(json.dumps(manifest, sort_keys=True).encode())
