"""Events of several stores as one source: in turn, as they were or joined anew, each with its own field."""

import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from random_events import random_event
from random_store import write_graph
from test_standard import on_ranks

from domainpar.common.problems import Problem
from domainpar.tracking.config import ConfigError, PrepareConfig
from domainpar.tracking.events import detector
from domainpar.tracking.events.beam_spot import BeamSpot
from domainpar.tracking.events.construct import Cuts
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.mixing import mixed_events
from domainpar.tracking.events.preparation import prepare
from domainpar.tracking.events.selection import Selection
from domainpar.tracking.events.sources import DetectorConditions, open_source
from domainpar.tracking.events.store import EventStore, WholeEvent, outside, write_manifest
from domainpar.tracking.reco.ckf.detector_layout import layout_of, trackml

WIDE, SHARP = Cuts(z0=200.0), Cuts(z0=30.0)


def simulated(place, events, seed, cuts=WIDE, field=None):
    source = open_source(
        "simulate", num_events=events, seed=seed, num_hits=800, cuts=cuts, conditions=DetectorConditions(field)
    )
    return prepare(source, place, val_split=0.4, test_split=0)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two stores of three and two events, in two fields."""
    place = tmp_path_factory.mktemp("mixed")
    simulated(place / "a", 3, 10)
    simulated(place / "b", 2, 10, field=Field.of(2.0))
    return place


def mixed(place, store, cuts=None, ranks=None, **selected):
    source = mixed_events([str(place / "a"), str(place / "b")], cuts, Selection(**selected))
    return prepare(source, store, ranks=ranks)


def arrays(store, name):
    with store.open(next(record for record in store.records if record.event == name)) as event:
        whole = WholeEvent(event)
        return whole.edge_index, whole.edges("features"), whole.edges("label"), whole.nodes("position")


def test_events_come_in_turn_as_they_were_in_their_splits_and_with_their_field(place, tmp_path):
    store = mixed(place, tmp_path / "store")
    a, b = EventStore(place / "a"), EventStore(place / "b")
    names = ["a.000000010", "b.000000010", "a.000000011", "b.000000011", "a.000000012"]
    assert [record.event for record in store.records] == names
    splits = {f"{name}.{record.event}": record.split for name, of in (("a", a), ("b", b)) for record in of.records}
    assert {record.event: record.split for record in store.records} == splits
    for name in names:
        origin = {"a": a, "b": b}[name[0]]
        for mine, theirs in zip(arrays(store, name), arrays(origin, name[2:])):
            np.testing.assert_array_equal(mine, theirs)
    assert "field" not in store.settings
    own = [store.own_settings(record) for record in store.records]
    simulated = {"source": "simulate"}  # which decides about field and material
    assert own == [simulated, {**simulated, "field": b.settings["field"]}] * 2 + [simulated]
    # What is trained on them knows both fields, and each store lies within.
    assert len(store.survey["fields"]) == 2
    assert not [text for text in outside(store.survey, a.survey) + outside(store.survey, b.survey) if "field" in text]
    assert outside(a.survey, store.survey)[-1].startswith("field 2 T everywhere")


def test_events_scatter_as_where_they_are_from_also_if_they_are_mixed_twice(place, tmp_path):
    source = open_source("simulate", num_events=1, seed=3, num_hits=800, cuts=WIDE)
    prepare(
        replace(source, settings={**source.settings, "source": "trackml"}), tmp_path / "real", val_split=0, test_split=0
    )
    once = prepare(mixed_events([str(place / "a"), str(tmp_path / "real")]), tmp_path / "once")
    for store in (once, prepare(mixed_events([str(tmp_path / "once")]), tmp_path / "twice")):
        for record in store.records:
            with store.open(record) as event:
                assert layout_of(event.settings) is trackml("real." in record.event)


def test_real_events_of_trackml_keep_the_field_of_the_challenge(place, tmp_path):
    source = open_source("simulate", num_events=1, seed=3, num_hits=800, cuts=WIDE)  # as if they were
    real = replace(source, settings={**source.settings, "source": "trackml"})
    prepare(real, tmp_path / "real", val_split=0, test_split=0)
    store = prepare(mixed_events([str(place / "a"), str(tmp_path / "real")]), tmp_path / "store")
    for record in store.records:
        with store.open(record) as event:
            field = detector.field_of(event.settings, np.array([8]), np.array([2]))
        is_real = record.event.startswith("real.")
        assert field is (detector.challenge_field() if is_real else detector.geometry().field)


def test_joined_anew_they_are_what_their_files_would_be_with_these_cuts(place, tmp_path):
    store = mixed(place, tmp_path / "store", SHARP)
    directly = simulated(tmp_path / "direct", 3, 10, SHARP)
    for mine, theirs in zip(arrays(store, "a.000000011"), arrays(directly, "000000011")):
        np.testing.assert_array_equal(mine, theirs)
    assert store.settings["z0"] == 30.0
    assert mixed(place, tmp_path / "wide").settings["z0"] == 200.0


def test_joined_anew_of_some_of_their_hits(place, tmp_path):
    store = mixed(place, tmp_path / "store", SHARP, volumes=(7, 8, 9), hard_cuts={"pt": [0.5, np.inf]})
    pixels = Selection(volumes=(7, 8, 9), hard_cuts={"pt": [0.5, np.inf]})
    source = open_source("simulate", num_events=3, seed=10, num_hits=800, cuts=SHARP, selection=pixels)
    directly = prepare(source, tmp_path / "direct", val_split=0.4, test_split=0)
    for mine, theirs in zip(arrays(store, "a.000000011"), arrays(directly, "000000011")):
        np.testing.assert_array_equal(mine, theirs)
    assert store.settings["volumes"] == [7, 8, 9]
    with pytest.raises(ConfigError, match="--volumes '7, 8' leaves hits out"):
        PrepareConfig(source="stores", input="a, b", volumes="7, 8")


def test_each_event_keeps_the_beam_spot_that_its_store_was_given(place, tmp_path):
    source = open_source(
        "simulate", num_events=1, seed=5, num_hits=800, conditions=DetectorConditions(beam_spot=BeamSpot(0.0, 30.0))
    )
    prepare(source, tmp_path / "c", val_split=0, test_split=0)
    store = prepare(mixed_events([str(place / "a"), str(tmp_path / "c")]), tmp_path / "store")
    own = {record.event: store.own_settings(record) for record in store.records}
    simulated = {"source": "simulate"}
    assert own["c.000000005"] == {**simulated, "beam_spot": [0.0, 30.0]}
    assert own["a.000000010"] == simulated
    again = prepare(mixed_events([str(tmp_path / "store"), str(place / "b")]), tmp_path / "again")
    of_both = {record.event: again.own_settings(record) for record in again.records}
    assert of_both["store.c.000000005"] == {**simulated, "beam_spot": [0.0, 30.0]}
    assert of_both["store.a.000000010"] == simulated
    assert of_both["b.000000010"] == {**simulated, "field": EventStore(place / "b").settings["field"]}


def test_stores_whose_events_are_not_of_one_kind_are_refused_unless_they_are_selected_alike(place, tmp_path):
    pixels = Selection(volumes=(7, 8, 9))
    source = open_source("simulate", num_events=1, seed=5, num_hits=800, cuts=WIDE, selection=pixels)
    prepare(source, tmp_path / "c", val_split=0, test_split=0)
    both = [str(place / "a"), str(tmp_path / "c")]
    for cuts in (None, SHARP):
        with pytest.raises(Problem, match=r"volumes: a without; c \[7, 8, 9\]"):
            mixed_events(both, cuts)
    store = prepare(mixed_events(both, SHARP, pixels), tmp_path / "store")
    assert store.settings["volumes"] == [7, 8, 9]


def test_a_filter_stays_with_the_edges_that_it_left_and_goes_with_them(place, tmp_path):
    for name in "ab":
        store = EventStore(place / name)
        settings = {**store.settings, "filter": {"min_score": 0.5, "parameters_sha256": "0" * 64}}
        shutil.copytree(place / name, tmp_path / name)
        write_manifest(tmp_path / name, store.records, settings)
    assert "filter" in mixed(tmp_path, tmp_path / "as they were").settings
    assert "filter" not in mixed(tmp_path, tmp_path / "anew", SHARP).settings
    with pytest.raises(Problem, match="the stores differ in filter"):
        mixed_events([str(place / "a"), str(tmp_path / "b")])


def test_the_store_is_the_same_on_any_number_of_ranks_and_is_kept_when_made_once_more(place, tmp_path):
    expected = mixed(place, tmp_path / "one")
    stores = on_ranks(3, partial(mixed, place, tmp_path / "many", None))
    assert {store.digest for store in stores} == {expected.digest}
    kept = []
    source = mixed_events([str(place / "a"), str(place / "b")])
    prepare(source, tmp_path / "one", on_event=lambda record, as_it_was: kept.append(as_it_was))
    assert kept == [True] * 5


def test_an_interrupted_preparation_goes_on_where_it_stopped(place, tmp_path):
    expected = mixed(place, tmp_path / "store").digest
    (tmp_path / "store" / "manifest.json").unlink()
    next((tmp_path / "store").glob("event*a.000000011*")).unlink()
    assert mixed(place, tmp_path / "store").digest == expected


def test_stores_of_one_name_and_features_of_files_are_refused(place, tmp_path):
    with pytest.raises(Problem, match="two have one name"):
        mixed_events([str(place / "a"), str(place / "b" / ".." / "a")])
    graph = random_event(3, 40, 100)
    write_manifest(tmp_path / "own", [write_graph(tmp_path / "own", graph, np.zeros(40, int), 1, "train")], {})
    source = mixed_events([str(tmp_path / "own")], WIDE)
    with pytest.raises(Problem, match="node_0.*own"):
        source.read(source.names[0])
