"""`python -m domainpar.infer --tracks`: tracks beside the scores, held against truth, perfect scores and helices."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from marks import slow
from random_events import random_event
from test_infer import differences, inferred, opened, trained, write_store

from domainpar.common.agreement import Refused
from domainpar.tracking.config import ConfigError, InferConfig
from domainpar.tracking.events.construct import Cuts, build_graph
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.reco.performance.counts import TrackCounts


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A store of three simulated events, and a network that was trained on a little."""
    place = tmp_path_factory.mktemp("tracks")
    events = [build_graph(simulate_event(seed, 2500), Cuts()) for seed in range(3)]
    store = write_store(place / "store", events, ["train", "train", "test"])
    trained(store, place / "run", epochs=6, lr=1e-2, true_weight=2.0)
    return place


def test_tracks_lie_beside_the_scores_and_the_list_tells_how_good_they_are(place, tmp_path, capsys):
    listed, _ = inferred(place, tmp_path / "out", 2, tracks="greedy", ckf=True, checkpoint="last")
    assert listed["tracks"]["method"] == "greedy"
    assert listed["tracks"]["options"] == {
        "score_cut": 0.1, "max_chi2": 12.0, "min_hits": 3,
        "refine": False, "stitch": True, "extend": False, "min_quality": 0.0,
    }  # fmt: skip
    assert listed["tracks"]["found_by"] == ["ckf", "network", "perfect_scores"]
    assert listed["tracks"]["border_sectors"] == 8
    for event in listed["events"]:
        found = opened(tmp_path / "out" / event["path"])
        for name in ("track_id", "ckf_track_id"):
            track = found[name][...]
            numbers, first, hits = np.unique(track[track >= 0], return_index=True, return_counts=True)
            assert numbers.tolist() == list(range(len(numbers)))
            assert (np.diff(first) > 0).all()
            assert hits.min() >= 3
        assert event["tracks"] == found["track_id"][...].max() + 1
    of_test = listed["tracks"]["performance"]["test"]
    counts = {finder: TrackCounts.read(found) for finder, found in of_test.items()}
    reconstructed = {finder: one.styles["atlas"].reconstructed for finder, one in counts.items()}
    assert 0 < reconstructed["network"] <= reconstructed["perfect_scores"]
    assert (
        counts["perfect_scores"].styles["atlas"].matched == counts["perfect_scores"].styles["atlas"].matchable
    )  # no fakes
    assert counts["network"].tracks == listed["events"][2]["tracks"]
    for finder, one in counts.items():
        lost = one.styles["atlas"].lost
        assert sum(lost.values()) == one.styles["atlas"].targets - one.styles["atlas"].reconstructed
        assert set(filter(lost.get, lost)) <= (
            {"finder", "matching"} if finder == "ckf" else {"edges", "score", "builder", "matching"}
        )
        assert 0 < sum(of.held for of in one.layers.values()) <= sum(of.hits for of in one.layers.values())
    segments = listed["metrics"]["test"]["segments"]
    assert 0 < segments["passing"] <= segments["in_graph"] < segments["segments"]
    printed = capsys.readouterr().out
    shares = [segments[name] / segments["segments"] for name in ("in_graph", "passing")]
    assert re.search(
        f"split=test .* {shares[0]:.4f} of {segments['segments']:,} segments.* {shares[1]:.4f} .* 0.5", printed
    )
    lost = [(name, number) for name, number in counts["network"].styles["atlas"].lost.items() if number]
    by_reason = ", ".join(f"{name} {number}" for name, number in lost)
    told = f"by the first step that lost them: network {sum(number for _, number in lost)} ({by_reason}), ckf "
    assert told in " ".join(printed.split())
    assert re.search(r"fits against the truth: pT ratio (0\.9[5-9]|1\.0[0-5])\d*", printed)
    assert "would make it 1" not in printed
    for row in ("network", "ckf", "perfect_scores"):
        assert sum(line.startswith(row + " ") for line in printed.splitlines()) >= 1
    assert re.search(
        r"seconds per event: load \S+, network \S+, building [0-9, to]+ tracks \S+, fitting \S+, writing",
        printed,
    )


def test_a_field_in_which_fits_have_other_momenta_than_the_truth_is_told_with_the_one_that_fits(
    place, tmp_path, capsys
):
    events = [build_graph(simulate_event(seed, 2500, None, Field.of(3.0)), Cuts()) for seed in range(3)]
    write_store(tmp_path / "store", events, ["train", "train", "test"], {"field": 2.0})
    inferred(place, tmp_path / "out", store=str(tmp_path / "store"), tracks="greedy")
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "would make it 1" in line]
    field = re.search("WARNING: fitted pT is 0.6.* times the true one .*; (.*) T would make it 1, not 2 T", told)[1]
    assert float(field) == pytest.approx(3, rel=0.02)
    assert told.endswith(f"prepare --field {field}")


@pytest.mark.parametrize(
    "flags",
    [
        slow({}, id="halo"),
        pytest.param({"mode": "naive", "sectors": 4}, id="naive"),
        pytest.param({"extend": True, "min_quality": 6.0}, id="followed"),
    ],
)
def test_files_with_tracks_are_the_same_on_any_ranks(place, tmp_path, flags):
    flags = {**flags, "tracks": "greedy", "ckf": True, "split": "test"}
    _, one = inferred(place, tmp_path / "one", **flags)
    _, many = inferred(place, tmp_path / "many", 4, **flags, grouping="random")
    assert not differences(one, many, tmp_path)
    (scores,) = (tmp_path / "one").glob("*.scores.zarr.zip")
    assert ("built_track_id" in opened(scores)) == ("min_quality" in flags)
    (event,) = json.loads((tmp_path / "one" / "timings.json").read_text())["events"]
    assert ("following" in event["stages"]) == flags.get("extend", False)
    assert min(event["stages"].values()) >= 0, event["stages"]  # the clock stands still while numba compiles


@pytest.mark.parametrize(
    "flags",
    [{}, slow({"extend": True, "min_quality": 6.0, "max_chi2": 100000.0, "score_cut": 0.0001})],
    ids=["grown", "followed"],
)
def test_shared_hits_are_written_and_counted_the_same_on_any_ranks(place, tmp_path, capsys, flags):
    flags = {"max_chi2": 25.0, **flags, "tracks": "greedy", "ckf": True, "split": "test"}
    off, _ = inferred(place, tmp_path / "off", **flags)
    assert "Shared hits" not in capsys.readouterr().out
    on, one = inferred(place, tmp_path / "one", **flags, shared_hits=True)
    printed = capsys.readouterr().out
    _, two = inferred(place, tmp_path / "two", 2, **flags, shared_hits=True, grouping="random")
    assert not differences(one, two, tmp_path)
    (event,) = on["events"]
    found, alone = (opened(tmp_path / name / event["path"]) for name in ("one", "off"))
    assert set(found) - set(alone) == {"shared_hits"}
    of_fits = {f"track_{name}" for name in ("parameters", "covariance", "chi2")}
    assert of_fits < set(alone)
    for name in set(alone) - of_fits:  # a track is fitted with the hits that it shares
        assert np.array_equal(found[name][...], alone[name][...], equal_nan="ckf_track_" in name)
    assert found["track_parameters"].shape == (event["tracks"], 5)
    shared, track_id = found["shared_hits"][...], found["track_id"][...]
    assert len(shared) > 5
    assert (track_id[shared[:, 0]] >= 0).all()
    assert (track_id[shared[:, 0]] != shared[:, 1]).all()
    assert 0 <= shared[:, 1].min() <= shared[:, 1].max() < event["tracks"]
    assert shared.tolist() == np.unique(shared, axis=0).tolist()
    of_finders = on["tracks"]["performance"]["test"]
    assert of_finders["network"]["shared"] == len(shared)
    assert of_finders["ckf"]["shared"] == 0
    assert off["tracks"]["performance"]["test"]["network"]["shared"] == 0
    assert of_finders["network"]["trackml_score"] == off["tracks"]["performance"]["test"]["network"]["trackml_score"]
    assert f"counted for each track after the first: network {len(shared)}, perfect_scores " in printed
    assert on["tracks"]["options"]["shared_hits"] is True
    assert "shared_hits" not in off["tracks"]["options"]


def test_naive_mode_finds_fewer_even_with_perfect_scores(place, tmp_path):
    halo, _ = inferred(place, tmp_path / "halo", tracks="greedy")
    naive, _ = inferred(place, tmp_path / "naive", tracks="greedy", mode="naive", sectors=8)
    assert naive["tracks"]["border_sectors"] == 8
    found = [
        sum(performance["perfect_scores"]["styles"]["two_way"]["reconstructed"] for performance in by_split.values())
        for by_split in (naive["tracks"]["performance"], halo["tracks"]["performance"])
    ]
    assert found[0] < found[1]


def test_times_are_kept_apart_from_what_is_hashed(place, tmp_path):
    listed, _ = inferred(place, tmp_path / "out", 2, tracks="cc")
    timings = json.loads((tmp_path / "out" / "timings.json").read_text())
    assert timings["ranks"] == 2
    assert [event["event"] for event in timings["events"]] == [event["event"] for event in listed["events"]]
    for event in timings["events"]:
        stages = event["stages"]
        assert min(stages.values()) >= 0, stages
        worked = sum(stages[name] for name in ("load", "network", "building"))
        assert worked == pytest.approx(event["seconds_all"])
        assert (stages["building"], stages["network"]) == (event["seconds_tracks"], event["seconds_network"])


def test_tables_of_hits_and_tracks_are_written_on_request(place, tmp_path):
    inferred(place, tmp_path / "out", tracks="greedy", format="csv", split="test")
    (path,) = (tmp_path / "out").glob("*-tracks.csv")
    rows = [line.split(",") for line in path.read_text().splitlines()]
    (scores,) = (tmp_path / "out").glob("*.scores.zarr.zip")
    assert rows[0] == ["event_id", "hit_id", "track_id"]
    assert [int(row[2]) - 1 for row in rows[1:]] == opened(scores)["track_id"][...].tolist()
    _, again = inferred(place, tmp_path / "out", tracks="greedy", split="test", overwrite=True)
    assert not list((tmp_path / "out").glob("*-tracks.csv"))
    assert set(again) == {"scores.json", scores.name}


def test_files_for_acorn_are_written_on_request(place, tmp_path):
    pytest.importorskip("torch_geometric")
    from domainpar.tracking.events.sources import open_source

    inferred(place, tmp_path / "out", 2, tracks="greedy", format="acorn")
    names = {path.relative_to(tmp_path / "out").parts[0] for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {"trainset", "trainset_tracks", "testset", "testset_tracks", "scores.json"} <= names
    assert len(open_source("acorn", directory=tmp_path / "out").names) == 3
    inferred(place, tmp_path / "out", 2, tracks="greedy", overwrite=True)
    assert not (tmp_path / "out" / "trainset").exists()


def test_events_without_truth_have_tracks_all_the_same(place, tmp_path, capsys):
    graph = random_event(5, 100, 400, labels=False)
    store = write_store(tmp_path / "store", [graph], ["test"])
    trained(write_store(tmp_path / "trained on", [random_event(1)], ["train"]), tmp_path / "run", epochs=1)
    listed, _ = inferred(tmp_path, tmp_path / "out", tracks="greedy", store=str(store))
    assert listed["tracks"]["performance"] == {}
    assert listed["events"][0]["tracks"] is not None
    assert "1 event without truth" in capsys.readouterr().out


def test_greedy_tracks_of_events_without_positions_are_refused_before_work(tmp_path):
    store = write_store(tmp_path / "store", [random_event(0, positions=False)], ["train"])
    trained(store, tmp_path / "run", epochs=1)
    with pytest.raises(Refused, match=r"its hits have no positions(.|\n)*--tracks cc"):
        inferred(tmp_path, tmp_path / "out", 2, tracks="greedy")
    assert not (tmp_path / "out").exists()
    with pytest.raises(Refused, match="--shared-hits"):
        inferred(tmp_path, tmp_path / "out", 2, tracks="cc", shared_hits=True)
    listed, _ = inferred(tmp_path, tmp_path / "out", 2, tracks="cc")
    assert listed["events"][0]["tracks"] is not None


@pytest.mark.parametrize("flag", ["ckf", "extend"])
def test_tracks_along_surfaces_need_the_detector_they_know(tmp_path, flag):
    store = write_store(tmp_path / "store", [random_event(0)], ["train"])
    trained(store, tmp_path / "run", epochs=1)
    with pytest.raises(Refused, match="TrackML"):
        inferred(tmp_path, tmp_path / "out", 2, tracks="greedy", **{flag: True})
    assert not (tmp_path / "out").exists()


def test_a_target_that_nobody_understands_is_refused_before_work(place, tmp_path):
    with pytest.raises(Refused, match="'ptt'"):
        inferred(place, tmp_path / "out", 2, tracks="greedy", track_target="ptt: [1, .inf]")
    assert not (tmp_path / "out").exists()


def test_a_target_that_the_events_do_not_know_is_said(place, tmp_path, capsys):
    listed, _ = inferred(place, tmp_path / "out", 2, tracks="greedy", track_target="pdgId: [in, [13, -13]]")
    assert listed["tracks"]["performance"] == {}
    assert "tracks of 3 events were not counted: target condition on 'pdgId'" in capsys.readouterr().out


def test_a_finder_that_some_events_lack_is_left_out_and_named(tmp_path, capsys):
    whole, blind = (build_graph(simulate_event(seed, 1500), Cuts()) for seed in range(2))
    store = write_store(tmp_path / "store", [whole, replace(blind, label=None)], ["test", "test"])
    trained(write_store(tmp_path / "other", [whole], ["train"]), tmp_path / "run", epochs=1)
    listed, _ = inferred(tmp_path, tmp_path / "out", tracks="greedy", store=str(store))
    assert set(listed["tracks"]["performance"]["test"]) == {"network"}
    assert "perfect_scores is left out of the table: 1 of 2 events" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"shared_hits": True}, "--shared-hits .*without --tracks"),
        (
            {"tracks": "cc", "max_chi2": 2.0},
            "--max-chi2 2.0 .*without --tracks greedy, --refine or --shared-hits",
        ),
        ({"ckf": True}, "--ckf .*without --tracks"),
        ({"format": "csv"}, "--format csv .*without --tracks"),
        ({"tracks": "greedy", "score_cut": 1.0}, "--score-cut is 1.0"),
        (
            {"tracks": "greedy", "matching_fraction": 0.4},
            "--matching-fraction is 0.4; .* at least 0.5 and at most 1",
        ),
        ({"tracks": "greedy", "track_target": "pt"}, "--track-target 'pt': not a mapping"),
    ],
)
def test_impossible_requests_are_refused(flags, said):
    with pytest.raises(ConfigError, match=said):
        InferConfig(**flags)
