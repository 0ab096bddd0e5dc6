"""`python -m domainpar.evaluate`: tracks of any finder are counted as those of infer are, or refused by name."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from small_run import simulated, write_run

from domainpar import evaluate
from domainpar.tracking.display.run_files import read_run_files
from domainpar.tracking.events.store import read_arrays
from domainpar.tracking.scoring.event_tracks import track_lines
from domainpar.tracking.scoring.external_tracks import _memberships


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path)


def tracks_of(run):
    """Event, hits and track of each hit of the network's tracks, all events."""
    for listed in json.loads((run / "scores" / "scores.json").read_text())["events"]:
        arrays, _ = read_arrays(run / "scores" / listed["path"])
        yield listed["event"], arrays["hit_id"], arrays["track_id"]


def table_of(run, first_track=0):
    """The same as a table; with tracks from 1 as a submission to TrackML, hits on no track having 0."""
    return pd.concat(
        pd.DataFrame({"event_id": event, "hit_id": hit, "track_id": track + first_track})
        for event, hit, track in tracks_of(run)
    )


def as_csv(run, folder):
    table_of(run).to_csv(folder / "all.csv", index=False)


def as_trackml(run, folder):
    table_of(run, first_track=1).to_csv(folder / "all.csv", index=False)


def as_parquet(run, folder):
    pytest.importorskip("pyarrow")
    table = table_of(run)
    table[table.track_id >= 0].astype({"event_id": int}).to_parquet(folder / "submission.parquet", index=False)


def as_acorn(run, folder):
    for event, hit, track in tracks_of(run):
        (folder / f"event{event}.txt").write_text(track_lines(hit, track, None))


def as_acts(run, folder, first=1):
    for event, hit, track in tracks_of(run):
        lists = [(hit[track == number] - first).tolist() for number in range(track.max() + 1)]
        text = "\n".join(["track_id,Measurements_ID", *(f'0,"{one}"' for one in lists), ""])
        (folder / f"event{event}-tracks_ambi.csv").write_text(text)


@pytest.mark.parametrize("written", [as_csv, as_trackml, as_parquet, as_acorn, as_acts])
def test_tracks_of_infer_have_the_same_counts_in_any_format_and_are_in_the_report(run, tmp_path, written, capsys):
    (folder := tmp_path / "tracks").mkdir()
    written(run, folder)
    files = list(folder.iterdir())
    path = files[0] if len(files) == 1 else folder
    assert evaluate.main([str(path), "--scores", str(run), "--name", "mine"]) == 0
    performance = read_run_files(run).performance
    assert performance.keys() == {"train", "val", "test"}
    for counts in performance.values():
        assert counts["mine"] == counts["network"] != counts["ckf"]
    assert ("track 0 means no track" in capsys.readouterr().out) == (written is as_trackml)


def test_a_store_is_enough_and_flags_say_what_is_counted(run, tmp_path, capsys):
    table_of(run).to_csv(tmp_path / "all.csv", index=False)
    words = [str(tmp_path / "all.csv"), "--store", str(tmp_path / "store")]
    assert evaluate.main([*words, "--min-track-length", "3", "--matching-style", "two_way"]) == 0
    out = capsys.readouterr().out
    assert "left out: 000, 001, 002\n" in out
    assert "test events:\n1 event, " in out
    assert "at least 3 hits, two_way" in out
    assert "\nall " in out
    assert evaluate.main([*words, "--preset", "pixel", "--split", "all"]) == 0
    assert capsys.readouterr().out.count("eta: [-4, 4], nhits: [3, .inf], pt: [0.9, .inf]") == 3


def test_hits_on_several_tracks_count_on_each_and_twice_on_one_track_once():
    row, track = np.array([2, 0, 2, 1, 2, 0]), np.array([7, 5, 5, 7, 7, 9])
    track_id, shared = _memberships(row, track, 4)
    assert track_id.tolist() == [5, 7, 7, -1]
    assert shared.tolist() == [[0, 9], [2, 5]]
    assert _memberships(row[:1], track[:1], 4)[1] is None


def test_hits_of_acts_count_from_0_where_those_of_the_store_do(tmp_path, capsys):
    graphs = [simulated(seed) for seed in range(4)]
    of_0 = [replace(it, hits=replace(it.hits, hit_id=it.hits.hit_id - it.hits.hit_id.min())) for it in graphs]
    run = write_run(tmp_path, of_0)
    (folder := tmp_path / "tracks").mkdir()
    as_acts(run, folder, first=0)
    assert evaluate.main([str(folder), "--scores", str(run), "--name", "acts"]) == 0
    counts = read_run_files(run).performance["test"]
    assert counts["acts"] == counts["network"]
    assert "hit_id 0: 4 events" in capsys.readouterr().out


def refused(words, capsys):
    assert evaluate.main(words) == 2
    return capsys.readouterr().err


def test_unknown_hits_and_events_are_refused_by_name(run, tmp_path, capsys):
    table, path, store = table_of(run), tmp_path / "all.csv", ["--store", str(tmp_path / "store")]
    table.assign(event_id=table.event_id.replace({"002": "77"})).to_csv(path, index=False)
    assert f"| event 77 | file {path}" in refused([str(path), *store], capsys)
    strange = table.hit_id.where((table.event_id != "003") | (table.track_id != 0), table.hit_id + 10**7)
    table.assign(hit_id=strange).to_csv(path, index=False)
    said = refused([str(path), *store], capsys)
    assert "hit_id 1000" in said
    assert f"| event 003 | file {path}" in said
    table[table.event_id == "003"].to_csv(path, index=False)
    said = refused([str(path), "--scores", str(run)], capsys)
    assert " 3 of the 4 events to count: 000, 001, 002" in said
    assert " 2 of the 2 events" in refused([str(path), *store, "--split", "train"], capsys)
    assert "--name ckf" in refused([str(path), "--scores", str(run), "--name", "ckf"], capsys)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "no tracks"),
        (["a.csv"], "no events"),
        (["a.csv", "--scores", "s", "--preset", "pixel"], "with --scores s"),
        (["a.csv", "--scores", "s", "--store", "t"], "--store t "),
    ],
)
def test_flags_that_do_not_go_together_are_refused(words, error, capsys):
    assert error in refused(words, capsys)


def test_events_without_truth_and_scores_without_tracks_are_refused(tmp_path, capsys):
    run = write_run(tmp_path, tracks=False)
    table = pd.DataFrame({"event_id": [3], "hit_id": [1], "track_id": [-1]})
    table.to_csv(tmp_path / "none.csv", index=False)
    assert "no tracks" in refused([str(tmp_path / "none.csv"), "--scores", str(run)], capsys)
