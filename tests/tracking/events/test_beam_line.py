"""`prepare --beam-line`: events whose beam lies aside are those whose beam is at x = y = 0."""

from dataclasses import replace

import numpy as np
import pytest

from domainpar.tracking.config import ConfigError, PrepareConfig
from domainpar.tracking.events import detector, trackml
from domainpar.tracking.events.construct import Cuts
from domainpar.tracking.events.preparation import prepare
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.events.sources import DetectorConditions, Events, open_source
from domainpar.tracking.events.store import WholeEvent

ASIDE = (-1.5, 0.75)  # exact in float32, as the positions below


def hits(moved=(0.0, 0.0)):
    """An event, moved as a whole."""
    event = simulate_event(3, 900)
    position = np.round(event.position * 64) / 64 + np.array([*moved, 0.0], event.position.dtype)
    vertex = np.round(event.particles.vertex * 64) / 64 + np.array([*moved, 0.0], event.particles.vertex.dtype)
    return replace(event, position=position, particles=replace(event.particles, vertex=vertex))


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    def prepared(name, moved, beam_line):
        events = Events(("1",), lambda name: hits(moved), lambda name: [], {})
        monkeypatch.setattr(trackml, "SOURCE", replace(trackml.SOURCE, opens=lambda *_: events))
        conditions = DetectorConditions(beam_line=beam_line)
        source = open_source("trackml", directory=tmp_path, cuts=Cuts(), conditions=conditions)
        return prepare(source, tmp_path / name)

    return prepared


def test_a_beam_aside_gives_the_events_and_the_field_of_one_in_the_middle(prepared):
    middle, aside = prepared("middle", (0.0, 0.0), None), prepared("aside", ASIDE, ASIDE)
    assert aside.settings["beam_line"] == list(ASIDE)
    with middle.open(middle.records[0]) as one, aside.open(aside.records[0]) as other:
        pairs = [(WholeEvent(event).hits.position, WholeEvent(event).edges("features"), event.particles().vertex)
                 for event in (one, other)]  # fmt: skip
        layers = np.array([8]), np.array([2])
        fields = [detector.field_of(event.settings, *layers) for event in (one, other)]
    for mine, theirs in zip(*pairs):
        np.testing.assert_array_equal(mine, theirs)
    assert len(pairs[0][1]) > 100
    # The magnet does not move with the beam.
    assert (fields[1].x, fields[1].y) == (fields[0].x - ASIDE[0], fields[0].y - ASIDE[1])
    given = detector.field_of({**aside.settings, "field": fields[0].to_json()}, *layers)
    assert (given.x, given.y) == (fields[1].x, fields[1].y)


def test_without_the_flag_edges_are_others(prepared):
    middle, aside = prepared("middle", (0.0, 0.0), None), prepared("aside", ASIDE, None)
    assert "beam_line" not in aside.settings
    assert middle.records[0].sha256 != aside.records[0].sha256


@pytest.mark.parametrize("source", ["simulate", "pyg", "stores"])
def test_where_no_hits_are_read_it_means_nothing(source):
    with pytest.raises(ConfigError, match=f"--beam-line '1, 2' .*--source {source}"):
        PrepareConfig(source=source, input=None if source == "simulate" else "x", beam_line="1, 2")
