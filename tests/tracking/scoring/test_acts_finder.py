"""ACTS finds tracks in events that it made, and they are counted: its own count of the same tracks says the same."""

import re
from collections import Counter
from copy import deepcopy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from source_files import read_event

from domainpar import evaluate, prepare
from domainpar.common.problems import Problem
from domainpar.tracking.events.acts_maker import import_acts
from domainpar.tracking.events.field import Field
from domainpar.tracking.scoring import acts_finder
from domainpar.tracking.scoring.acts_finder import TrackFinder

pytest.importorskip("acts", reason="ACTS has wheels for Linux on x86-64 alone")

POINTS = TrackFinder(Path(), None).points(None)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two events that ACTS made, and their store."""
    place = tmp_path_factory.mktemp("found")
    words = "--source acts --simulate 2 --pile-up 5 --noise 0.1 --hit-inefficiency 0.05 --val-split 0 --test-split 1"
    assert prepare.main([*words.split(), "--input", str(place / "acts"), "--store", str(place / "store")]) == 0
    return place


@pytest.fixture
def folder(place, tmp_path):
    """A copy of the files, to be spoilt."""
    for path in (place / "acts").glob("event000000000*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def find(folder, point="scanned", events=("000000000",)):
    return TrackFinder(folder, None).find(events, POINTS[point], lambda: None)


def test_what_acts_has_fitted_is_the_particle_whose_hits_are_counted(place, monkeypatch):
    """Momentum and direction in ACTS's file know nothing of how hits are numbered, which its reader does anew."""
    seconds, tables = acts_finder._seconds, []

    def looked_at(folder):
        tables.append(pd.read_csv(next(folder.glob("*tracks_acts.csv")), index_col=False))
        return seconds(folder)

    monkeypatch.setattr(acts_finder, "_seconds", looked_at)
    found, _ = find(place / "acts")
    hits, given, (table,) = read_event("acts", place / "acts", "000000000"), found["0"], tables
    particle = dict(zip(hits.hit_id.tolist(), hits.particle_id.tolist()))
    columns = (getattr(hits.particles, it).tolist() for it in ("particle_id", "pt", "eta"))
    truth = {number: of for number, *of in zip(*columns)}
    near, pure = [], []
    for track in range(len(table)):
        own = [particle[it] for it in given.hit[given.track == track].tolist()]
        ((majority, count),) = Counter(own).most_common(1)
        pure.append(count / len(own))
        pt, eta = truth.get(majority, (1e-9, 0))
        near.append(abs(table["pT"][track] / pt - 1) < 0.1 and abs(table["eta"][track] - eta) < 0.02)
    assert len(near) > 20
    assert np.mean(near) > 0.8
    assert np.mean(pure) > 0.99  # 0.9 if hits are taken by their numbers in ACTS's file
    in_acts_order = [int(it) for it in re.findall(r"\d+", " ".join(table["Measurements_ID"]))]
    assert (np.array(in_acts_order) != given.hit).any()  # else this test looks at nothing


def test_seeds_are_sought_in_the_field_of_the_events(place, monkeypatch):
    acts, told = import_acts(), []
    options = acts.examples.reconstruction.SeedFinderOptionsArg
    monkeypatch.setattr(
        acts.examples.reconstruction, "SeedFinderOptionsArg", lambda **given: told.append(given) or options(**given)
    )
    TrackFinder(place / "acts", Field.of(3.0)).find(["000000000"], POINTS["scanned"], lambda: None)
    assert [given["bFieldInZ"] for given in told] == [3.0 * acts.UnitConstants.T]


def test_the_command_prints_a_row_for_each_working_point_with_seconds(place, capsys):
    words = ["--compare", "acts", "--input", str(place / "acts"), "--store", str(place / "store")]
    assert evaluate.main(words) == 0
    out = capsys.readouterr().out
    for point in POINTS:
        assert re.search(rf"acts-{point}: [\d.]+ s per event \(seeds [\d.]+, filter [\d.]+, ambiguity [\d.]+\)", out)
        row = next(line for line in out.splitlines() if line.startswith(f"acts-{point} "))
        assert float(row.split()[2]) > 0.6  # efficiency: a count of wrong hits finds none
    assert "2 events," in out


def test_a_working_point_of_ones_own_is_one_row(place, tmp_path, capsys):
    points = deepcopy(POINTS)
    points["scanned"]["kept"] = {"nMeasurementsMin": 10}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"long": points["scanned"]}))
    words = ["--compare", "acts", "--input", str(place / "acts"), "--store", str(place / "store")]
    assert evaluate.main([*words, "--acts-settings", str(tmp_path / "mine.yaml")]) == 0
    out = capsys.readouterr().out
    assert "acts-long" in out
    assert "acts-example" not in out
    found, _ = TrackFinder(place / "acts", None).find(["000000000"], points["scanned"], lambda: None)
    assert np.bincount(found["0"].track).min() >= 10


def test_working_points_that_lack_a_part_or_have_one_that_acts_does_not_know_are_refused(place, tmp_path):
    points = deepcopy(POINTS)
    path = tmp_path / "points.yaml"
    path.write_text(yaml.safe_dump({"half": {"seeds": {}}}))
    with pytest.raises(Problem, match="half is no working point"):
        TrackFinder(place, None).points(str(path))
    path.write_text("a: [")
    with pytest.raises(Problem, match="no working points of ACTS"):
        TrackFinder(place, None).points(str(path))
    points["scanned"]["seeds"]["minimum_pt"] = 1
    with pytest.raises(Problem, match="could not find its tracks: .*minimum_pt"):
        TrackFinder(place / "acts", None).find(["000000000"], points["scanned"], lambda: None)


@pytest.mark.parametrize("name", ["hits", "measurement-simhit-map", "particles_simulated", "measurements"])
def test_an_event_that_lacks_a_table_is_refused(folder, name):
    (folder / f"event000000000-{name}.csv").unlink()
    with pytest.raises(Problem, match=f"no event000000000-{name}.csv"):
        find(folder)


def test_measurements_that_cannot_be_told_apart_are_refused(folder):
    path = folder / "event000000000-measurements.csv"
    table = pd.read_csv(path, dtype=str, encoding="latin-1", na_filter=False)
    table.loc[1, ["geometry_id", "local0", "local1"]] = table.loc[0, ["geometry_id", "local0", "local1"]]
    table.to_csv(path, index=False, encoding="latin-1")
    with pytest.raises(Problem, match="one sensor at one place"):
        find(folder)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("--compare acts --store s", "--compare acts .*without --input"),
        ("--compare acts --input a --store s --name mine", "--name mine .*with --compare acts"),
        ("t.csv --input a --store s", "--input a .*without --compare"),
        ("--store s", "there are no tracks"),
    ],
)
def test_flags_that_mean_nothing_are_refused(words, match, capsys):
    assert evaluate.main(words.split()) == 2
    assert re.search(match, capsys.readouterr().err)
