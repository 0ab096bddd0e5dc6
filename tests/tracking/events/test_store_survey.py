"""What events have in common, and in what others lie outside of it."""

from dataclasses import replace

import numpy as np
import pytest
from random_events import random_assignment, random_event
from random_store import edit_manifest, write_graph
from test_standard import on_ranks, prepared, source_of

from domainpar.tracking.events.beam_spot import BeamSpot
from domainpar.tracking.events.construct import Cuts
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.preparation import prepare
from domainpar.tracking.events.sources import DetectorConditions, open_source
from domainpar.tracking.events.store import EventStore, outside, write_manifest

TRAINED = {
    "events": 4, "hits": [90_000, 110_000], "edges": [180_000, 330_000], "edges_per_hit": [2.0, 3.0],
    "beam_spot": [[-1.0, 1.0], [5.0, 6.0]], "layers": {"7.2": 900, "8.2": 100},
    "fields": [["2 T everywhere", [2.0, 2.0]]], "features": {"r": [[0.1, 0.1], [0.5, 0.6], [1.0, 1.1]], "dz": None},
}  # fmt: skip


@pytest.mark.parametrize(
    ("here", "told"),
    [
        ({}, []),
        ({"beam_spot": None}, []),
        ({"beam_spot": [[0.0, 0.0], [2.0, 14.0]]}, []),
        ({"beam_spot": [[0.0, 0.0], [2.0, 20.0]]}, ["beam spot 2 to 20 mm wide at z 0 mm (5 to 6 at -1 to 1)"]),
        ({"beam_spot": [[-40.0, 0.0], [5.0, 5.0]]}, ["beam spot 5 mm wide at z -40 to 0 mm (5 to 6 at -1 to 1)"]),
        ({"fields": [["1.95 T everywhere", [1.95, 1.95]]]}, []),
        ({"fields": [["a table", [2.0, 1.7]]]}, ["field a table (2 T everywhere)"]),
        ({"fields": [["2 T", [2.0, 2.0]], ["a table", [2.0, 1.7]]]}, ["field a table (2 T everywhere)"]),
        ({"fields": [["a table", []]]}, []),
        ({"hits": [46_000, 219_000]}, []),
        ({"hits": [44_000, 44_000]}, ["44,000 hits per event (90,000 to 110,000)"]),
        ({"edges_per_hit": [2.0, 6.1]}, ["2 to 6.1 candidate edges per hit (2 to 3)"]),
        ({"layers": {"7.2": 900}}, ["10% of the training's hits lie on layers that have none here"]),
        ({"layers": {"7.2": 90, "8.2": 5, "9.2": 5}}, ["5% of the hits lie on layers that had none in the training"]),
        ({"layers": {"7.2": 990, "8.2": 1, "9.2": 1}}, []),
        ({"features": {"r": [[0.0, 0.1], [0.4, 0.7], [0.9, 1.2]]}}, []),
        ({"features": {"r": [[0.1, 0.1], [0.1, 0.6], [1.0, 1.1]]}}, ["feature r 0.1 to 1.1 in 90 % (0.1 to 1.1)"]),
    ],
)  # fmt: skip
def test_what_lies_outside_is_told_with_both_figures_and_nothing_else(here, told):
    assert outside(TRAINED, TRAINED | here) == told
    assert outside(None, TRAINED | here) == outside({}, TRAINED | here) == outside(TRAINED, {}) == []


def test_a_field_is_within_if_it_is_one_of_those_of_the_training():
    table, other = ["a table", [2.0, 1.7]], ["another", [2.0, 1.0]]
    both = TRAINED | {"fields": [*TRAINED["fields"], table]}
    assert outside(both, TRAINED) == outside(both, TRAINED | {"fields": [table]}) == outside(both, both) == []
    assert outside(both, TRAINED | {"fields": [other]}) == ["field another (2 T everywhere or a table)"]
    assert outside(TRAINED | {"fields": []}, TRAINED) == []


def test_of_small_events_no_more_is_said_than_chance_allows():
    wide = TRAINED | {"beam_spot": [[0.0, 0.0], [2.0, 20.0]], "hits": [80_000, 90_000]}
    assert outside(TRAINED, wide)
    for hits in (2_000, 500):
        small = {"hits": [hits, hits], "features": {"r": [[1.0, 1.0]] * 3}}  # a feature may be the same everywhere
        with np.errstate(all="raise"):
            assert outside(TRAINED | small, wide | small) == []


def simulated(place, seed, **conditions):
    source = open_source(
        "simulate",
        num_events=1,
        seed=seed,
        num_hits=6_000,
        cuts=Cuts(z0=200.0),
        conditions=DetectorConditions(**conditions),
    )
    return prepare(source, place / f"{seed}{len(conditions)}", val_split=0, test_split=0).survey


def test_events_made_alike_lie_within_and_others_do_not(tmp_path):
    trained, alike = simulated(tmp_path, 1), simulated(tmp_path, 2)
    assert outside(trained, alike) == outside(alike, trained) == []
    beside = simulated(tmp_path, 3, field=Field.of(2.0), beam_spot=BeamSpot(0.0, 55.0))
    assert [text.split()[0] for text in outside(trained, beside)][:2] == ["beam", "field"]
    assert "2 T everywhere (B_z 0.18 to 2.005 T, by z)" in outside(trained, beside)[1]


def test_it_is_the_same_on_any_number_of_ranks_and_from_a_manifest_written_by_hand(tmp_path):
    source = source_of(5)
    expected = prepared(source, tmp_path / "one").survey
    stores = on_ranks(3, lambda ranks: prepared(source, tmp_path / "many", ranks=ranks))
    assert [store.survey for store in stores] == [expected] * 3
    assert expected["events"] >= 3
    records = EventStore(tmp_path / "one").records
    write_manifest(tmp_path / "one", records, {})
    by_hand = EventStore(tmp_path / "one").survey
    assert by_hand["features"] == expected["features"]
    assert by_hand["features"]
    edit_manifest(tmp_path / "one", lambda manifest: manifest.pop("survey"))
    assert EventStore(tmp_path / "one").survey == {}  # of before this was kept


def test_it_counts_each_event_by_its_least_and_most_and_all_hits_of_a_layer(tmp_path):
    graphs = [*(random_event(seed, 40 + 20 * seed, 100) for seed in range(3)), random_event(3, 0, 0)]
    records = [write_graph(tmp_path, graph, random_assignment(1, graph.num_nodes, 3), 3, "train") for graph in graphs]
    write_manifest(tmp_path, [replace(record, beam_spot=(1.0, 2.0 + i)) for i, record in enumerate(records)], {})
    survey = EventStore(tmp_path).survey
    assert (survey["hits"], survey["edges"], survey["edges_per_hit"]) == ([40, 80], [100, 100], [100 / 80, 100 / 40])
    assert survey["beam_spot"] == [[1.0, 1.0], [2.0, 5.0]]
    assert sum(survey["layers"].values()) == 40 + 60 + 80
    write_manifest(tmp_path, records, {"beam_spot": [0.0, 55.0]})
    assert EventStore(tmp_path).survey["beam_spot"] == [[0.0, 0.0], [55.0, 55.0]]
