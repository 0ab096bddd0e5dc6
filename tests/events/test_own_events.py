"""Sentences on the scored events that a network was trained on."""

import pytest

from domainpar.events.own_events import told_of


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
    assert told_of({"test": dict(zip(("events", "trained_on", "same_name"), counts))}) == sentences
