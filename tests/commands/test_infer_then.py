"""`infer --run A --then B`: the filter and the network in one process, with the bits of two commands and a store."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from random_events import random_event
from test_infer import inferred, trained, write_store
from test_prepare_scores import filtered

from domainpar import read_scores
from domainpar.common.agreement import Refused
from domainpar.tracking.config import ConfigError, InferConfig
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.scoring.filtering import kept_by

SPLITS = ("train", "train", "val", "test")


def without_positions(event):
    return replace(event, hits=replace(event.hits, position=None))


@pytest.fixture(scope="module", params=["placed", "without positions"])
def place(tmp_path_factory, request):
    """A store, a filter and a network that was trained on what it left; their scores by two commands."""
    place = tmp_path_factory.mktemp("then")
    events = [random_event(seed, 100 + 10 * seed, 900 + 37 * seed, labels=seed < 3) for seed in range(4)]
    if request.param != "placed":  # in tiles of METIS
        events = [without_positions(event) for event in events]
    trained(write_store(place / "store", events, SPLITS), place / "filter")
    inferred(place, place / "scores", run=str(place / "filter"), split="all")
    filtered(place, place / "left", min_score=cut_of(place))
    trained(place / "left", place / "run", graph_iters=3)
    inferred(place, place / "two", store=str(place / "left"), tracks="cc")
    return place


def cut_of(place):
    """A score that half of the edges have."""
    scores = [read_scores(place / "scores", record.event).edge_score for record in EventStore(place / "store").events()]
    return float(np.median(np.concatenate(scores)))


def in_one(place, out, num_ranks=1, domain_size=None, **flags):
    flags = {"run": str(place / "filter"), "then": str(place / "run"), "tracks": "cc", **flags}
    return inferred(place, out, num_ranks, domain_size, **flags)


@pytest.mark.parametrize(
    ("num_ranks", "domain_size", "flags"),
    [(1, None, {}), (2, None, {}), (3, None, {"grouping": "random"}), (2, 1, {}), (2, None, {"events_per_call": 3})],
)
def test_scores_and_tracks_are_those_of_two_commands(place, tmp_path, num_ranks, domain_size, flags):
    in_one(place, tmp_path / "out", num_ranks, domain_size, **flags)
    for record in EventStore(place / "store").events():
        one, two = read_scores(tmp_path / "out", record.event), read_scores(place / "two", record.event)
        kept = read_scores(place / "scores", record.event).edge_score >= cut_of(place)
        assert 0 < kept.sum() < len(kept) == record.num_edges
        assert np.array_equal(one.edge_scored, kept)
        assert np.array_equal(one.edge_index[:, kept], two.edge_index)
        for name in ("edge_logit", "edge_score"):
            assert getattr(one, name)[kept].tobytes() == getattr(two, name).tobytes()
            assert not getattr(one, name)[~kept].any()
        assert np.array_equal(one.track_id, two.track_id)
        assert one.about["event_sha256"] == record.sha256


def test_files_are_the_same_on_any_ranks_and_say_what_was_kept_and_lost(place, tmp_path, capsys):
    listed, one = in_one(place, tmp_path / "one")
    printed = capsys.readouterr().out
    assert one == in_one(place, tmp_path / "many", 3)[1]
    two = json.loads((place / "two" / "scores.json").read_text())
    weights = json.loads((place / "scores" / "scores.json").read_text())["parameters_sha256"]
    assert listed["filter"]["parameters_sha256"] == weights
    assert listed["filter"]["min_score"] == cut_of(place), "that of the training"
    assert (listed["parameters_sha256"], listed["filters"]) == (two["parameters_sha256"], two["filters"])
    of, left, before = (
        of["metrics"]["val"] for of in (listed, two, json.loads((place / "scores" / "scores.json").read_text()))
    )
    assert of["filter"]["edges"] == of["edges"] == before["edges"]
    assert of["filter"]["kept"] == left["edges"]
    assert of["target_edges"] == before["target_edges"]
    assert of["filter"]["targets_kept"] == left["target_edges"] < of["target_edges"], "lost, and counted"
    assert of["edge_efficiency"] < left["edge_efficiency"]
    line = f"filter kept {left['edges']:,} of {of['edges']:,} edges, {left['target_edges']:,} of {of['target_edges']:,}"
    assert f"split=val {line}" in printed
    assert f"filter   : {place / 'filter'}, " in printed
    assert "note: trained on edges" not in printed
    timings = json.loads((tmp_path / "one" / "timings.json").read_text())
    said, taken = (line for line in printed.splitlines() if line.startswith("memory   : "))
    assert " expected, above " in said
    assert taken.endswith(" were expected") or "no more than before" in taken
    assert all(len(timings["memory"][name]) == 1 for name in ("bare_bytes", "expected_bytes", "peak_bytes"))
    assert all(0 <= event["stages"]["filter"] <= event["seconds_all"] for event in timings["events"])
    assert ", filter " in next(line for line in printed.splitlines() if line.startswith("seconds per event: load "))


def test_events_that_either_network_was_trained_on_count_as_such(place, tmp_path):
    listed, _ = in_one(place, tmp_path / "out")
    assert listed["trained_on"]["train"]["trained_on"] == 2
    assert listed["trained_on"]["test"]["trained_on"] == 0


def test_on_a_store_that_is_filtered_the_filter_that_is_told_is_the_one_that_scored_here(place, tmp_path):
    own = cut_of(place) / 2
    listed, _ = in_one(place, tmp_path / "out", store=str(place / "left"), min_score=own)
    weights = json.loads((place / "scores" / "scores.json").read_text())["parameters_sha256"]
    assert listed["filters"] == [f"{weights[:16]} at {cut:g}" for cut in (cut_of(place), own)]


def test_a_filter_that_is_exact_to_rounding_only_makes_the_scores_so(place, tmp_path):
    trained(place / "store", tmp_path / "filter", model="acorn2", epochs=1)
    listed, _ = in_one(place, tmp_path / "out", run=str(tmp_path / "filter"), min_score=0.1)
    alone, _ = inferred(place, tmp_path / "alone", run=str(tmp_path / "filter"))
    assert listed["bitwise_problem"] == alone["bitwise_problem"] != ""
    assert in_one(place, tmp_path / "exact")[0].get("bitwise_problem") is None


def test_an_edge_with_just_the_least_score_is_kept_and_one_without_a_score_is_not():
    score, scored = np.array([0.5, np.nextafter(0.5, 0), 0.9]), np.array([True, True, False])
    assert kept_by(score, scored, 0.5).tolist() == [True, False, False]


def test_a_cut_of_ones_own(place, tmp_path, capsys):
    listed, _ = in_one(place, tmp_path / "out", min_score=cut_of(place) / 2)
    assert listed["filter"]["min_score"] == cut_of(place) / 2
    assert "note: trained on edges that filter" in capsys.readouterr().out


def test_a_network_that_was_not_trained_on_what_the_filter_leaves_wants_a_cut(place, tmp_path):
    with pytest.raises(Refused, match="--then "):
        in_one(place, tmp_path / "out", then=str(place / "filter"))
    assert not (tmp_path / "out").exists()
    in_one(place, tmp_path / "out", then=str(place / "filter"), min_score=0.5)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"run": None}, "--then .* without --run"),
        ({"mode": "naive", "sectors": 2}, "--then .* with --mode naive"),
        ({"min_score": 1.0}, "--min-score"),
        ({"then": None, "min_score": 0.5}, "--min-score .* without --then"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, why):
    with pytest.raises(ConfigError, match=why):
        InferConfig(**{"run": "a", "then": "b", **flags})


def test_its_scores_may_filter_again(place, tmp_path):
    in_one(place, tmp_path / "scores")
    store = filtered(place, tmp_path / "left", scores=tmp_path / "scores", min_score=1e-6)
    before = EventStore(place / "left")
    assert [record.num_edges for record in store.events()] == [record.num_edges for record in before.events()]
    assert store.settings["filter"]["after"]["min_score"] == cut_of(place)
