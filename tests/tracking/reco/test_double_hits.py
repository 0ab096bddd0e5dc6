"""A second hit on a surface goes to the track that has the first."""

import numpy as np
import pytest

from domainpar.tracking.reco.segments import TrackHits
from domainpar.tracking.reco.tracks import TrackOptions, build_tracks

#  hit      0 ---- 1 ---- 2 ---- 3      one particle: its hits on surfaces 2, 4, 6, 8
#            \     4 ---/               4: another hit of surface 4, further from the path
#             \---/
#           5                            a hit of surface 2, joined to 1
CHAIN = [(0, 1), (1, 2), (2, 3)]
LAYERS = [2, 4, 6, 8, 4, 2]


def tracks(edges, scores, layers=LAYERS, known=True, **options):
    """Tracks of hits along a line, in the order of their layers; without `known` no hit has a layer."""
    radius = np.array([10.0 * layer + 0.1 * hit for hit, layer in enumerate(layers)])
    position = np.stack([radius, np.zeros(len(layers)), np.zeros(len(layers))], axis=1).astype(np.float32)
    logits = np.log(np.array(scores) / (1 - np.array(scores))).astype(np.float32)
    chosen = TrackOptions(**{"method": "walk", **options})
    hits = TrackHits(position, np.array(layers) * known, np.zeros(len(layers), np.int64))
    return build_tracks(np.array(edges).T, logits, hits, chosen).tolist()


def test_a_double_hit_joins_the_track_that_has_the_other_one():
    edges, scores = [*CHAIN, (0, 4)], [0.9, 0.9, 0.9, 0.8]
    assert tracks(edges, scores) == [0, 0, 0, 0, 0, -1]
    assert tracks(edges, scores, double_hits=False) == [0, 0, 0, 0, -1, -1]


def test_also_on_the_first_surface_of_a_track():
    assert tracks([*CHAIN, (5, 1)], [0.9, 0.9, 0.9, 0.8]) == [0, 0, 0, 0, -1, 0]


def test_not_if_its_segment_is_weak():
    assert tracks([*CHAIN, (0, 4)], [0.9, 0.9, 0.9, 0.5]) == [0, 0, 0, 0, -1, -1]
    assert tracks([*CHAIN, (0, 4)], [0.9, 0.9, 0.9, 0.5], double_cut=0.4) == [0, 0, 0, 0, 0, -1]


def test_not_if_the_track_has_no_hit_of_its_surface_next_to_the_same_hit():
    layers = [2, 4, 6, 8, 12, 2]
    assert tracks([*CHAIN, (0, 4)], [0.9, 0.9, 0.9, 0.8], layers) == [0, 0, 0, 0, -1, -1]


@pytest.mark.parametrize(
    ("scores", "track"), [([0.59, 0.58, 0.57], 1), ([0.59, 0.58, 0.01], 0), ([0.58, 0.58, 0.01], 0)]
)
def test_of_two_tracks_the_one_with_more_segments_to_it_has_it_then_with_the_best_then_the_first(scores, track):
    # Tracks 0-1-2-3 and 5-6-7-8; hit 4 has one segment to the first, two to the second or as good as one.
    layers = [2, 4, 6, 8, 4, 2, 4, 6, 8]
    edges = [*CHAIN, (5, 6), (6, 7), (7, 8), (0, 4), (5, 4), (4, 7)]
    assert tracks(edges, [0.9] * 6 + scores, layers) == [0, 0, 0, 0, track, 1, 1, 1, 1]


def test_nothing_is_given_where_no_hit_has_a_layer():
    assert tracks([*CHAIN, (0, 4)], [0.9, 0.9, 0.9, 0.8], known=False) == [0, 0, 0, 0, -1, -1]
