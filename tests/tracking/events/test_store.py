"""The store: what is read is what was written, or an error that names event and file."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from marks import fault
from random_events import random_assignment, random_event, tiled_events
from refused import refused
from spoilt_files import flip_a_byte

from domainpar.tracking.events.store import (
    EventStore,
    StoredEvent,
    StoreError,
    arrays,
    event_file_name,
    inspect_event,
    names_in,
    write_event,
    write_manifest,
)
from partitioners import number_along_phi

few_disk_cases = settings(max_examples=25)


def stored(directory: Path, event, assignment, num_tiles) -> StoredEvent:
    path = Path(directory) / event_file_name(event.hits.event_id)
    write_event(path, event, assignment, num_tiles)
    return StoredEvent(path)


@pytest.fixture
def the_same_arrays_are_zipped_once():
    """Not here, where the writer is looked at."""


@pytest.fixture
def event_file(tmp_path):
    event = random_event(3)
    path = tmp_path / event_file_name(event.hits.event_id)
    write_event(path, event, random_assignment(3, event.num_nodes, 6), 6)
    return path


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(arrays, "ROWS_PER_CHUNK", 7)


@few_disk_cases
@given(tiled_events())
def test_nodes_and_edges_read_back_as_they_were_given(case):
    event, assignment, num_tiles = case
    with tempfile.TemporaryDirectory() as directory, stored(Path(directory), event, assignment, num_tiles) as found:
        rows = found.read_nodes("original_row", np.arange(found.num_nodes))
        places = found.read_edges("original_position", np.arange(found.num_edges))
        for name in ("volume", "layer", "module", "hit_id"):
            assert np.array_equal(found.read_nodes(name, np.arange(len(rows))), getattr(event.hits, name)[rows])
        assert np.array_equal(found.read_nodes("features", np.arange(len(rows))), event.features[rows])
        assert np.array_equal(found.read_edges("features", np.arange(len(places))), event.edge_features[places])
        src, dst = (found.read_edges(name, np.arange(len(places))) for name in ("src", "dst"))
        assert np.array_equal(rows[np.stack([src, dst])], event.edge_index[:, places])
        assert found.has_labels == (event.label is not None)
        if found.has_labels:
            assert np.array_equal(found.read_edges("label", np.arange(len(places))), event.label[places])


def test_an_event_of_more_nodes_than_the_root_of_the_largest_int32_reads_back_as_it_was_given(tmp_path):
    event = random_event(6, 50_000, 70_000, positions=False)
    with stored(tmp_path, event, random_assignment(6, 50_000, 200), 200) as found:
        rows = found.read_nodes("original_row", np.arange(50_000))
        edge_ids, src, dst = found.read_part_edges(np.arange(200), "incident")
        places = found.read_edges("original_position", edge_ids)
        assert np.array_equal(edge_ids, np.arange(70_000))
        assert np.array_equal(rows[np.stack([src, dst])], event.edge_index[:, places])
        assert np.array_equal(found.read_nodes("features", np.arange(50_000)), event.features[rows])
        assert np.array_equal(found.read_edges("label", edge_ids), event.label[places])
        for tiles in (np.arange(150, 200), np.arange(0, 200, 3)):
            ids, src, dst = found.read_part_edges(tiles, "incoming")
            tile = np.repeat(np.arange(200), np.diff(found.node_ptr))
            assert np.array_equal(ids, np.flatnonzero(np.isin(tile[found.read_edges("dst", edge_ids)], tiles)))
            assert np.array_equal(np.stack([src, dst]), [found.read_edges(name, ids) for name in ("src", "dst")])


@few_disk_cases
@given(tiled_events())
def test_a_parts_edges_are_exactly_those_that_touch_it(case):
    event, assignment, num_tiles = case
    with tempfile.TemporaryDirectory() as directory, stored(Path(directory), event, assignment, num_tiles) as found:
        tile = np.repeat(np.arange(num_tiles), np.diff(found.node_ptr))
        src, dst = (found.read_edges(name, np.arange(found.num_edges)) for name in ("src", "dst"))
        for part in range(3):
            tiles = np.arange(part, num_tiles, 3)
            ends_in, starts_in = np.isin(tile[dst], tiles), np.isin(tile[src], tiles)
            for policy, wanted in (("incoming", ends_in), ("incident", ends_in | starts_in)):
                edge_ids, part_src, part_dst = found.read_part_edges(tiles, policy)
                assert np.array_equal(edge_ids, np.flatnonzero(wanted))
                assert np.array_equal(part_src, src[edge_ids])
                assert np.array_equal(part_dst, dst[edge_ids])


@few_disk_cases
@given(tiled_events())
def test_the_stored_tile_graph_counts_the_edges_between_tiles(case):
    event, assignment, num_tiles = case
    if event.hits.position is not None:
        assignment = number_along_phi(assignment, event.hits.position, num_tiles)
    with tempfile.TemporaryDirectory() as directory, stored(Path(directory), event, assignment, num_tiles) as found:
        tiles = found.tile_graph()
        assert tiles.node_counts.tolist() == np.bincount(assignment, minlength=num_tiles).tolist()
        src_tile, dst_tile = assignment[event.edge_index]
        assert tiles.edge_counts.tolist() == np.bincount(dst_tile, minlength=num_tiles).tolist()
        counts = np.zeros((num_tiles, num_tiles), np.int64)
        counts[tiles.src_tile, tiles.dst_tile] = tiles.joining
        for a in range(num_tiles):
            for b in range(num_tiles):
                assert counts[a, b] == (0 if a == b else np.count_nonzero((src_tile == a) & (dst_tile == b)))


@pytest.mark.usefixtures("small_chunks")
def test_any_choice_of_ids_in_any_order_gathers_across_chunks(tmp_path):
    event = random_event(5, 60, 300)
    found = stored(tmp_path, event, random_assignment(5, 60, 9), 9)
    rng = np.random.default_rng(0)
    for kind, names, read, count in (
        ("nodes", names_in("nodes"), found.read_nodes, 60),
        ("edges", names_in("edges"), found.read_edges, 300),
    ):
        for name in names:
            whole = read(name, np.arange(count))
            for size in (0, 1, 4, count):
                ids = rng.integers(0, count, size)
                assert read(name, ids).tobytes() == whole[ids].tobytes(), (kind, name, size)


@pytest.mark.usefixtures("small_chunks")
def test_only_the_chunks_that_hold_the_ids_are_read(tmp_path):
    event = random_event(5, 60, 300)
    path = stored(tmp_path, event, random_assignment(5, 60, 9), 9).path
    flip_a_byte(path, "edges/label/c/20")
    with StoredEvent(path) as found:
        found.read_edges("label", np.array([139, 147, 299]))
        with pytest.raises(StoreError, match="edges/label"):
            found.read_edges("label", np.array([139, 146]))


def test_particles_read_back(tmp_path):
    event = random_event(1)
    found = stored(tmp_path, event, random_assignment(1, event.num_nodes, 4), 4).particles()
    for name in ("particle_id", "pt", "eta", "vertex", "nhits", "charge"):
        expected = getattr(event.hits.particles, name)
        assert getattr(found, name).dtype == expected.dtype
        assert np.array_equal(getattr(found, name), expected)


def test_ids_come_as_int64_and_features_as_float32(tmp_path):
    found = stored(tmp_path, random_event(1), random_assignment(1, 40, 4), 4)
    one = np.array([0])
    for name in ("src", "dst", "original_position"):
        assert found.read_edges(name, one).dtype == np.int64
    assert {found.read_nodes(name, one).dtype.name for name in ("hit_id", "particle_id", "original_row")} == {"int64"}
    assert {found.read_nodes(name, one).dtype.name for name in ("features", "position", "weight")} == {"float32"}


def test_what_a_source_did_not_give_is_said_to_be_missing(tmp_path):
    found = stored(tmp_path, random_event(1, positions=False, labels=False), random_assignment(1, 40, 4), 4)
    assert (found.has_labels, found.has_positions, found.has_particle_ids) == (False, False, False)
    assert found.particles() is None
    with refused("no label of edges", "000000001", found.path):
        found.read_edges("label", np.array([0]))
    with pytest.raises(ValueError, match="no position of nodes"):
        found.read_nodes("position", np.array([0]))


def test_unknown_arrays_ids_tiles_and_policies_are_refused(tmp_path):
    found = stored(tmp_path, random_event(1), random_assignment(1, 40, 4), 4)
    with pytest.raises(ValueError, match="unknown array 'colour'"):
        found.read_nodes("colour", np.array([0]))
    with pytest.raises(ValueError, match="nodes .*0 to 39, .*-1 to 3"):
        found.read_nodes("features", np.array([-1, 3]))
    with pytest.raises(ValueError, match="edges .*0 to 119, .*0 to 120"):
        found.read_edges("src", np.array([0, 120]))
    with pytest.raises(ValueError, match="ascending"):
        found.read_part_edges(np.array([2, 1]), "incoming")
    with pytest.raises(ValueError, match="ascending"):
        found.read_part_edges(np.array([2, 4]), "incoming")
    with pytest.raises(ValueError, match="unknown edge policy 'both'"):
        found.read_part_edges(np.array([2]), "both")


def test_an_event_written_twice_has_the_same_bytes_with_chunks_in_the_order_of_their_names(tmp_path, monkeypatch):
    """zarr writes those of an array in any order."""
    monkeypatch.setattr(arrays, "ROWS_PER_CHUNK", 16)
    event, assignment = random_event(3, 300, 900), random_assignment(3, 300, 6)
    first, second = (write_event(tmp_path / name, event, assignment, 6) for name in ("one", "two"))
    assert first.sha256 == second.sha256
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    with zipfile.ZipFile(tmp_path / "one") as archive:
        names = archive.namelist()
    assert names == sorted(names)
    assert len(names) > 500


@pytest.mark.parametrize("size", [0, 10, 1000, -1])
def test_a_truncated_event_is_refused(event_file, size):
    event_file.write_bytes(event_file.read_bytes()[:size])
    with refused("^cannot read", "000000003", event_file):
        StoredEvent(event_file)


@fault(18)
@pytest.mark.parametrize("member", ["edges/src/c/0", "edges/label/zarr.json", "zarr.json", "tiles/node_ptr/c/0"])
def test_an_event_that_lost_a_member_is_refused(event_file, member):
    with zipfile.ZipFile(event_file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    assert members.pop(member)
    with zipfile.ZipFile(event_file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(StoreError, match="cannot read"):
        StoredEvent(event_file)


@fault(18)
@pytest.mark.parametrize(("listed", "other"), [("[40, 3]", "[41, 3]"), ("[40, 3]", "[39, 3]"), ('"uint8"', '"uint16"')])
def test_an_array_of_another_shape_or_type_than_its_chunks_have_is_refused(event_file, listed, other):
    with zipfile.ZipFile(event_file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    description = json.dumps(json.loads(members["zarr.json"]))
    assert listed in description
    members["zarr.json"] = description.replace(listed, other).encode()
    with zipfile.ZipFile(event_file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(StoreError, match="c/1/0 is missing|its shape is|bytes, expected"):
        StoredEvent(event_file)


@fault(18)
def test_arrays_of_zeros_are_stored_and_pass_the_check_for_missing_chunks(tmp_path):
    event = random_event(1)
    event = replace(event, label=np.zeros_like(event.label))
    found = stored(tmp_path, event, random_assignment(1, 40, 4), 4)
    assert not found.read_edges("label", np.arange(found.num_edges)).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edge_index": np.array([[0, 1], [2, 40]])}, r"edge 1: 1 -> 40; .*0 to 39"),
        ({"edge_index": np.array([[0, -1], [2, 4]])}, r"edge 1: -1 -> 4"),
        ({"edge_index": np.zeros((2, 2))}, r"edge_index .*\[2, 2\], .*\[2, edges\]"),
        ({"features": np.full((40, 3), np.nan, np.float32)}, r"features .*120 values .*nan at \[0, 0\]"),
        ({"edge_features": np.array([[0.0] * 6, [np.inf] * 6], np.float32)}, r"edge_features .*inf at \[1, 0\]"),
        ({"label": np.array([0, 2], np.uint8)}, "edge 1 is 2,"),
        ({"label": np.array([0], np.uint8)}, r"label .*\[1\], .*\[2\]"),
        ({"features": np.zeros((39, 3), np.float32)}, r"features .*\[39, 3\], .* \[40, 3\]"),
    ],
)
def test_a_graph_that_nobody_can_compute_with_is_refused(tmp_path, change, message):
    event = replace(random_event(1, 40, 2), edge_index=np.array([[0, 1], [2, 3]]))
    with pytest.raises(ValueError, match=message):
        write_event(tmp_path / "event1.zarr.zip", replace(event, **change), np.zeros(40, np.int32), 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("assignment", "num_tiles", "message"),
    [
        (np.full(40, 3), 3, "tiles 3 to 3 .*3"),
        (np.full(40, -1), 3, "tiles -1 to -1"),
        (np.zeros(39, int), 3, r"\[39\], .*\[40\]"),
        (np.zeros(40, int), 0, "num_tiles is 0"),
    ],
)
def test_an_assignment_that_does_not_fit_is_refused(tmp_path, assignment, num_tiles, message):
    with pytest.raises(ValueError, match=message):
        write_event(tmp_path / "event1.zarr.zip", random_event(1), assignment, num_tiles)


@pytest.mark.parametrize("positions", [True, False])
def test_tiles_are_numbered_along_phi_where_there_are_positions(tmp_path, positions):
    event = random_event(1)
    phi = np.arctan2(event.hits.position[:, 1], event.hits.position[:, 0])
    backwards = 3 - np.argsort(np.argsort(phi)) // 10
    if not positions:
        event = replace(event, hits=replace(event.hits, position=None))
    found = stored(tmp_path, event, backwards, 4)
    tile = np.repeat(np.arange(4), np.diff(found.node_ptr))
    expected = 3 - backwards if positions else backwards
    assert tile.tolist() == expected[found.read_nodes("original_row", np.arange(40))].tolist()


def make_store(directory: Path, num_events: int = 3, **changes) -> EventStore:
    records = []
    for seed, split in zip(range(num_events), ["train", "val", "test"]):
        event = random_event(seed)
        record = write_event(directory / event_file_name(event.hits.event_id), event, random_assignment(seed, 40, 4), 4)
        records.append(replace(record, **{"split": split} | changes))
    write_manifest(directory, records, {"tiles": 4})
    return EventStore(directory)


def test_a_store_lists_its_events_by_split_and_opens_them(tmp_path):
    store = make_store(tmp_path)
    assert [record.event for record in store.events()] == ["000000000", "000000001", "000000002"]
    assert [record.event for record in store.events("val")] == ["000000001"]
    with store.open(store.events("val")[0]) as event:
        assert event.event_id == "000000001"
        assert event.sha256 == inspect_event(event.path)[0].sha256
    with pytest.raises(ValueError, match="unknown split 'validation'"):
        store.events("validation")


def test_the_digest_of_a_store_depends_on_its_data_and_splits_only(tmp_path):
    first, second, other = (make_store(tmp_path / name, n) for name, n in (("a", 3), ("b", 3), ("c", 2)))
    assert first.digest == second.digest != other.digest
    assert make_store(tmp_path / "d", split="train").digest != first.digest


def test_a_store_without_a_readable_manifest_is_refused(tmp_path):
    with pytest.raises(StoreError, match="not a finished store"):
        EventStore(tmp_path)
    manifest = make_store(tmp_path).path / "manifest.json"
    text = manifest.read_text()
    for damaged in ("", text[: len(text) // 2], "[]", "{}"):
        manifest.write_text(damaged)
        with pytest.raises(StoreError, match=r"manifest\.json cannot be read"):
            EventStore(tmp_path)


def test_a_store_that_lost_an_event_or_whose_event_was_replaced_is_refused(tmp_path):
    store = make_store(tmp_path)
    first, second, _ = store.events()
    shutil.copy(tmp_path / second.path, tmp_path / first.path)
    if first.bytes == second.bytes:
        pytest.fail("the two events of this test must differ in size")
    with refused(f"the manifest says {first.bytes}", first.event, tmp_path / first.path):
        EventStore(tmp_path)
    (tmp_path / first.path).unlink()
    with refused("No such file", first.event, tmp_path / first.path):
        EventStore(tmp_path)
    with pytest.raises(StoreError, match="No such file"):
        store.open(first)


def test_an_event_of_another_name_is_refused_also_where_it_has_the_same_sizes(tmp_path):
    store = make_store(tmp_path)
    record = store.events()[0]
    other = random_event(0, event_id="000000009")
    path = tmp_path / record.path
    write_event(path, other, random_assignment(0, 40, 4), 4)
    assert path.stat().st_size == record.bytes
    with refused("'000000000', 40, .*'000000009', 40,", record.event, path):
        store.open(record)


def test_an_event_that_is_not_the_one_listed_is_refused(tmp_path):
    store = make_store(tmp_path)
    with pytest.raises(StoreError, match="prepare the store again"):
        store.open(replace(store.events()[0], num_edges=7))


def test_events_with_different_features_or_one_name_do_not_make_a_store(tmp_path):
    record = write_event(tmp_path / "event1.zarr.zip", random_event(1), np.zeros(40, int), 1)
    with pytest.raises(ValueError, match="appears twice"):
        write_manifest(tmp_path, [record, record], {})
    with pytest.raises(ValueError, match=r"has feature_names \['r'\]"):
        write_manifest(tmp_path, [record, replace(record, event="2", feature_names=("r",))], {})


def test_names_that_cannot_name_a_file_are_refused():
    assert event_file_name("000001000_g000") == "event000001000_g000.zarr.zip"
    for name in ("", "../x", "a/b", ".hidden", "a b"):
        with pytest.raises(ValueError, match="cannot name a file"):
            event_file_name(name)


def test_a_killed_writer_leaves_no_file_under_an_events_name(tmp_path):
    script = """
import os, sys, numpy as np
sys.path[:0] = sys.argv[2:]
from random_events import random_event
from domainpar.tracking.events.store import write_event
while True:
    print("go", flush=True)
    write_event(sys.argv[1], random_event(1, 2000, 20000), np.zeros(2000, int), 1)
"""
    path, here = tmp_path / "event1.zarr.zip", Path(__file__).parents[2]
    for delay in (0.0, 0.01, 0.03):
        command = [sys.executable, "-c", script, str(path), str(here), str(here.parent)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            writer.wait(delay)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(10)
        writer.stdout.close()
        if path.exists():
            inspect_event(path)
    others = [name for name in os.listdir(tmp_path) if name != path.name]
    assert all(name.startswith(".partial-") for name in others)


def test_the_manifest_says_what_a_reader_outside_this_project_needs(tmp_path):
    make_store(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["settings"] == {"tiles": 4}
    assert set(manifest["events"][0]) == {
        "event", "path", "bytes", "sha256", "num_nodes", "num_edges", "num_tiles", "has_labels", "split",
        "feature_names", "edge_feature_names", "labels", "beam_spot",
    }  # fmt: skip
