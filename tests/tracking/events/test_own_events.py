"""Sentences on the scored events that a network was trained on."""

from dataclasses import asdict, replace

import pytest
from random_events import random_assignment, random_event
from random_store import write_graph

from domainpar.runs.records import RunRecord
from domainpar.tracking.events.own_events import OwnEvents, alike_by_name, kept_place, own_events, training_overlap
from domainpar.tracking.events.store import EventStore, write_manifest


@pytest.mark.parametrize(
    ("counts", "sentences"),
    [
        ((1, 1, 0), ["the one test event was trained on"]),
        ((1, 0, 1), [
            "none of these events was trained on",
            "the one test event has the hits of an event that was trained on, and other content",
        ]),
        ((3, 1, 0), ["1 of these 3 test events was trained on"]),
        ((3, 2, 1), [
            "2 of these 3 test events were trained on",
            "1 of these 3 test events has the hits of an event that was trained on, and other content",
        ]),
    ],
)  # fmt: skip
def test_the_sentences_are_english_for_one_event_and_for_several(counts, sentences):
    counted = dict(zip(("events", "trained_on", "same_hits", "in_map"), (*counts, 0)))
    assert training_overlap({"test": counted}) == sentences
    counted |= {"in_map": 1, "same_name": 2}
    twice = "have the name and seed of events that were trained on, and other content"
    assert counts[0] < 3 or f"2 of these 3 test events {twice}" in training_overlap({"test": counted})
    whose = "the one test event" if counts[0] == 1 else "1 of these 3 test events"
    assert f"the candidate edges were learned from {whose}" in training_overlap({"test": counted})


def test_events_that_were_left_out_were_not_trained_on():
    kept = {"events": {"train": [["a", "1"], ["b", "2"], ["c", "3"]], "val": [["d", "4"]]}}
    whole = {"sample": "b", "event": "b", "why": "it has no label"}
    sector = {"sample": "c sector 1 of 4", "event": "c", "why": "its part is damaged"}
    own = own_events(RunRecord.read({"store": kept, "skipped": [whole, sector]}))
    assert (own.train, own.val) == ((("a", "1"), ("c", "3")), (("d", "4"),))
    assert own_events(RunRecord.read({"store": kept})).train == (("a", "1"), ("b", "2"), ("c", "3"))


def store_of(directory, graphs, split, settings):
    records = [write_graph(directory, graph, random_assignment(0, graph.num_nodes, 2), 2, split) for graph in graphs]
    write_manifest(directory, records, settings)
    return EventStore(directory)


def test_an_event_that_only_looks_alike_by_its_name_is_none_that_was_trained_on(tmp_path):
    first, second, third = map(random_event, range(3))
    of_first = replace(third, hits=replace(third.hits, event_id=first.hits.event_id))
    of_second = replace(second, edge_index=second.edge_index[::-1])
    trained = store_of(tmp_path / "trained", [first, second], "train", {})
    kept = {**kept_place(trained.path, tmp_path / "run"), "events": asdict(OwnEvents.of(trained))}

    def found(store):
        return alike_by_name(RunRecord.read({"store": kept}), tmp_path / "run", store, store.events())

    scored, simulated = (
        store_of(tmp_path / source, [of_first, of_second], "test", {"source": source})
        for source in ("trackml", "simulate")
    )
    assert found(trained) == {}
    assert found(scored) == found(simulated) == {"000000001": "same_hits"}
    trained.path.rename(tmp_path / "elsewhere")
    assert found(scored) == {}
    assert found(simulated) == {"000000000": "same_name", "000000001": "same_name"}
