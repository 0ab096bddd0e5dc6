"""Files of scores: what the user opens, and what is never removed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import zarr
from killed import killed_at_every_change, names_and_syncs

from domainpar.runs.records import ScoredEvent, ScoresRecord
from domainpar.tracking.reco.event_scores import FoundTracks, Scores
from domainpar.tracking.reco.performance.rates import CKF, NETWORK, PERFECT_SCORES
from domainpar.tracking.reco.perigee import Perigees
from domainpar.tracking.scoring.score_files import (
    choose_directory,
    publish,
    read_scores,
    write_list,
    write_scores,
)


def some_scores(num_edges=5, event_id="7", dtype=np.float32):
    rng = np.random.default_rng(num_edges)
    scored = rng.random(num_edges) < 0.7
    logit = np.where(scored, rng.standard_normal(num_edges), 0).astype(dtype)
    return Scores(
        event_id=event_id,
        hit_id=np.array([11, 5, 9]),
        edge_index=rng.integers(0, 3, (2, num_edges)),
        edge_logit=logit,
        edge_score=np.where(scored, 1 / (1 + np.exp(-logit)), 0).astype(dtype),
        edge_scored=scored,
    )


@pytest.mark.parametrize("num_edges", [0, 5, 70_000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_plain_zarr_reads_back_every_array(tmp_path, num_edges, dtype):
    scores = some_scores(num_edges, dtype=dtype)
    listed = write_scores(tmp_path, scores, {"mode": "halo"})
    found = zarr.open(zarr.storage.ZipStore(tmp_path / listed.path), mode="r")
    assert set(found) == {"hit_id", "edge_index", "edge_logit", "edge_score", "edge_scored"}
    for name in found:
        values = getattr(scores, name)
        assert found[name].dtype == values.dtype
        assert np.array_equal(found[name][...], values)
    assert (found.attrs["event"], found.attrs["mode"], found.attrs["num_edges"]) == ("7", "halo", num_edges)
    assert found.attrs["num_unscored"] == listed.unscored == np.count_nonzero(~scores.edge_scored)
    assert listed.path == "event7.scores.zarr.zip"


def test_the_same_scores_are_the_same_bytes_and_other_logits_have_another_hash(tmp_path):
    first = write_scores(tmp_path / "a", some_scores(), {})
    again = write_scores(tmp_path / "b", some_scores(), {})
    assert first == again
    assert (tmp_path / "a" / first.path).read_bytes() == (tmp_path / "b" / again.path).read_bytes()
    other = some_scores()
    other.edge_logit[0] += 1
    changed = write_scores(tmp_path / "c", other, {})
    assert changed.sha256 != first.sha256
    assert changed.logits_sha256 != first.logits_sha256


def test_the_hash_of_logits_holds_what_the_network_said_of_labels(tmp_path):
    said = {"kind": np.array([[1.0, 2], [3, 4], [5, 6]], np.float32), "energy": np.array([0.5], np.float32)}
    hashes = [write_scores(tmp_path, some_scores(), {}).logits_sha256]
    for name in said:
        for change in (0, 1):
            readings = said | {name: said[name] + change}
            hashes.append(write_scores(tmp_path, replace(some_scores(), readings=readings), {}).logits_sha256)
    assert hashes[1] == hashes[3]
    assert len(set(hashes)) == 4


def test_shared_hits_are_in_the_file_only_where_tracks_may_share_them(tmp_path):
    track_id = np.array([0, 0, 1])
    tracked = replace(some_scores(), tracks={NETWORK: FoundTracks(track_id)})
    shared_hits = {NETWORK: np.array([[1, 1]]), PERFECT_SCORES: np.array([[0, 1]])}
    sharing = replace(tracked, tracks={name: FoundTracks(track_id, shared) for name, shared in shared_hits.items()})
    alone = write_scores(tmp_path / "a", tracked, {})
    assert "shared_hits" not in zarr.open(zarr.storage.ZipStore(tmp_path / "a" / alone.path), mode="r")
    shared = write_scores(tmp_path / "b", sharing, {})
    assert shared.tracks == alone.tracks == 2
    assert read_scores(tmp_path / "b" / shared.path).shared_hits.tolist() == [[1, 1]]
    none = replace(tracked, tracks={NETWORK: FoundTracks(track_id, np.zeros((0, 2), np.int64))})
    assert read_scores(tmp_path / "c" / write_scores(tmp_path / "c", none, {}).path).shared_hits.shape == (0, 2)


def test_parameters_of_tracks_come_back_by_finder(tmp_path):
    draw = np.random.default_rng(0).normal
    ndf = np.array([2 * 2 - 5, 2 * 2 - 5])  # of the shared hit, too
    fits = [Perigees(draw(size=(2, 5)), draw(size=(2, 5, 5)), draw(size=2), ndf) for _ in range(2)]
    track_id, shared_hits = np.array([0, 0, 1]), np.array([[1, 1]])
    tracked = replace(some_scores(), tracks={NETWORK: FoundTracks(track_id)})
    of_finders = {finder: FoundTracks(track_id, shared_hits, fits=of) for finder, of in zip((NETWORK, CKF), fits)}
    both = replace(tracked, tracks=of_finders)
    found = read_scores(tmp_path / write_scores(tmp_path, both, {}).path)
    for prefix, of in zip(("", "ckf_"), fits):
        for name, values in (("parameters", of.value), ("covariance", of.covariance), ("chi2", of.chi2)):
            assert np.array_equal(getattr(found, f"{prefix}track_{name}"), values)
    assert np.array_equal(found.tracks[NETWORK].fits.ndf, ndf)
    assert read_scores(tmp_path / "b" / write_scores(tmp_path / "b", tracked, {}).path).track_parameters is None


def test_a_name_that_leaves_the_directory_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot name a file"):
        write_scores(tmp_path, some_scores(event_id="../7"), {})


def is_ready(directory):
    """Whether it is empty but for the folder that new scores go to, which is."""
    return [path.name for path in directory.rglob("*")] == ["unfinished"]


def finished(directory):
    write_list(directory, ScoresRecord.of(events=[write_scores(directory, some_scores(), {})]))
    return directory


def test_a_new_directory_is_made_and_an_empty_one_taken(tmp_path):
    new = tmp_path / "a" / "b"
    assert choose_directory(new, overwrite=False) == new / "unfinished"
    assert choose_directory(new, overwrite=False) == new / "unfinished"


@pytest.mark.parametrize("leftover", ["scores.json", "event7.scores.zarr.zip", ".partial-0123"])
def test_other_scores_are_refused_and_replaced_when_asked_for(tmp_path, leftover):
    finished(tmp_path)
    (tmp_path / ".partial-0123").touch()
    for file in tmp_path.iterdir():
        if file.name != leftover:
            file.unlink()
    with pytest.raises(ValueError, match=r"holds scores already\nhint: .*--overwrite"):
        choose_directory(tmp_path, overwrite=False)
    assert [file.name for file in tmp_path.iterdir()] == [leftover]
    choose_directory(tmp_path, overwrite=True)
    assert is_ready(tmp_path)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["thesis.tex", "event7.zarr.zip", "manifest.json"])
def test_files_that_are_not_scores_are_never_removed(tmp_path, name, overwrite):
    finished(tmp_path)
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=f"not scores \\({name}\\)"):
        choose_directory(tmp_path, overwrite)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(ValueError, match="is a file"):
        choose_directory(tmp_path / "out", overwrite=True)
    with pytest.raises(ValueError, match="cannot write scores"):
        choose_directory(tmp_path / "out" / "deeper", overwrite=True)


def test_the_list_names_every_event_and_what_it_was_made_with(tmp_path):
    events = [ScoredEvent("7", "event7.scores.zarr.zip", "ab", "cd", 5, 1)]
    write_list(tmp_path, ScoresRecord.of(mode="naive", events=events))
    content = json.loads((tmp_path / "scores.json").read_text())
    assert content["mode"] == "naive"
    assert content["events"] == [
        {
            "event": "7",
            "path": "event7.scores.zarr.zip",
            "sha256": "ab",
            "logits_sha256": "cd",
            "edges": 5,
            "unscored": 1,
            "tracks": None,
            "event_sha256": "",
        }
    ]


def test_folders_of_acorn_are_removed_with_the_scores_they_belong_to_and_never_without(tmp_path):
    (tmp_path / "trainset").mkdir()
    (tmp_path / "trainset" / "event7.pyg").touch()
    with pytest.raises(ValueError, match=r"not scores \(trainset\)"):
        choose_directory(tmp_path, overwrite=True)
    write_list(tmp_path, ScoresRecord.of(events=[]))
    with pytest.raises(ValueError, match=r"not scores \(trainset\)"):
        choose_directory(tmp_path, overwrite=True)
    assert (tmp_path / "trainset" / "event7.pyg").is_file()
    (tmp_path / "event7.scores.zarr.zip").touch()
    choose_directory(tmp_path, overwrite=True)
    assert is_ready(tmp_path)


def test_a_list_is_there_only_with_all_its_files_wherever_the_program_is_killed(tmp_path):
    def write(*events):
        unfinished = choose_directory(tmp_path, overwrite=True)
        scored = [write_scores(unfinished, some_scores(len(events), event_id=event), {}) for event in events]
        (unfinished / "timings.json").write_text("{}")
        write_list(unfinished, ScoresRecord.of(events=scored))
        publish(unfinished)

    def begin():
        for path in tmp_path.rglob("*.*"):
            path.unlink()
        write("7", "8")

    there = []
    for _ in killed_at_every_change(begin, lambda: write("7")):
        there.append((tmp_path / "scores.json").is_file())
        listed = json.loads((tmp_path / "scores.json").read_text())["events"] if there[-1] else []
        for each in listed:
            assert hashlib.sha256((tmp_path / each["path"]).read_bytes()).hexdigest() == each["sha256"]
    assert {*there[:-1]} == {True, False}
    assert len(listed) == 1


def test_scores_are_published_once_their_names_are_on_the_disk(tmp_path, monkeypatch):
    unfinished = choose_directory(tmp_path, overwrite=False)
    write_list(unfinished, ScoresRecord.of(events=[write_scores(unfinished, some_scores(), {})]))
    done = names_and_syncs(monkeypatch)
    publish(unfinished)
    assert done == ["rename", "rename", "rmdir", "directory"]


def test_scores_lie_in_a_folder_of_their_own_until_all_are_there(tmp_path):
    unfinished = choose_directory(tmp_path / "out", overwrite=False)
    scored = write_scores(unfinished, some_scores(), {})
    (unfinished / "trainset").mkdir()
    (unfinished / "trainset" / "event7.pyg").touch()
    with pytest.raises(ValueError, match="out holds scores already"):
        choose_directory(tmp_path / "out", overwrite=False)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["unfinished"]
    write_list(unfinished, ScoresRecord.of(events=[scored]))
    assert publish(unfinished) == tmp_path / "out"
    names = ["event7.scores.zarr.zip", "scores.json", "trainset"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    unfinished = choose_directory(tmp_path / "out", overwrite=True)
    (unfinished / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"not scores \(unfinished/notes.txt\)"):
        choose_directory(tmp_path / "out", overwrite=True)
