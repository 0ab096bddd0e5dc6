"""Sentences on the scored events that a network was trained on."""

import pytest

from domainpar.runs.records import RunRecord
from domainpar.tracking.events.own_events import own_events, told_of


@pytest.mark.parametrize(
    ("counts", "sentences"),
    [
        ((1, 1, 0), ["the one test event was trained on"]),
        ((1, 0, 1), [
            "none of these events was trained on",
            "the one test event has the name of an event that was trained on, and other content",
        ]),
        ((3, 1, 0), ["1 of these 3 test events was trained on"]),
        ((3, 2, 1), [
            "2 of these 3 test events were trained on",
            "1 of these 3 test events has the name of an event that was trained on, and other content",
        ]),
    ],
)  # fmt: skip
def test_the_sentences_are_english_for_one_event_and_for_several(counts, sentences):
    counted = dict(zip(("events", "trained_on", "same_name", "in_map"), (*counts, 0)))
    assert told_of({"test": counted}) == sentences
    counted["in_map"] = 1
    whose = "the one test event" if counts[0] == 1 else "1 of these 3 test events"
    assert f"the module map was learned from {whose}" in told_of({"test": counted})


def test_events_that_were_left_out_were_not_trained_on():
    kept = {"events": {"train": [["a", "1"], ["b", "2"], ["c", "3"]], "val": [["d", "4"]]}}
    whole = {"sample": "b", "event": "b", "why": "it has no label"}
    sector = {"sample": "c sector 1 of 4", "event": "c", "why": "its part is damaged"}
    own = own_events(RunRecord.read({"store": kept, "skipped": [whole, sector]}))
    assert (own.train, own.val) == ((("a", "1"), ("c", "3")), (("d", "4"),))
    assert own_events(RunRecord.read({"store": kept})).train == (("a", "1"), ("b", "2"), ("c", "3"))
