"""Stores and runs: every bad file is named, whichever rank looked at it."""

import json
import shutil
import zipfile

import pytest
from random_store import write_random_store

from domainpar.diagnosis.finding import Verdict, gathered
from domainpar.testing import run_ranks
from domainpar.tracking.diagnosis.files import check_run, check_store
from domainpar.tracking.events.store import file_sha256


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_random_store(
        tmp_path_factory.mktemp("store"), num_train=4, num_val=1, num_nodes=30, num_edges=90, compared=False
    )


@pytest.fixture
def store(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "store")
    return tmp_path / "store"


def _store(world, store):
    return gathered([check_store(store, world)], world)[0]


def _run(world, run):
    return gathered([check_run(str(run), world)], world)[0]


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def events(store):
    return sorted(path.name for path in store.glob("event*.zip"))


@pytest.mark.parametrize("num_ranks", [1, 2, 7])
def test_a_whole_store_passes(store, num_ranks):
    finding = run_ranks(_store, num_ranks, store)[0]
    assert finding.verdict is Verdict.PASS, finding
    assert finding.found.startswith("5 events, ")


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_bad_event_is_named(store, num_ranks):
    flipped, shortened, gone, *good = events(store)
    flip(store / flipped, 200)
    (store / shortened).write_bytes((store / shortened).read_bytes()[:-10])
    (store / gone).unlink()
    for finding in run_ranks(_store, num_ranks, store):
        assert finding.verdict is Verdict.FAIL
        assert [text.split(":")[0] for text in finding.figures["bad"]] == [flipped, shortened, gone]
        for word in ("; 3 bad: ", flipped, "sha256 is", "bytes, the manifest says", "No such file"):
            assert word in finding.found
        assert not any(name in finding.found for name in good)


def rewritten(path, name):
    """The same archive, well formed, but for one bit of one member: only who decodes that array can tell."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    content = bytearray(members[name])
    content[-1] ^= 1
    with zipfile.ZipFile(path, "w") as archive:
        for member, kept in members.items():
            archive.writestr(member, bytes(content) if member == name else kept)


@pytest.mark.parametrize("array", ["edges/features/c/0/0", "nodes/hit_id/c/0", "not a zip"])
def test_an_event_that_was_written_badly_is_found_though_its_hash_fits(store, array):
    """As if it had been damaged before it was hashed: every array is read, not only the bytes of the file."""
    manifest = json.loads((store / "manifest.json").read_text())
    path = store / manifest["events"][1]["path"]
    if array == "not a zip":
        path.write_bytes(b"not a zip")
    else:
        rewritten(path, array)
    manifest["events"][1] |= {"bytes": path.stat().st_size, "sha256": file_sha256(path, "")}
    (store / "manifest.json").write_text(json.dumps(manifest))
    (bad,) = run_ranks(_store, 2, store)[0].figures["bad"]
    assert bad.startswith(path.name)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"events": 3}', '{"events": [3]}', '{"events": [{"event": "a"}]}'])
def test_a_manifest_that_cannot_be_read_fails(store, text):
    (store / "manifest.json").write_text(text)
    finding = run_ranks(_store, 2, store)[0]
    assert finding.verdict is Verdict.FAIL
    assert str(store / "manifest.json") in finding.found


def test_a_directory_that_is_no_store_fails(tmp_path):
    assert run_ranks(_store, 2, tmp_path)[0].verdict is Verdict.FAIL


@pytest.fixture
def run(tmp_path):
    """Two checkpoints of a real run."""
    from domainpar import train

    store = write_random_store(tmp_path / "few", num_train=2, num_val=0, num_nodes=20, num_edges=40, compared=False)
    flags = "--hidden 16 --graph-iters 1 --epochs 2".split()
    assert train.main(["--store", str(store), "--out", str(tmp_path / "run"), *flags]) == 0
    return tmp_path / "run"


def test_checkpoints_of_a_run_are_checked_and_each_bad_one_is_named(run, capsys):
    finding = run_ranks(_run, 2, run)[0]
    assert finding.verdict is Verdict.PASS, finding
    assert finding.found.startswith("2 checkpoints hashed")
    first, second = sorted((run / "checkpoints").glob("step_*"))
    flip(first / "model.safetensors", -1)
    (second / "manifest.json").unlink()
    finding = run_ranks(_run, 2, run)[0]
    assert finding.verdict is Verdict.FAIL
    assert [text.split(":")[0] for text in finding.figures["bad"]] == [first.name, second.name]
    assert "model.safetensors" in finding.found


def test_a_pointer_that_leads_nowhere_fails(run):
    (run / "checkpoints" / "last").write_text("step_999999\n")
    finding = run_ranks(_run, 2, run)[0]
    assert finding.verdict is Verdict.FAIL
    assert "last names step_999999, which is not there" in finding.found


def test_a_directory_without_checkpoints_fails(tmp_path):
    assert run_ranks(_run, 2, tmp_path)[0].verdict is Verdict.FAIL
