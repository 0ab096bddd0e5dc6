"""The store: one zarr zip per event in stored order, and a manifest beside them. The only room that knows zarr.

A directory `store/` holds

    manifest.json                what was prepared, how, and the sha256 of every event
    event000001001.zarr.zip      one event: arrays under nodes/ edges/ tiles/ particles/, each chunk with a crc32c

Files appear under their name only when they are complete. The same event prepared with the same settings and the
same versions of the libraries gives the same bytes.
"""

from domainpar.tracking.events.store.arrays import read_arrays, write_arrays
from domainpar.tracking.events.store.event import StoredEvent, WholeEvent, inspect_event
from domainpar.tracking.events.store.filtered import FilteredEvent
from domainpar.tracking.events.store.joined import Events, JoinedEvents
from domainpar.tracking.events.store.layout import (
    LEARNED,
    MANIFEST,
    MODULE_MAP,
    SUFFIX,
    EventRecord,
    OtherVersion,
    Settings,
    Split,
    StoreError,
    event_file_name,
    file_sha256,
    settings_digest,
)
from domainpar.tracking.events.store.manifest import EventStore, standardised_by, write_manifest
from domainpar.tracking.events.store.schema import SCHEMA_VERSION, names_in
from domainpar.tracking.events.store.survey import EventSurvey, outside
from domainpar.tracking.events.store.writing import write_event

__all__ = [
    "LEARNED", "MANIFEST", "MODULE_MAP", "SCHEMA_VERSION", "SUFFIX", "EventRecord", "EventStore", "EventSurvey",
    "Events", "FilteredEvent", "JoinedEvents", "OtherVersion", "Settings", "Split", "StoreError", "StoredEvent",
    "WholeEvent", "event_file_name", "file_sha256", "inspect_event", "names_in", "outside", "read_arrays",
    "settings_digest", "standardised_by", "write_arrays", "write_event", "write_manifest",
]  # fmt: skip
