"""The schema of the store: written events fit it, others are refused, and docs/reference/store.md shows it."""

import json
import zipfile
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from marks import fault
from random_events import random_assignment, random_event
from refused import refused

from domainpar.tracking.events.graph import Hits, Particles
from domainpar.tracking.events.preparation import prepare
from domainpar.tracking.events.sources import Events
from domainpar.tracking.events.store import (
    EventStore,
    StoredEvent,
    WholeEvent,
    event_file_name,
    write_event,
    write_manifest,
)
from domainpar.tracking.events.store.schema import ARRAYS, LETTERS, SCHEMA_VERSION, check_arrays, names_in, table

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "store.md"
SIZES = {"N": 4, "E": 5, "K": 2, "K+1": 3, "F": 2, "G": 1}
SHAPES = {**SIZES, "P": 3, "L": 2, "J": 1, "C": 2}


def arrays_of_a_file(**changed):
    """Shape and type of every array, as a file may have them; None takes one out."""
    arrays = {
        name: (tuple(SHAPES.get(letter) or int(letter) for letter in array.shape), array.file_dtypes[0])
        for name, array in ARRAYS.items()
    } | {name.replace("__", "/"): array for name, array in changed.items()}
    return {name: array for name, array in arrays.items() if array is not None}


def test_the_page_shows_the_table_of_the_schema():
    made = "\n".join(table())
    assert made in PAGE.read_text(encoding="utf-8"), f"write this into docs/reference/store.md:\n{made}"
    assert f"schema version {SCHEMA_VERSION}." in PAGE.read_text(encoding="utf-8")


def test_the_schema_has_every_column_of_hits_and_particles():
    # What clusters tell becomes node features.
    assert {field.name for field in fields(Hits)} - {"event_id", "particles", "clusters"} <= set(names_in("nodes"))
    assert set(names_in("particles")) == {field.name for field in fields(Particles)}
    assert {letter for array in ARRAYS.values() for letter in array.shape} - {"3", "8"} <= set(LETTERS)


def test_a_file_with_all_arrays_and_one_without_what_a_source_did_not_give_fit():
    check_arrays(arrays_of_a_file(), SIZES)
    optional = {name.replace("/", "__"): None for name, array in ARRAYS.items() if array.optional}
    without_particles = {f"particles__{name}": None for name in names_in("particles")}
    check_arrays(arrays_of_a_file(**optional), SIZES)
    check_arrays(arrays_of_a_file(**(optional | without_particles)), SIZES)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"edges__src": None}, "edges/src is missing"),
        ({"tiles__joining": None}, "tiles/joining is missing"),
        ({"particles__pt": None}, "particles/pt is missing"),
        ({"edges__colour": ((5,), "int32")}, "edges/colour "),
        ({"edges__label": ((4,), "uint8")}, r"edges/label: .*\(4,\), .*\(5,\)"),
        ({"nodes__features": ((4,), "float32")}, r"nodes/features: .*\(4,\), .*\(4, 2\)"),
        ({"nodes__position": ((4, 2), "float32")}, r"nodes/position: .*\(4, 2\), .*\(4, 3\)"),
        ({"tiles__dst_tile": ((2,), "int64")}, r"tiles/dst_tile: .*\(2,\), .*\(1,\)"),
        ({"particles__eta": ((2,), "float32")}, r"particles/eta: .*\(2,\), .*\(3,\)"),
        ({"edges__dst": ((5,), "float32")}, "edges/dst: .*float32, .*int32 or int64"),
        ({"nodes__weight": ((4,), "float64")}, "nodes/weight: .*float64, .*float32"),
    ],
)
def test_an_array_that_does_not_fit_is_named(changed, said):
    with pytest.raises(ValueError, match=said):
        check_arrays(arrays_of_a_file(**changed), SIZES)


def test_a_number_that_its_type_cannot_hold_is_refused_and_never_wrapped(tmp_path):
    graph = random_event(1)
    layer = graph.hits.layer.astype(np.int64)
    layer[3] = 2**31
    with refused("nodes/layer has values from 2 to 2147483648, more than int32 holds", "000000001", None):
        write_event(tmp_path / "x", replace(graph, hits=replace(graph.hits, layer=layer)), np.zeros(40, int), 1)
    assert list(tmp_path.iterdir()) == []


def test_a_whole_event_is_read_in_the_order_of_its_source(tmp_path):
    for number, (positions, labels) in enumerate([(True, True), (False, False)]):
        graph = random_event(number, positions=positions, labels=labels)
        path = tmp_path / event_file_name(graph.hits.event_id)
        write_event(path, graph, random_assignment(3, graph.num_nodes, 6), 6)
        with StoredEvent(path) as event:
            whole = WholeEvent(event)
            assert np.array_equal(whole.edge_index, graph.edge_index)
            assert np.array_equal(whole.edges("features"), graph.edge_features)
            for name in ("hit_id", "layer", "position", "particle_id"):
                stored, given = whole.nodes(name), getattr(graph.hits, name)
                assert stored is None if given is None else np.array_equal(stored, given)
            label = whole.edges("label")
            assert label is None if graph.label is None else np.array_equal(label, graph.label)


def of_version(version, path):
    """The manifest and the event of a store, as another version of this program wrote them."""
    for file, member in ((path.parent / "manifest.json", None), (path, "zarr.json")):
        if member is None:
            file.write_text(json.dumps(json.loads(file.read_text()) | {"schema_version": version}))
            continue
        with zipfile.ZipFile(file) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        described = json.loads(members[member])
        described["attributes"]["schema_version"] = version
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in (members | {member: json.dumps(described).encode()}).items():
                archive.writestr(name, content)


@fault(18)
@pytest.mark.parametrize("version", [1, 99])
def test_a_store_of_another_version_is_refused_and_to_be_prepared_again(tmp_path, version):
    path = tmp_path / event_file_name("000000003")
    record = write_event(path, random_event(3), np.zeros(40, int), 1)
    write_manifest(tmp_path, [record], {})
    of_version(version, path)
    said = f"version {version}, .* version {SCHEMA_VERSION}"
    with refused(said, None, tmp_path / "manifest.json") as refusal:
        EventStore(tmp_path)
    assert refusal.value.hint.startswith("prepare the store again (--overwrite)")
    with refused(said, "000000003", path):
        StoredEvent(path)


def test_a_store_of_another_version_is_replaced_when_that_is_asked_for_and_never_else(tmp_path):
    graph = random_event(3)
    source = Events((graph.hits.event_id,), lambda _: graph, lambda _: [], {"source": "random"})
    store = prepare(source, tmp_path, num_tiles=2, partitioner="contiguous")
    path = tmp_path / store.records[0].path
    new = path.read_bytes()
    of_version(1, path)
    old = path.read_bytes()
    with refused("version 1, .*--overwrite"):
        prepare(source, tmp_path, num_tiles=2, partitioner="contiguous")
    assert path.read_bytes() == old
    prepare(source, tmp_path, num_tiles=2, partitioner="contiguous", overwrite=True)
    assert path.read_bytes() == new
