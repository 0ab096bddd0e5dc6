"""The doctor's small training: the same on parts and whole, and not over a network that spoils rows."""

import garbling
import numpy as np
import pytest
import torch

from domainpar.diagnosis.finding import Verdict, gathered
from domainpar.testing import run_ranks
from domainpar.tracking.diagnosis import toy
from domainpar.tracking.diagnosis.all_checks import check_split
from domainpar.tracking.diagnosis.toy import NUM_TILES, ring_event, tiles_for, tiles_of


@pytest.fixture
def few_tiles(monkeypatch):
    monkeypatch.setattr(toy, "NUM_TILES", 6)


def _network(world, spoilt):
    if spoilt is not None:
        world = garbling.garbled(world, spoilt, "one bit")
    return gathered([check_split(world)], world)[0]


def test_a_network_on_parts_is_the_whole_one_and_is_not_over_a_broken_network(few_tiles):
    assert run_ranks(_network, 3, None)[0].verdict is Verdict.PASS
    finding = run_ranks(_network, 3, torch.float32)[0]
    assert finding.verdict is Verdict.FAIL
    assert len(set(finding.figures["whole"])) == 1


def test_the_toy_event_is_the_same_everywhere():
    graph = ring_event(30)
    assert (graph.num_nodes, graph.num_edges) == (300, 9 * 30 * 7 + 2)
    assert graph.features[0].tolist() == [0.701171875, 0.2744140625, 0.0224609375]
    assert graph.label.sum() == 9 * 30
    tiles = tiles_of(graph, tiles_for(1))
    assert np.unique(tiles).tolist() == list(range(NUM_TILES))
    of_many = tiles_of(ring_event(100), tiles_for(100))
    assert np.unique(of_many).tolist() == list(range(100)), "a tile for every rank"
