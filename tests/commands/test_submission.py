"""From ColliderML's files to a submission: tracks of each event as parquet, as its own scorer takes them."""

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install '.[parquet]')")

import pyarrow.parquet as pq
from collider_files import write_sample
from test_infer import inferred, opened, trained

from domainpar.common.agreement import Refused
from domainpar.common.problems import EventPlace, Problem
from domainpar.tracking.events.given_tracks import read_tracks
from domainpar.tracking.events.graph import Particles
from domainpar.tracking.events.preparation import prepare
from domainpar.tracking.events.sources import open_source
from domainpar.tracking.scoring.submission import (
    OfficialFigures,
    join_pieces,
    majority_of_tracks,
    write_piece,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("submission")
    write_sample(place / "files", 3, 1500, first=9000)
    store = prepare(open_source("colliderml", directory=place / "files"), place / "store")
    trained(store.path, place / "run", epochs=4, lr=1e-2)
    return place


def test_hits_on_tracks_of_all_events_are_one_table_whichever_rank_scored_them(place, tmp_path):
    how = {"tracks": "cc", "format": "colliderml", "split": "all"}
    listed, _ = inferred(place, tmp_path / "one", 1, **how)
    inferred(place, tmp_path / "three", 3, domain_size=1, **how)
    path = tmp_path / "one" / "submission.parquet"
    assert path.read_bytes() == (tmp_path / "three" / "submission.parquet").read_bytes()
    assert not list((tmp_path / "one").glob("*-tracks.parquet"))
    table = pq.read_table(path).to_pydict()
    assert list(table) == ["event_id", "hit_id", "track_id", "majority_particle_id"]
    assert sorted(set(table["event_id"])) == [9000, 9001, 9002]
    assert table["event_id"] == sorted(table["event_id"])
    for event in listed["events"]:
        track_id = opened(tmp_path / "one" / event["path"])["track_id"][...]
        here = np.array(table["event_id"]) == int(event["event"])
        hits = np.array(table["hit_id"])[here]
        assert np.array_equal(hits, np.flatnonzero(track_id >= 0)), "a hit's number is its place in the row"
        assert np.array_equal(np.array(table["track_id"])[here], track_id[hits])


def test_the_official_scorer_takes_it_and_says_what_is_printed(place, tmp_path, capsys):
    pytest.importorskip("polars")
    metrics = pytest.importorskip("colliderml.tasks.tracking.metrics")
    explode = pytest.importorskip("colliderml.polars").explode_event_table_pyarrow
    inferred(place, tmp_path / "out", tracks="cc", format="colliderml", split="all")
    table = pq.read_table(tmp_path / "out" / "submission.parquet")
    files = sorted((place / "files").rglob("*_tracker_hits/data/*/*.parquet"))
    truth = explode(pq.ParquetDataset(files).read(), index_name="hit_id")
    particles = explode(pq.ParquetDataset([str(p).replace("tracker_hits", "particles") for p in files]).read())
    official = {
        "trackml_eff": metrics.trackml_weighted_efficiency(table, truth),
        "fake_rate": metrics.fake_rate(table, truth),
        "dup_rate": metrics.duplicate_rate(table, truth),
        "physics_eff_pt1": metrics.physics_eff_pt1(table, particles),
    }
    assert all(0 < figure < 1 for figure in official.values())
    words = ", ".join(f"{name} {figure:.4f}" for name, figure in official.items())
    assert f": {words}" in capsys.readouterr().out


def test_the_particle_of_most_hits_of_a_track_is_its_own_the_first_of_two():
    track_id, truth = np.array([0, 0, 0, 2, 2, 1, 1, 2]), np.array([7, 7, 3, -1, 5, 9, 4, -1])
    majority, count = majority_of_tracks(track_id, truth)
    assert majority.tolist() == [7, 7, 7, -1, -1, 9, 9, -1]
    assert count.tolist() == [2, 2, 2, 2, 2, 1, 1, 2]
    assert len(majority_of_tracks(track_id[:0], truth[:0])[0]) == 0


def test_the_official_figures_by_hand():
    """Five hits of particle 1, two of 2 and three of noise; two events with the same numbers of particles."""
    truth = np.array([1, 1, 1, 1, 1, 2, 2, 0, 0, 0])
    pt = np.array([2.0, 0.5, 3.0], np.float32)
    numbers, unknown = np.array([1, 2, 3]), np.zeros(3)
    particles = Particles(numbers, pt, unknown, np.zeros((3, 3)), unknown, unknown, np.array([1, 1, 0], np.int8))
    counts = OfficialFigures()
    # Track 0: 3 of particle 1 and 1 of 2; track 1: 2 of particle 1; track 2: noise and one of 2.
    counts.add(np.array([0, 1, 2, 5, 3, 4, 6, 7, 8]), np.array([0, 0, 0, 0, 1, 1, 2, 2, 2]), truth, particles)
    assert (counts.correct, counts.hits) == (3 + 2, 9), "particle 1 by track 0 alone; two of three hits of noise"
    assert (counts.fakes, counts.tracks) == (0, 3)
    assert (counts.split, counts.seen) == (2, 3), "1 and 2 are in two tracks"
    assert (counts.found, counts.wanted) == ({0, 1}, {1})
    counts.add(np.array([0, 5, 7]), np.zeros(3, np.int64), truth, None)
    assert (counts.fakes, counts.tracks, counts.hits) == (1, 4, 12)
    assert counts.in_words() == "trackml_eff 0.4167, fake_rate 0.2500, dup_rate 0.3333, physics_eff_pt1 1.0000"


def test_particle_0_gets_its_number_back_and_without_truth_there_is_no_column(tmp_path):
    track_id = np.array([1, -1, 1, 0])
    write_piece(tmp_path, "event5", EventPlace("5"), np.arange(4), track_id, np.array([-1, 2, -1, -2]))
    table = pq.read_table(join_pieces(tmp_path)).to_pydict()
    assert table["majority_particle_id"] == [0, 0, 2**64 - 2]
    assert table["hit_id"] == [0, 2, 3]
    write_piece(tmp_path, "event6", EventPlace("6"), np.arange(4), track_id, None)
    assert pq.read_table(join_pieces(tmp_path)).column_names == ["event_id", "hit_id", "track_id"]


def test_events_are_in_the_order_of_their_numbers_whatever_the_names_of_their_files(tmp_path):
    for number in (10, 9, 100):
        write_piece(tmp_path, f"event{number}", EventPlace(str(number)), np.arange(3), np.array([0, -1, number]), None)
    table = pq.read_table(path := join_pieces(tmp_path)).to_pydict()
    assert table["event_id"] == [9, 9, 10, 10, 100, 100]
    assert {name: given.track.tolist() for name, given in read_tracks(str(path)).items()} == {
        "9": [0, 9], "10": [0, 10], "100": [0, 100],
    }  # fmt: skip


def test_events_whose_name_is_no_number_are_refused(tmp_path):
    with pytest.raises(Problem, match="'sim7'"):
        write_piece(tmp_path, "eventsim7", EventPlace("sim7"), np.arange(1), np.zeros(1, np.int64), None)


def test_without_tracks_there_is_nothing_to_submit(place, tmp_path):
    with pytest.raises((Refused, Problem, ValueError), match="--format colliderml .*without --tracks"):
        inferred(place, tmp_path / "out", format="colliderml")
