"""Files made to do harm: nothing of them is run, nothing leaves its directory, nothing absurd is allocated."""

from __future__ import annotations

import io
import json
import pickle
import resource
import zipfile
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from marks import fault
from random_events import random_assignment, random_event
from random_store import edit_manifest
from refused import refused
from source_files import read_file
from test_pyg import GRAPH, payloads, save_bare, save_old

torch = pytest.importorskip("torch")

from domainpar.tracking.events.store import (  # noqa: E402  # noqa: E402
    EventStore,
    StoredEvent,
    event_file_name,
    write_event,
    write_manifest,
    writing,
)

KINDS = ("system", "check_call", "exec", "eval", "timeit")


@contextmanager
def little_memory(megabytes=512):
    """Any allocation of much more than the process has now fails."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + megabytes * 2**20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# --- programs in files -----------------------------------------------------------------------------------------------


def save_in_npz(thing, path):
    arrays = {"X": np.zeros((3, 3)), "y": np.array([thing, thing, thing], object)}
    np.savez(path, **arrays, **dict.fromkeys(("Ri_rows", "Ri_cols", "Ro_rows", "Ro_cols"), np.arange(3)))


def save_as_npz(thing, path):
    path.write_bytes(pickle.dumps(thing))


WAYS = {
    "pyg, zip": (lambda thing, path: torch.save({**GRAPH, "z": thing}, path), "event7.pyg", "pyg"),
    "pyg, old format": (lambda thing, path: save_old({**GRAPH, "z": thing}, path), "event7.pt", "pyg"),
    "pyg, pickle": (lambda thing, path: save_bare({**GRAPH, "z": thing}, path), "event7.pyg", "pyg"),
    "pyg, alone": (save_bare, "event7.pt", "pyg"),
    "acorn, zip": (lambda thing, path: torch.save({**GRAPH, "z": thing}, path), "event7.pyg", "acorn"),
    "acorn, old format": (lambda thing, path: save_old({**GRAPH, "z": thing}, path), "event7.pyg", "acorn"),
    "acorn, pickle": (lambda thing, path: save_bare({**GRAPH, "z": thing}, path), "event7.pyg", "acorn"),
    "npz, object array": (save_in_npz, "event7.npz", "heptrkx"),
    "npz, pickle": (save_as_npz, "event7.npz", "heptrkx"),
}


@fault(19)
def test_of_all_hostile_files_none_is_run_and_what_pickles_ask_for_is_named(tmp_path):
    mark, executed, tried = tmp_path / "was-run", 0, 0
    for save, name, reader in WAYS.values():
        for kind in KINDS:
            path = tmp_path / name
            save(payloads(mark)[kind], path)
            named = (
                "cannot be read" if reader == "heptrkx" else rf"refused, nothing of it was run: it asks for .*\.{kind}"
            )
            with refused(named, "7", path):
                read_file(reader, path)
            executed, tried = executed + mark.exists(), tried + 1
            mark.unlink(missing_ok=True)
            path.unlink()
    print(f"hostile files executed: {executed} of {tried}")
    assert (executed, tried) == (0, 5 * len(WAYS))


# --- names that lead elsewhere ---------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path):
    graph = random_event(3)
    record = write_event(tmp_path / event_file_name(graph.hits.event_id), graph, random_assignment(3, 40, 6), 6)
    write_manifest(tmp_path, [record], {})
    return EventStore(tmp_path)


def manifest_with(store, **changed):
    """The manifest with other values of its event, as somebody writes it who makes the checksum anew."""
    return edit_manifest(store.path, lambda manifest: manifest["events"][0].update(changed))


ELSEWHERE = (
    "../event000000003.zarr.zip",
    "/etc/passwd",
    "a/b.zarr.zip",
    "..",
    ".hidden",
    "",
    "C:\\x",
    "x\0y",
    "a b",
    7,
)


@pytest.mark.parametrize("path", ELSEWHERE)
def test_a_path_that_leads_out_of_the_store_is_refused(store, path):
    with refused(
        "path is 7; expected str" if path == 7 else "path .* is not a plain name", None, manifest_with(store, path=path)
    ):
        EventStore(store.path)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_events_name_that_would_lead_its_scores_elsewhere_is_refused_in_the_manifest(store, name):
    with refused(
        "event is 7; expected str" if name == 7 else "event .* is not a plain name",
        None,
        manifest_with(store, event=name),
    ):
        EventStore(store.path)


def rewritten(path, changes):
    """The file with other members, as somebody writes it whose checksums are right."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for name, change in changes.items():
        content = change(members.get(name))
        members[name] = content if isinstance(content, bytes) else json.dumps(content).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def in_json(**changed):
    """Change values of a JSON object; `attributes` are changed one by one."""

    def change(content):
        described = json.loads(content)
        attributes = changed.get("attributes", {})
        described |= {name: value for name, value in changed.items() if name != "attributes"}
        described["attributes"] = described.get("attributes", {}) | attributes
        return described

    return change


def event_file(store):
    return store.path / store.records[0].path


@pytest.mark.parametrize("name", ["../../x", "/x", "a/b", ""])
def test_an_events_name_that_would_lead_its_scores_elsewhere_is_refused_in_its_file(store, name):
    path = rewritten(event_file(store), {"zarr.json": in_json(attributes={"event": name})})
    with refused("which cannot name a file", "000000003", path):
        StoredEvent(path)


@pytest.mark.parametrize(
    "member",
    ["../x", "/etc/passwd", "edges/../../x", "edges/src/c/0/../9", "x.py", "edges/src/c/99", "edges/src/c/0/0", "c/0",
     "edges/other/c/0", "edges/c/0"],
)  # fmt: skip
def test_members_that_no_array_needs_are_refused(store, member):
    path = rewritten(event_file(store), {member: lambda _: b"x"})
    with refused(f"cannot read the file: .*{member} belongs to no array", "000000003", path):
        StoredEvent(path)


OFFSETS = {
    "ends before it begins": lambda ptr: [*ptr[:2], ptr[2] + 50, *ptr[3:]],
    "begins after 0": lambda ptr: [1, *ptr[1:]],
    "ends early": lambda ptr: [*ptr[:-1], ptr[-1] - 1],
    "is negative": lambda ptr: [ptr[0], -3, *ptr[2:]],
}


@pytest.mark.parametrize("name", ["node_ptr", "edge_ptr"])
@pytest.mark.parametrize("change", OFFSETS.values(), ids=OFFSETS)
def test_offsets_of_tiles_that_do_not_ascend_from_0_to_the_end_are_refused(store, monkeypatch, name, change):
    """By a program that writes stores otherwise: each checksum is right."""
    record, other = store.records[0], writing.stored_order

    def changed(*args):
        order = other(*args)
        return replace(order, **{name: np.array(change(getattr(order, name).tolist()))})

    monkeypatch.setattr(writing, "stored_order", changed)
    with pytest.raises(ValueError, match="cannot read the tiles"):  # it reads what it wrote
        write_event(event_file(store), random_event(3), random_assignment(3, 40, 4), 4)
    with refused(f"cannot read the tiles: .*tiles/{name} does not describe 4 ranges", record.event, event_file(store)):
        StoredEvent(event_file(store))


def test_a_store_may_be_linked_and_nothing_is_written_through_a_link(store, tmp_path):
    real = tmp_path / "elsewhere.zip"
    event_file(store).rename(real)
    event_file(store).symlink_to(real)
    before = real.read_bytes()
    with EventStore(store.path).open(store.records[0]) as event:
        assert event.num_nodes == 40
    write_event(event_file(store), random_event(4, event_id="000000003"), np.zeros(40, int), 1)
    assert real.read_bytes() == before
    assert not event_file(store).is_symlink()


# --- sizes that nobody has -------------------------------------------------------------------------------------------


def listed(**changed):
    """Change what a file lists of the array `edges/src`."""

    def change(content):
        described = json.loads(content)
        described["attributes"]["arrays"]["edges/src"] |= changed
        return described

    return {"zarr.json": change}


ABSURD = {
    "a shape of an exabyte": (listed(shape=[2**60]), r"edges/src has \d{16} chunks, the file \d\d members"),
    "chunks of an exabyte": (listed(rows=2**60), "edges/src/c/0 has 484 bytes, expected 4611686018427387908"),
    "chunks of nothing": (listed(rows=0), "chunks of 0 rows"),
    "a shape below nothing": (listed(shape=[-120]), "shape .-120,"),
    "a shape of no size": (listed(shape=[]), "shape ..  ?in chunks of 120 rows"),
    "a shape in words": (listed(shape=["120"]), "cannot read the file"),
    "axes without end beside none": (listed(shape=[0, 3 * 10**8], rows=1), "edges/src/c/0 belongs to no array"),
    "more nodes than rows": (
        {"zarr.json": in_json(attributes={"num_nodes": 2**60})},
        "its shape is .*expected .115292",
    ),
    "another type": (listed(dtype="float64"), "edges/src/c/0 has 484 bytes, expected 964"),
    "objects": (listed(dtype="O"), "holds object, expected numbers"),
    "records": (listed(dtype="i4,O"), "expected numbers"),
    "a type that numpy does not know": (listed(dtype="a8x"), "cannot read the file"),
    "no list of arrays": ({"zarr.json": in_json(attributes={"arrays": 7})}, "cannot read the file"),
    "a chunk with more behind it": (
        {"edges/src/c/0": lambda chunk: chunk + bytes(2000)},
        "has 2484 bytes, expected 484",
    ),
    "a chunk with another checksum": (
        {"edges/src/c/0": lambda chunk: chunk[:-1] + bytes([chunk[-1] ^ 1])},
        "edges/src/c/0 is damaged",
    ),
    "a description nested too deep": ({"zarr.json": lambda _: b"[" * 10**6}, "cannot read the file"),
}


@fault(18)
@pytest.mark.parametrize(("changes", "message"), ABSURD.values(), ids=ABSURD)
def test_an_event_that_claims_absurd_sizes_is_refused_before_anything_is_allocated(store, changes, message):
    path = rewritten(event_file(store), changes)
    with little_memory(), refused(message, "000000003", path), StoredEvent(path) as event:
        event.read_edges("src", np.arange(event.num_edges))


def test_a_list_of_members_that_claims_more_than_the_file_holds_is_refused(store):
    path = event_file(store)
    content = bytearray(path.read_bytes())
    at = content.index(b"edges/src/c/0", content.index(b"PK\x01\x02"))
    content[at - 26 : at - 18] = 2 * (2**31).to_bytes(4, "little")  # packed and unpacked bytes
    path.write_bytes(content)
    with little_memory(), refused("claim 2147...... bytes, the file has .....", "000000003", path):
        StoredEvent(path)


def test_a_packed_member_is_refused_however_small_it_is(store):
    path = event_file(store)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with refused("is packed", "000000003", path):
        StoredEvent(path)


def test_a_manifest_of_absurd_depth_or_size_is_refused(store, monkeypatch):
    path = store.path / "manifest.json"
    path.write_bytes(b'{"events":' * 10**5)
    with refused("nested too deep|cannot be read", None, path):
        EventStore(store.path)
    monkeypatch.setattr("domainpar.tracking.events.store.manifest.LARGEST_MANIFEST", 1000)
    with refused(" 1000000 bytes, .* 1000 ", None, path):
        EventStore(store.path)


def test_an_npz_array_that_claims_more_than_its_member_holds_is_refused_before_it_is_allocated(tmp_path):
    path = tmp_path / "event7.npz"
    np.savez(path, X=np.zeros((3, 3)), **dict.fromkeys(("y", "Ri_rows", "Ri_cols", "Ro_rows", "Ro_cols"), np.arange(3)))
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (2**40, 3)})
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["X.npy"] = header.getvalue() + bytes(72)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with little_memory(), refused("X.npy .* 26388279066624 .* 72", "7", path):
        read_file("heptrkx", path)


@pytest.mark.parametrize("reader", ["pyg", "acorn"])
@pytest.mark.parametrize("value", [torch.zeros(1).expand(2**40), torch.zeros(1, 1).expand(2**40, 2)])
def test_a_tensor_that_repeats_one_value_without_end_is_refused_before_it_is_copied(tmp_path, reader, value):
    path = tmp_path / "event7.pyg"
    torch.save({**GRAPH, "x": value}, path)
    with little_memory(), refused("x claims .* values", "7", path):
        read_file(reader, path)
