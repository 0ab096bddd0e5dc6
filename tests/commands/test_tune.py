"""`infer --tune`: cuts are chosen on validation events, kept with the run, and taken from then on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from test_infer import inferred, trained, write_store

from domainpar.common import words
from domainpar.common.agreement import Refused
from domainpar.common.problems import Problem
from domainpar.parallel.world import World
from domainpar.tracking.config import ConfigError, InferConfig
from domainpar.tracking.config.texts import ConditionsOrAll
from domainpar.tracking.events.construct import Cuts, build_graph
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.reco.performance.counts import TrackCounts
from domainpar.tracking.reco.performance.rates import METRICS
from domainpar.tracking.reco.performance.truth import truth_of
from domainpar.tracking.reco.tracks import REASONS, TrackOptions
from domainpar.tracking.scoring import tuning

INF = float("inf")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store with two validation events, and a network that was trained on a little."""
    made = tmp_path_factory.mktemp("made")
    events = [build_graph(simulate_event(seed, 1500), Cuts()) for seed in range(4)]
    store = write_store(made / "store", events, ["train", "val", "val", "test"])
    trained(store, made / "run", epochs=4, lr=1e-2, true_weight=2.0)
    return made


@pytest.fixture
def place(made, tmp_path):
    """A copy of them, in which a test may keep its cuts."""
    return shutil.copytree(made, tmp_path / "place")


def kept(place):
    return json.loads((place / "run" / "tracks.json").read_text())


def options_of(listed):
    return listed["tracks"]["options"]


def test_the_target_of_the_training_is_that_of_tuned_cuts_and_of_tracks_unless_a_flag_names_another(
    made, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(tuning.GRIDS, "greedy", {"score_cut": (0.1,), "max_chi2": (12.0,)})
    monkeypatch.setattr(tuning, "QUALITIES", (0.0,))
    trained(made / "store", tmp_path / "run", target="pt: [0.3, .inf]", epochs=1)
    events = EventStore(made / "store").events()
    for given, target in ((None, {"pt": [0.3, INF], "nhits": [5, INF]}), ("pt: [2, .inf]", {"pt": [2, INF]})):
        flags = {"tracks": "greedy", "tune": True, "overwrite": True} | ({"track_target": given} if given else {})
        listed, _ = inferred(tmp_path, tmp_path / "out", store=str(made / "store"), split="test", **flags)
        assert InferConfig(tracks="cc", track_target=listed["tracks"]["target"]).track_target.value == target
        assert f"targets  : {listed['tracks']['target']}\n" in capsys.readouterr().out
        with EventStore(made / "store").open(events[3]) as event:
            truth = truth_of(event)
        ids = np.unique(truth.particle_id[truth.particle_id > 0])
        counted = listed["tracks"]["performance"]["test"]["network"]["styles"]["atlas"]["targets"]
        assert counted == truth.targets_among(ids, target).sum()
        assert kept(tmp_path)["greedy"]["efficiency"] <= 1
    assert InferConfig().trained_for(ConditionsOrAll("{nhits: [3, 9]}")).track_target.value == {"nhits": [3, 9]}
    assert InferConfig().trained_for(None).track_target.value == {"pt": [1, INF], "nhits": [5, INF]}


def test_cuts_are_chosen_on_validation_events_and_kept_on_any_ranks(place, monkeypatch, capsys):
    monkeypatch.setitem(tuning.GRIDS, "greedy", {"score_cut": (0.1, 0.999), "max_chi2": (6.0, 12.0)})
    deadlines = []
    monkeypatch.setattr(World, "set_deadline", lambda world, seconds: deadlines.append(seconds))
    listed, one = inferred(place, place / "one", tracks="greedy", tune=True, split="test", timeout=17.5)
    assert set(deadlines) == {17.5}
    assert len(deadlines) > 1, "one event is scored; some were before it"
    chosen = kept(place)["greedy"]
    assert chosen["events"] == 2
    assert set(chosen["cuts"]) == {"score_cut", "max_chi2", "min_quality"}
    assert 0 < chosen["efficiency"] <= 1
    assert {name: options_of(listed)[name] for name in chosen["cuts"]} == chosen["cuts"]
    assert "tuned    : greedy, score cut " in capsys.readouterr().out
    assert not (place / "one" / "tuning").exists()
    (place / "run" / "tracks.json").unlink()
    _, many = inferred(place, place / "many", 3, tracks="greedy", tune=True, split="test")
    assert (one, chosen) == (many, kept(place)["greedy"])


def test_cuts_are_those_with_the_best_rates(place, monkeypatch):
    rates = {}
    for cut in (0.1, 0.5, 0.9):
        monkeypatch.setitem(tuning.GRIDS, "cc", {"score_cut": (cut,)})
        inferred(place, place / str(cut), tracks="cc", tune=True, split="test")
        of = kept(place)["cc"]
        rates[cut] = of["efficiency"] - of["fakes"] - of["unlabelled"] - of["duplicates"]
    assert len(set(rates.values())) > 1
    monkeypatch.setitem(tuning.GRIDS, "cc", {"score_cut": (0.1, 0.5, 0.9)})
    inferred(place, place / "all", tracks="cc", tune=True, split="test")
    assert kept(place)["cc"]["cuts"]["score_cut"] == max(rates, key=rates.__getitem__)


def without_particle(rates):
    """Fakes and unlabelled tracks: whether truth lacks a hit, or it is noise, no cut can know."""
    return rates["fakes"] + rates["unlabelled"]


def test_cuts_with_few_fakes_are_chosen_on_request(place, monkeypatch):
    rates = {}
    for cut in (0.1, 0.5, 0.9):
        monkeypatch.setitem(tuning.GRIDS, "cc", {"score_cut": (cut,)})
        inferred(place, place / str(cut), tracks="cc", tune=True, min_quality=0.0, split="test")
        rates[cut] = kept(place)["cc"]
    monkeypatch.setitem(tuning.GRIDS, "cc", {"score_cut": (0.1, 0.5, 0.9)})
    few, _, many = sorted(rates, key=lambda cut: without_particle(rates[cut]))
    assert without_particle(rates[few]) < without_particle(rates[many])
    for bound in sorted(set(map(without_particle, rates.values()))):
        allowed = [cut for cut in rates if without_particle(rates[cut]) <= bound]
        inferred(
            place, place / f"most {bound}", tracks="cc", tune=True, min_quality=0.0, max_fake_rate=bound, split="test"
        )
        of = kept(place)["cc"]
        assert of["efficiency"] == max(rates[cut]["efficiency"] for cut in allowed)
        assert without_particle(of) <= bound
    more = {"efficiency": 0.9, "fakes": 0.1, "unlabelled": 0.2}
    fewer = {"efficiency": 0.8, "fakes": 0.2, "unlabelled": 0.0}
    assert max([more, fewer], key=lambda of: tuning.merit(of, 0.1)) is fewer


def test_cuts_are_judged_with_shared_hits_where_tracks_have_them(place, monkeypatch):
    monkeypatch.setitem(tuning.GRIDS, "greedy", {"score_cut": (0.1,), "max_chi2": (25.0,)})
    flags = {
        "tracks": "greedy",
        "tune": True,
        "min_quality": 0.0,
        "split": "val",
        "matching_style": "one_way",
        "matching_fraction": 1.0,
    }
    found = []
    for shared_hits in (False, True):
        listed, _ = inferred(place, place / str(shared_hits), **flags, shared_hits=shared_hits)
        counts = TrackCounts.read(listed["tracks"]["performance"]["val"]["network"])
        found.append(kept(place)["greedy"]["efficiency"])
        assert found[-1] == METRICS["efficiency"].value(counts, "one_way")
    assert found[0] < found[1]  # more particles have all of their hits on one track


def test_later_inferences_take_them_unless_told_otherwise(place):
    tuning.keep(place / "run", TrackOptions(), {"cuts": {"score_cut": 0.3, "max_chi2": 0.7}, "quality": list(REASONS)})
    extended = {"cuts": {"score_cut": 0.2, "min_quality": 7.0}, "quality": list(REASONS)}
    tuning.keep(place / "run", TrackOptions(extend=True), extended)
    for name, flags, score_cut, max_chi2, min_quality in (
        ("out", {}, 0.3, 0.7, 0.0),
        ("told", {"score_cut": 0.9}, 0.9, 0.7, 0.0),
        ("refined", {"refine": True}, 0.1, 12.0, 0.0),  # other tracks have other cuts
        ("extended", {"extend": True}, 0.2, 12.0, 7.0),
    ):
        options = options_of(inferred(place, place / name, tracks="greedy", split="test", **flags)[0])
        assert (options["score_cut"], options["max_chi2"], options["min_quality"]) == (score_cut, max_chi2, min_quality)
    assert options_of(inferred(place, place / "cc", tracks="cc", split="test")[0])["score_cut"] == 0.5


def test_cuts_of_another_method_stay_with_their_run(tmp_path):
    before = {"cc": {"cuts": {"score_cut": 0.7}}, "cc, refined": {"cuts": {"score_cut": 0.8}}}
    (tmp_path / "tracks.json").write_text(json.dumps(before))
    chosen = {"cuts": {"score_cut": 0.3}}
    tuning.keep(tmp_path, TrackOptions(), chosen)
    assert tuning.read(tmp_path) == before | {"greedy": chosen}


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_no_more_events_are_taken_than_have_enough_targets(place, monkeypatch, num_ranks):
    monkeypatch.setitem(tuning.GRIDS, "cc", {"score_cut": (0.1, 0.5)})
    scored, rounds = [], tuning.Scorer.rounds
    monkeypatch.setattr(
        tuning.Scorer, "rounds", lambda scorer, records: scored.append(records) or rounds(scorer, records)
    )
    told, progress = [], tuning.progress
    monkeypatch.setattr(tuning, "progress", lambda *what: told.append(what) or progress(*what))
    monkeypatch.setattr(tuning, "ENOUGH_TARGETS", 1)
    inferred(place, place / "few", num_ranks, tracks="cc", tune=True, split="test")
    assert kept(place)["cc"]["events"] == 1, "the first of two in the store, on any number of ranks"
    taken = [record.event for records in scored for record in records if record.split == "val"]
    assert len(taken) == (1 if num_ranks == 1 else 2 * num_ranks), "a round of events, on each rank"
    assert ("tune 18 cuts", 2, "event", True) in told
    first = kept(place)["cc"]
    monkeypatch.setattr(tuning, "ENOUGH_TARGETS", 10**9)
    inferred(place, place / "all", num_ranks, tracks="cc", tune=True, split="test")
    assert kept(place)["cc"]["events"] == 2
    assert kept(place)["cc"] != first


def test_signs_of_life_say_which_cuts_are_tried(place, monkeypatch):
    monkeypatch.setitem(tuning.GRIDS, "cc", {"score_cut": (0.1, 0.5)})
    told, count_tracks = [], tuning.count_tracks
    monkeypatch.setattr(
        tuning, "count_tracks", lambda *what: told.append(words.PROGRESS_LOG.phase) or count_tracks(*what)
    )
    inferred(place, place / "out", tracks="cc", tune=True, split="test")
    events = [record.event for record in EventStore(place / "store").events("val")]
    assert told == [f"event {event}: {number} of 18 cuts" for event in events for number in range(1, 19)]


def test_what_is_given_is_not_tuned(place, monkeypatch):
    monkeypatch.setitem(tuning.GRIDS, "greedy", {"score_cut": (0.1, 0.2), "max_chi2": (6.0, 12.0)})
    inferred(place, place / "out", tracks="greedy", tune=True, max_chi2=0.7, split="test")
    assert kept(place)["greedy"]["cuts"]["max_chi2"] == 0.7


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"cc": {}}', '{"cc": {"cuts": {"score_cut": 3}}}', '{"no": 1}', '{"cc, no": {"cuts": {}}}'],
)
def test_a_damaged_choice_is_refused(tmp_path, content):
    (tmp_path / "tracks.json").write_text(content)
    with pytest.raises(Problem, match=r"tracks\.json cannot be read"):
        tuning.read(tmp_path)


def test_a_cut_on_an_older_kind_of_quality_or_chi2_is_refused(tmp_path):
    chosen = {"cuts": {"min_quality": 7.0}, "quality": list(REASONS)}
    (tmp_path / "tracks.json").write_text(json.dumps({"greedy": chosen}))
    assert tuning.read(tmp_path) == {"greedy": chosen}
    kinds = (
        {"cuts": {"min_quality": 7.0}},
        {"cuts": {"max_chi2": 0.5}},
        chosen | {"quality": ["hits", "scores", "beam"]},
    )
    for older in kinds:
        (tmp_path / "tracks.json").write_text(json.dumps({"greedy": older}))
        with pytest.raises(Problem, match="quality") as refused:
            tuning.read(tmp_path)
        assert "tune again" in str(refused.value)
        assert "quality" not in older or "(hits, scores, beam;" in str(refused.value)
        assert "now hits, scores, beam, fit)" in str(refused.value)
    (tmp_path / "tracks.json").write_text(json.dumps({"cc": {"cuts": {"score_cut": 0.8}}}))
    assert list(tuning.read(tmp_path)) == ["cc"]


def test_without_validation_events_or_their_truth_nothing_is_tuned(place):
    event = build_graph(simulate_event(7, 500), Cuts())
    write_store(place / "only", [event], ["test"])
    with pytest.raises(Refused, match="no validation events"):
        inferred(place, place / "out", tracks="cc", tune=True, store=str(place / "only"))
    hits = replace(simulate_event(8, 500), particle_id=None, particles=None, weight=None)
    write_store(place / "bare", [event, build_graph(hits, Cuts())], ["test", "val"])
    with pytest.raises((Refused, Problem), match="the particle of each hit"):
        inferred(place, place / "bare_out", tracks="cc", tune=True, store=str(place / "bare"))
    assert not (place / "run" / "tracks.json").exists()


@pytest.mark.parametrize(
    "given",
    [
        {"tune": True},
        {"refine": True},
        {"tracks": "cc", "max_chi2": 1.0},
        {"extend": True},
        {"min_quality": 6.0},
        {"tracks": "cc", "min_quality": -1.0},
        {"tracks": "cc", "max_fake_rate": 0.1},
    ],
)
def test_flags_of_tracks_are_refused_where_they_mean_nothing(given):
    with pytest.raises(ConfigError) as refused:
        InferConfig(**given)
    assert refused.value.hint


def test_duplicates_cost_merit_as_fakes_do_unless_a_fake_rate_is_asked_for():
    rates = {"efficiency": 0.9, "fakes": 0.1, "unlabelled": 0.05, "duplicates": 0.2}
    assert tuning.merit(rates, None) == pytest.approx(0.9 - 0.1 - 0.05 - 0.2)
    assert tuning.merit(rates, 0.16) == 0.9
    assert tuning.merit(rates, 0.1) == pytest.approx(-0.15)
