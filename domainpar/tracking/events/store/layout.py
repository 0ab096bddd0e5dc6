"""Names of the files of a store, records of its events, hashes, and the errors of all reading."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from domainpar.common.problems import Problem
from domainpar.tracking.events.labels import Label
from domainpar.tracking.events.store.schema import SCHEMA_VERSION

Split = Literal["train", "val", "test"]
Settings = Mapping[str, Any]

MANIFEST = "manifest.json"
MODULE_MAP, EMBEDDING = "module_map.safetensors", "embedding.safetensors"
LEARNED = {"module_map": MODULE_MAP, "embedding": EMBEDDING}
"""The copy that a store keeps of what made its candidate edges, by the name of the setting and flag."""
SUFFIX = ".zarr.zip"

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names of events and files of a store: nothing that leads to another directory."""

COPY_ANEW = "prepare the event again or copy it anew"


class StoreError(Problem):
    """A store or one of its events is missing, damaged, or not what its manifest says."""


class OtherVersion(StoreError):
    """A file of another version of the schema. There is no conversion: the source has everything."""

    def __init__(self, version: object, file: Path, event: str | None = None) -> None:
        self.version = version
        what = f"it is of schema version {version!r}, this program reads and writes version {SCHEMA_VERSION}"
        hint = "prepare the store again (--overwrite), and score it again, with the flags of before"
        super().__init__(what, hint, event=event, file=file)


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
        labels: Labels of its nodes, and of itself.
        beam_spot: Where its collisions lie along the beam, as of `BeamSpot`, in mm; None where it is not known.
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
    labels: tuple[Label, ...] = ()
    beam_spot: tuple[float, float] | None = None


def event_file_name(event_id: str) -> str:
    """File name of an event in a store.

    Raises:
        ValueError: If the name of the event cannot be part of a file name.
    """
    if not NAME.fullmatch(event_id):
        raise Problem(f"event name {event_id[:80]!r} cannot name a file", "use letters, digits, '.', '_' and '-' only")
    return f"event{event_id}{SUFFIX}"


def settings_digest(settings: Settings) -> str:
    """Hash of the settings of a preparation and of the layout of the files: equal digests mean equal stores."""
    return sha256_of(
        json.dumps({"schema_version": SCHEMA_VERSION, "settings": dict(settings)}, sort_keys=True).encode()
    )


def sha256_of(content: bytes) -> str:
    """sha256 of some bytes, in hex."""
    return hashlib.sha256(content).hexdigest()


def file_sha256(path: Path, event_id: str) -> str:
    """sha256 of a file, in hex.

    Raises:
        StoreError: If it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StoreError(f"cannot be read: {error.strerror or error}", COPY_ANEW, event=event_id, file=path) from error
