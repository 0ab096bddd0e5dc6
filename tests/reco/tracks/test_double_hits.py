"""A second hit on a surface goes to the track that has the first."""

from dataclasses import replace

import numpy as np
import pytest
from test_tracks_on_ranks import build, sparse_event, stored

from domainpar.reco.tracks import TrackOptions

#  hit      0 ---- 1 ---- 2 ---- 3      one particle: its hits on surfaces 2, 4, 6, 8
#            \     4 ---/               4: another hit of surface 4, further from the road
#             \---/
#           5                            a hit of surface 2, joined to 1
CHAIN = [(0, 1), (1, 2), (2, 3)]
LAYERS = [2, 4, 6, 8, 4, 2]


def drawn(edges, layers=LAYERS):
    num_hits = len(layers)
    graph = sparse_event(0, num_hits, len(edges))
    radius = np.array([10.0 * layer + 0.1 * hit for hit, layer in enumerate(layers)])
    position = np.stack([radius, np.zeros(num_hits), np.zeros(num_hits)], axis=1).astype(np.float32)
    hits = replace(graph.hits, position=position, layer=np.array(layers, np.int32))
    return replace(graph, hits=hits, edge_index=np.array(edges).T, label=np.zeros(len(edges), np.uint8))


def tracks(tmp_path, edges, scores, num_ranks=1, layers=LAYERS, **options):
    graph = drawn(edges, layers)
    logits = np.log(np.array(scores) / (1 - np.array(scores))).astype(np.float32)
    with stored(tmp_path, graph, tiles=3) as event:
        return build(event, logits, TrackOptions(**{"method": "walk", **options}), num_ranks, "random")


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_double_hit_joins_the_track_that_has_the_other_one(tmp_path, num_ranks):
    edges, scores = [*CHAIN, (0, 4)], [0.9, 0.9, 0.9, 0.8]
    assert tracks(tmp_path, edges, scores, num_ranks) == [0, 0, 0, 0, 0, -1]
    assert tracks(tmp_path, edges, scores, num_ranks, double_hits=False) == [0, 0, 0, 0, -1, -1]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_also_on_the_first_surface_of_a_track(tmp_path, num_ranks):
    assert tracks(tmp_path, [*CHAIN, (5, 1)], [0.9, 0.9, 0.9, 0.8], num_ranks) == [0, 0, 0, 0, -1, 0]


def test_not_if_its_segment_is_weak(tmp_path):
    assert tracks(tmp_path, [*CHAIN, (0, 4)], [0.9, 0.9, 0.9, 0.5]) == [0, 0, 0, 0, -1, -1]
    assert tracks(tmp_path, [*CHAIN, (0, 4)], [0.9, 0.9, 0.9, 0.5], double_cut=0.4) == [0, 0, 0, 0, 0, -1]


def test_not_if_the_track_has_no_hit_of_its_surface_next_to_the_same_hit(tmp_path):
    layers = [2, 4, 6, 8, 12, 2]
    assert tracks(tmp_path, [*CHAIN, (0, 4)], [0.9, 0.9, 0.9, 0.8], layers=layers) == [0, 0, 0, 0, -1, -1]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_of_two_tracks_the_one_with_more_segments_to_it_has_it(tmp_path, num_ranks):
    # Tracks 0-1-2-3 and 5-6-7-8; hit 4 has one segment to the first, two to the second.
    layers = [2, 4, 6, 8, 4, 2, 4, 6, 8]
    edges = [*CHAIN, (5, 6), (6, 7), (7, 8), (0, 4), (5, 4), (4, 7)]
    scores = [0.9] * 6 + [0.59, 0.58, 0.57]
    found = tracks(tmp_path, edges, scores, num_ranks, layers=layers)
    assert found == [0, 0, 0, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_nothing_is_given_where_no_hit_has_a_layer(tmp_path, num_ranks):
    graph = drawn([*CHAIN, (0, 4)])
    nowhere = np.zeros(len(LAYERS), np.int32)
    graph = replace(graph, hits=replace(graph.hits, volume=nowhere, layer=nowhere))
    logits = np.array([2.0, 2.0, 2.0, 1.4], np.float32)
    with stored(tmp_path, graph, tiles=3) as event:
        assert build(event, logits, TrackOptions(method="walk"), num_ranks, "random") == [0, 0, 0, 0, -1, -1]
