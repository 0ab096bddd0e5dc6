"""The files of a run are read once; whatever is missing is named with the way to get it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from small_run import ODD, drawn, write_run, write_store

from domainpar.common.problems import Problem
from domainpar.tracking.display.event_view import Split
from domainpar.tracking.display.run_facts import final_metrics
from domainpar.tracking.display.run_files import read_run_files
from domainpar.tracking.events.store import EventStore, write_arrays
from domainpar.tracking.reco.event_scores import FORMAT


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("reading")
    write_run(place)
    return place


@pytest.fixture
def run(place, tmp_path):
    """A copy of the run that a test may spoil."""
    return shutil.copytree(place / "run", tmp_path / "run")


def test_everything_of_a_whole_run_is_there(run):
    files = read_run_files(run)
    assert files.missing == ("No times of the inference: timings.json is not beside scores.json; infer writes it.",)
    assert len(files.records_of("train")) == 6
    assert files.splits_to_show() == ("val", "test")
    assert files.choose_event().event == "002"
    assert set(files.performance) == {"train", "val", "test"}


@pytest.mark.parametrize(
    ("gone", "told"),
    [
        ("config.yaml", "No config.yaml"),
        ("metrics.jsonl", "No metrics.jsonl"),
        ("scores/scores.json", "No scores, so no ROC curve"),
    ],
)
def test_what_is_missing_is_told(run, gone, told):
    (run / gone).unlink()
    assert any(sentence.startswith(told) for sentence in read_run_files(run).missing)


def test_scores_without_tracks_tell_how_to_get_them(tmp_path):
    missing = read_run_files(write_run(tmp_path, tracks=False)).missing
    assert any("No tracks" in sentence and "--tracks greedy --overwrite" in sentence for sentence in missing)


def test_a_store_that_was_moved_can_be_named(tmp_path):
    run = write_run(tmp_path)
    (tmp_path / "store").rename(tmp_path / "moved")
    assert read_run_files(run).store is None
    assert any("is not there" in sentence and "--store" in sentence for sentence in read_run_files(run).missing)
    assert read_run_files(run, store=tmp_path / "moved").store is not None


def test_a_store_of_other_events_is_not_taken_for_the_runs_own(tmp_path):
    run = write_run(tmp_path / "a")
    other = write_run(tmp_path / "b", [drawn(6, num_edges=5)]).parent / "store"
    with pytest.raises(ValueError, match="holds other events than these"):
        read_run_files(run, store=other)
    shutil.rmtree(tmp_path / "a" / "store")
    shutil.copytree(other, tmp_path / "a" / "store")
    files = read_run_files(run)
    assert files.store is None
    assert any("holds other events" in sentence for sentence in files.missing)


def test_a_store_that_has_grown_since_still_holds_what_was_scored(tmp_path):
    graphs = [drawn(6, num_edges=5, event_id=name) for name in "ab"]
    run = write_run(tmp_path / "a", graphs)
    shutil.rmtree(tmp_path / "a" / "store")
    write_store(tmp_path / "a" / "store", [drawn(7, num_edges=5, event_id="0"), *graphs])
    files = read_run_files(run)
    assert files.choose_event().event == "b"
    assert {files.describe_split(record) for record in files.store.records} == {
        "train split, not seen in training", "train split", "val split, but trained on",
    }  # fmt: skip


def test_no_run_and_named_directories_that_are_none_are_refused(run, tmp_path):
    with pytest.raises(ValueError, match="is not a run: it has no run.json"):
        read_run_files(tmp_path)
    with pytest.raises(ValueError, match="holds no scores"):
        read_run_files(run, scores=tmp_path)


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "scores/scores.json", "config.yaml"])
@pytest.mark.parametrize("content", [b"\xff\xfe", b"[1, 2]", b"{"])
def test_a_spoilt_file_is_refused_by_its_name(run, name, content):
    (run / name).write_bytes(content + b"\n" + content)
    with pytest.raises(ValueError, match=name.split("/")[-1]):
        read_run_files(run)


@pytest.mark.parametrize("events", [[1], {"train": [["a"]], "val": []}, {"train": []}])
def test_events_of_a_run_that_are_listed_otherwise_are_refused(run, events):
    content = json.loads((run / "run.json").read_text())
    content["store"]["events"] = events
    (run / "run.json").write_text(json.dumps(content))
    shutil.rmtree(run / "scores")
    with pytest.raises(ValueError, match=r"run\.json cannot be read: \w+Error"):
        read_run_files(run)


def test_a_line_that_is_being_written_is_left_out(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"split": "train", "ste')
    assert len(read_run_files(run).records) == 7


@pytest.mark.parametrize("within", [(), ("binned", "atlas")], ids=["a number", "a quantity"])
def test_counts_of_another_version_are_refused(run, within):
    scores = json.loads((run / "scores" / "scores.json").read_text())
    counts = scores["tracks"]["performance"]["val"]["network"]
    for name in within:
        counts = counts[name]
    del counts["holes" if within else "hits"]
    (run / "scores" / "scores.json").write_text(json.dumps(scores))
    with pytest.raises(ValueError, match="written by another version" if within else "missing required field hits"):
        _ = read_run_files(run).performance


def test_an_unknown_event_is_refused_with_the_names_there_are(run):
    with pytest.raises(ValueError, match="no event 'x' to show; it has 002, 003, 000, 001"):
        read_run_files(run).choose_event("x")


def test_an_event_that_was_not_scored_is_not_shown(run):
    scores = json.loads((run / "scores" / "scores.json").read_text())
    scores["events"] = [listed for listed in scores["events"] if listed["event"] != "002"]
    (run / "scores" / "scores.json").write_text(json.dumps(scores))
    files = read_run_files(run)
    assert files.choose_event().event == "003"
    with pytest.raises(ValueError, match="no event '002'"):
        files.choose_event("002")


def test_an_event_is_in_the_users_order(place, run):
    """Scores are in the user's order: truth that is read beside them must be, too."""
    files = read_run_files(run)
    event = files.read_event(files.choose_event())
    with EventStore(place / "store").open(files.choose_event()) as stored:
        row = stored.read_nodes("original_row", np.arange(stored.num_nodes))
        hit_id = stored.read_nodes("hit_id", np.arange(stored.num_nodes))
    assert np.array_equal(event.hit_id[row], hit_id)
    assert not np.array_equal(event.hit_id, hit_id)
    assert np.array_equal(event.hit_id, np.arange(1, event.num_hits + 1))
    true = event.edge_index[:, event.label == 1]
    assert true.shape[1] > 100
    assert np.array_equal(event.particle_id[true[0]], event.particle_id[true[1]])
    row = event.particle_row
    assert np.array_equal(event.particles.particle_id[row[row >= 0]], event.particle_id[row >= 0])


@pytest.mark.parametrize(("num_hits", "num_edges"), [(7, 5), (6, 4)], ids=["other hits", "other edges"])
def test_scores_of_another_preparation_are_refused(tmp_path, num_hits, num_edges):
    run = write_run(tmp_path / "a", [drawn(6, num_edges=5)])
    other = write_run(tmp_path / "b", [drawn(num_hits, num_edges=num_edges)])
    shutil.copy(other / "scores" / "eventdrawn.scores.zarr.zip", run / "scores")
    files = read_run_files(run)
    with pytest.raises(ValueError, match="run infer again"):
        files.read_event(files.choose_event())


def test_scores_that_are_damaged_gone_or_something_else_are_refused_by_their_name(run):
    files = read_run_files(run)
    path = run / "scores" / "event002.scores.zarr.zip"
    for attributes, what in (
        ({}, "it is None, not scores"),
        (FORMAT, "it lacks edge_index, edge_logit, edge_score, edge_scored"),
    ):
        write_arrays(path, {"hit_id": np.zeros(3)}, attributes)
        with pytest.raises(Problem, match=what) as refused:
            files.read_event(files.choose_event())
        assert str(refused.value.file) == str(path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"cannot be read.*event002"):
        files.read_event(files.choose_event())
    path.unlink()
    with pytest.raises(ValueError, match=r"No such file.*event002"):
        files.read_event(files.choose_event())


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_odd_events_are_read(tmp_path, odd):
    files = read_run_files(write_run(tmp_path, [drawn(**odd)]))
    event = files.read_event(files.choose_event())
    assert event.num_hits == odd["num_hits"]
    assert len(event.particle_row) == event.num_hits
    assert Split(3).part_of_hits(event).max(initial=0) < 3


def test_the_area_is_the_pooled_one_of_training_and_the_mean_of_scores(tmp_path):
    run = write_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().replace('"target_edges"', '"edges": 100, "target_edges"')
    (run / "metrics.jsonl").write_text(lines)
    scores = json.loads((run / "scores" / "scores.json").read_text())
    scores["metrics"] = {"val": {"events": 1, "edge_auc_mean": 0.8, "edges": 100}}
    (run / "scores" / "scores.json").write_text(json.dumps(scores))
    files = read_run_files(run)
    (of_infer,) = final_metrics(files)
    (of_run,) = final_metrics(replace(files, scores=None))
    told = [dict(zip(rows.head, rows.rows[0]))["edge AUC"] for rows in (of_infer, of_run)]
    assert told == ["0.8000 mean over events", "0.9000 pooled"]
