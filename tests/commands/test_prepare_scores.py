"""`python -m domainpar.prepare --source scores`: events with those edges only that a network scored high enough."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from random_events import random_event
from test_infer import inferred, trained, write_store

from domainpar import read_scores
from domainpar.common.agreement import Refused
from domainpar.parallel.world import World
from domainpar.prepare import prepare_store
from domainpar.testing import run_ranks
from domainpar.tracking.config import ConfigError, PrepareConfig
from domainpar.tracking.events.store import EventStore, WholeEvent
from domainpar.tracking.reco.facts import described, facts_of

SPLITS = ("train", "train", "val", "test")


def drawn_events():
    return [random_event(seed, 100 + 10 * seed, 500 + 37 * seed, labels=seed < 3) for seed in range(4)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A store of four events, the last without truth, a run trained on it, and its scores."""
    place = tmp_path_factory.mktemp("scores")
    trained(write_store(place / "store", drawn_events(), SPLITS), place / "run")
    inferred(place, place / "scores", split="all")
    return place


def filtered(place, store, scores="scores", num_ranks=1, **flags):
    config = PrepareConfig(**{"min_score": 0.5, **flags}, source="scores", input=str(place / scores), store=str(store))
    run_ranks(lambda world: prepare_store(config, world), num_ranks)
    return EventStore(store)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_scored_enough_stays_as_it_was(place, tmp_path, num_ranks):
    before, after = EventStore(place / "store"), filtered(place, tmp_path / "store", num_ranks=num_ranks)
    assert [(record.event, record.split) for record in after.events()] == [
        (record.event, record.split) for record in before.events()
    ]
    for old, new in zip(before.events(), after.events()):
        scores = read_scores(place / "scores", old.event)
        kept = scores.edge_score >= 0.5
        assert 0 < kept.sum() < len(kept)
        with before.open(old) as one, after.open(new) as other:
            whole, left = WholeEvent(one), WholeEvent(other)
            assert np.array_equal(left.edge_index, whole.edge_index[:, kept])
            for name in ("features", "label"):
                values = whole.edges(name)
                assert (left.edges(name) is None) == (values is None)
                assert values is None or np.array_equal(left.edges(name), values[kept])
            for name in ("hit_id", "features", "position", "particle_id", "weight", "volume"):
                np.testing.assert_array_equal(left.nodes(name), whole.nodes(name))
            assert (one.feature_names, one.edge_feature_names) == (other.feature_names, other.edge_feature_names)
    assert after.settings["filter"] == {
        "min_score": 0.5,
        "parameters_sha256": json.loads((place / "scores" / "scores.json").read_text())["parameters_sha256"],
    }


def test_an_event_has_the_same_bytes_whatever_its_store_is_split_into(place, tmp_path):
    first = filtered(place, tmp_path / "first")
    store = write_store(tmp_path / "store", drawn_events(), ("train", "val", "val", "test"))
    inferred(place, tmp_path / "scores", split="all", store=str(store))
    second = filtered(place, tmp_path / "second", scores=tmp_path / "scores")
    assert first.digest != second.digest
    assert [record.sha256 for record in first.records] == [record.sha256 for record in second.records]


def test_edges_between_sectors_have_no_score_and_go(place, tmp_path):
    inferred(place, tmp_path / "naive", split="all", mode="naive", sectors=3)
    store = filtered(place, tmp_path / "store", scores=tmp_path / "naive", min_score=1e-6)
    for record in store.events():
        scored = read_scores(tmp_path / "naive", record.event).edge_scored
        assert 0 < record.num_edges == scored.sum() < len(scored)
    assert store.settings["filter"]["sectors"] == 3


def test_a_store_made_once_more_is_kept_and_another_cut_is_another_store(place, tmp_path):
    first = filtered(place, tmp_path / "store")
    assert filtered(place, tmp_path / "store").digest == first.digest
    with pytest.raises(Refused, match="other settings: filter"):
        filtered(place, tmp_path / "store", min_score=0.4)


def test_the_first_events_alone(place, tmp_path):
    assert len(filtered(place, tmp_path / "store", events=2)) == 2


def test_what_is_not_there_is_refused(place, tmp_path):
    with pytest.raises(Refused, match="no scores.json"):
        filtered(place, tmp_path / "store", scores="store")
    for name in ("scores", "store"):
        shutil.copytree(place / name, tmp_path / "moved" / name)
    listed = json.loads((tmp_path / "moved" / "scores" / "scores.json").read_text())
    listed["store"]["absolute"] = "/nowhere"
    (tmp_path / "moved" / "scores" / "scores.json").write_text(json.dumps(listed))
    assert len(filtered(tmp_path / "moved", tmp_path / "again")) == 4
    shutil.rmtree(tmp_path / "moved" / "store")
    with pytest.raises(Refused, match="store .*scores is not found"):
        filtered(tmp_path / "moved", tmp_path / "third")
    events = [random_event(seed + 7, 100, 500) for seed in range(4)]
    write_store(tmp_path / "moved" / "store", events, SPLITS)
    with pytest.raises(Refused, match="the event as it was scored"):
        filtered(tmp_path / "moved", tmp_path / "third")


@pytest.mark.parametrize("min_score", [0.0, 1.0, -0.5, float("nan")])
def test_a_cut_that_keeps_all_or_none_is_refused(min_score):
    with pytest.raises(ConfigError, match="--min-score"):
        PrepareConfig(source="scores", input="run", min_score=min_score)


def test_a_cut_of_other_sources_means_nothing(place):
    with pytest.raises(ConfigError, match="--min-score .*with --source simulate"):
        PrepareConfig(min_score=0.3)


def test_segments_that_the_filter_left_out_are_counted_also_where_events_are_kept(place, tmp_path):
    before, config = EventStore(place / "store"), PrepareConfig(
        source="scores", input=str(place / "scores"), min_score=0.9, store=str(tmp_path / "store"), least_segments=0
    )  # fmt: skip
    runs = [[], []]
    for facts in runs:  # made, then kept as they are
        prepare_store(config, World.alone(), facts)
    assert runs[0] == runs[1]
    for record, seen in zip(before.events(), runs[0]):
        with before.open(record) as event:
            whole = WholeEvent(event)
            assert seen.unfiltered == facts_of(whole.hits, whole.edge_index, None).in_graph
        assert seen.unfiltered is None or seen.in_graph <= seen.unfiltered
    assert any(seen.in_graph < seen.unfiltered for seen in runs[0])
    assert any("WARNING: the filter lost" in line for line in described(runs[0], {}))


def test_the_store_says_what_was_left_out(place, tmp_path, capsys):
    from domainpar.prepare import main

    flags = ["--source", "scores", "--input", str(place / "scores"), "--least-segments", "0"]  # edges are drawn
    assert main([*flags, "--store", str(tmp_path / "store")]) == 0
    assert "filter: edges to which the network with parameters" in capsys.readouterr().out
