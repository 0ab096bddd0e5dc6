"""Bits that flip on a disk: everything that can be read of a store is as it was written, or an error says it is not."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from marks import fault
from random_events import random_assignment, random_event
from random_store import edit_manifest

from domainpar.common.problems import Problem
from domainpar.tracking.events.store import (
    EventStore,
    StoredEvent,
    StoreError,
    arrays,
    event_file_name,
    names_in,
    write_event,
    write_manifest,
)

NUM_FLIPS = 300
"""Random bits that `make test-faults` flips in an event: three times the 100 that are asked for."""


@dataclass
class Tally:
    """What became of flips: found, harmless (all that is read is the same), or silent; and errors without the file."""

    found: int = 0
    harmless: int = 0
    silent: list[int] = field(default_factory=list)
    misplaced: int = 0

    def __str__(self) -> str:
        total = self.found + self.harmless + len(self.silent)
        return f"{total} flipped bits: {self.found} found, {self.harmless} harmless, {len(self.silent)} silent"


def all_of_an_event(path):
    """Everything that an event tells, values and what describes them."""
    with StoredEvent(path) as event:
        told = [event.event_id, event.num_nodes, event.num_edges, event.num_tiles, event.feature_names,
                event.edge_feature_names, event.settings, event.settings_digest, event.source_digest,
                event.label_note, event.labels, event.graph_labels]  # fmt: skip
        values = [event.read_nodes(name, np.arange(event.num_nodes)) for name in names_in("nodes")]
        values += [event.read_edges(name, np.arange(event.num_edges)) for name in names_in("edges")]
        values += [*vars(event.tile_graph()).values(), event.node_ptr, event.edge_ptr]
        values += [values for values in vars(event.particles()).values() if values is not None]
        for policy in ("incoming", "incident"):
            values += event.read_part_edges(np.arange(0, event.num_tiles, 2), policy)
        return repr(told), [(array.dtype.str, array.shape, array.tobytes()) for array in values]


def all_of_a_manifest(path):
    store = EventStore(path.parent)
    return store.records, store.settings, store.settings_digest, store.digest, store.feature_names


def flip(path, read, places):
    """Flip these bits of a file, one at a time."""
    content, expected, tally = path.read_bytes(), read(path), Tally()
    for place in places:
        spoilt = bytearray(content)
        spoilt[place // 8] ^= 1 << place % 8
        path.write_bytes(spoilt)
        try:
            same = read(path) == expected
        except Problem as error:
            tally.found += 1
            tally.misplaced += error.file != str(path)
        else:
            tally.harmless += same
            tally.silent += [] if same else [place]
    path.write_bytes(content)
    assert tally.misplaced == 0
    return tally


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store of one event whose arrays have several chunks, as those of full events have."""
    monkeypatch.setattr(arrays, "ROWS_PER_CHUNK", 16)
    graph = replace(random_event(3), label_note="made up")
    record = write_event(tmp_path / event_file_name(graph.hits.event_id), graph, random_assignment(3, 40, 6), 6,
                         settings={"cut": 0.5}, source_digest="ab" * 32)  # fmt: skip
    write_manifest(tmp_path, [record], {"cut": 0.5})
    return EventStore(tmp_path)


def of_event(store, num_flips, seed=0):
    path = store.path / store.records[0].path
    bits = np.random.default_rng(seed).choice(8 * path.stat().st_size, num_flips, replace=False)
    return flip(path, all_of_an_event, bits.tolist())


@fault(17)
def test_a_flipped_bit_of_an_event_is_found_or_changes_nothing(store):
    tally = of_event(store, 100)  # zarr's own description of each array is not read
    assert (tally.silent, tally.found + tally.harmless) == ([], 100)
    assert tally.found > 30


@fault(17)
@pytest.mark.faults
def test_no_bit_of_many_of_an_event_flips_in_silence(store):
    tally = of_event(store, NUM_FLIPS, seed=1)
    print(f"event: {tally}")
    assert tally.silent == []


def test_no_bit_of_the_list_of_members_flips_in_silence(store):
    """The directory at the end of a zip has no checksum: a chunk whose name changes would read as zeros."""
    path = store.path / store.records[0].path
    with zipfile.ZipFile(path) as archive:
        start, names = archive.start_dir, archive.namelist()
    content = path.read_bytes()
    places = [8 * (content.index(name.encode(), start) + len(name) - 1) for name in names if "/c/" in name]
    tally = flip(path, all_of_an_event, [place + bit for place in places for bit in (0, 1, 2)])
    assert (tally.silent, tally.harmless) == ([], 0)


@pytest.mark.faults
def test_no_bit_of_the_whole_directory_of_members_flips_in_silence(store):
    path = store.path / store.records[0].path
    with zipfile.ZipFile(path) as archive:
        start = archive.start_dir
    bits = range(8 * start, 8 * path.stat().st_size, 89)
    tally = flip(path, all_of_an_event, bits)
    print(f"directory of the zip: {tally}")
    assert tally.silent == []


def test_a_flipped_bit_of_the_manifest_is_found_or_changes_nothing(store):
    path = store.path / "manifest.json"
    bits = np.random.default_rng(2).choice(8 * path.stat().st_size, 60, replace=False)
    tally = flip(path, all_of_a_manifest, bits.tolist())
    assert (tally.silent, tally.found + tally.harmless) == ([], 60)
    assert tally.found > 40


@pytest.mark.faults
def test_no_bit_of_the_manifest_flips_in_silence(store):
    path = store.path / "manifest.json"
    tally = flip(path, all_of_a_manifest, range(0, 8 * path.stat().st_size, 5))
    print(f"manifest: {tally}")
    assert tally.silent == []


@fault(17)
def test_a_flipped_bit_anywhere_in_an_event_is_found_by_its_hash(store):
    path = store.path / store.records[0].path
    bits = np.random.default_rng(4).choice(8 * path.stat().st_size, 100, replace=False)
    tally = flip(path, lambda _: store.verify(store.records[0]), bits.tolist())
    assert (tally.found, tally.harmless) == (100, 0)


@pytest.mark.parametrize("key", ["content_sha256", "standard", "events", "settings"])
def test_a_manifest_that_lacks_what_it_has_to_say_is_refused(store, key):
    """As those of unfinished versions do: the checksum, or the constants that standardise features."""
    path = store.path / "manifest.json"
    if key == "content_sha256":
        content = json.loads(path.read_text())
        del content[key]
        path.write_text(json.dumps(content))
    else:
        edit_manifest(store.path, lambda manifest: manifest.pop(key))
    with pytest.raises(StoreError, match=f"manifest.json cannot be read: .*{key}.*\n?hint: .*--overwrite"):
        EventStore(store.path)


def test_a_manifest_that_was_edited_is_refused(store):
    path = store.path / "manifest.json"
    path.write_text(path.read_text().replace('"split": "train"', '"split": "test"'))
    with pytest.raises(StoreError, match="it was damaged or edited"):
        EventStore(store.path)
