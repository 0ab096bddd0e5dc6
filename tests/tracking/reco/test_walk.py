"""The walk: the longest paths, found without writing all of them down."""

import numpy as np
import plainly
import pytest

from domainpar.tracking.reco.tracks import TrackOptions, logit
from domainpar.tracking.reco.walk import walk


def walked(edges, scores, num_hits, low=0.1, high=0.6, min_hits=3):
    inner, outer = np.array(edges, np.int64).reshape(-1, 2).T
    logits = np.array([logit(score) for score in scores], np.float64)
    return walk(
        inner, outer, logits, num_hits, min_logit=logit(low), add_logit=logit(high), min_hits=min_hits
    ).tolist()  # fmt: skip


def test_a_road_takes_the_best_neighbour():
    #  0 -> 1 -> 2 (0.5) -> 4
    #        \-> 3 (0.4) -> 5
    edges, scores = [(0, 1), (1, 2), (1, 3), (2, 4), (3, 5)], [0.9, 0.5, 0.4, 0.9, 0.9]
    assert walked(edges, scores, 6) == [0, 0, 0, -1, 0, -1]


def test_a_road_branches_to_good_neighbours_and_the_longest_one_wins():
    #  0 -> 1 -> 2 (0.9)
    #        \-> 3 (0.7) -> 4 -> 5
    edges, scores = [(0, 1), (1, 2), (1, 3), (3, 4), (4, 5)], [0.9, 0.9, 0.7, 0.9, 0.9]
    assert walked(edges, scores, 6) == [0, 0, -1, 0, 0, 0]
    assert walked(edges, [0.9, 0.9, 0.6, 0.9, 0.9], 6) == [0, 0, 0, 1, 1, 1]  # 0.6 does not exceed 0.6


def test_of_equally_long_roads_the_one_listed_last_wins():
    # The best neighbour is listed first, then the others in the order of their edges.
    edges, scores = [(0, 1), (1, 2), (1, 3), (1, 4)], [0.9, 0.7, 0.8, 0.9]
    assert walked(edges, scores, 5) == [0, 0, -1, 0, -1]


def test_a_road_ends_where_the_best_neighbour_is_not_good_enough():
    assert walked([(0, 1), (1, 2), (2, 3)], [0.9, 0.9, 0.1], 4) == [0, 0, 0, -1]
    assert walked([(0, 1), (1, 2), (2, 3)], [0.9, 0.9, 0.11], 4) == [0, 0, 0, 0]


def test_short_roads_take_their_hits_but_are_no_tracks():
    # 1 comes first and takes 3 with it; 0, 2 are then too short.
    edges, scores = [(0, 3), (1, 4), (2, 4), (4, 5)], [0.9, 0.9, 0.9, 0.05]
    assert walked(edges, scores, 6) == [-1] * 6
    assert walked(edges, scores, 6, min_hits=2) == [0, 1, -1, 0, 1, -1]


def test_a_taken_hit_shortens_the_roads_that_led_to_it():
    # Both 0 and 1 lead to 2; once 0 has it, the longest path from 1 is the other one.
    edges, scores = [(0, 2), (1, 2), (1, 3), (2, 4), (4, 5), (3, 6)], [0.9, 0.9, 0.8, 0.9, 0.9, 0.9]
    assert walked(edges, scores, 7) == [0, 1, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("seed", range(60))
def test_roads_are_those_of_the_definition(seed):
    rng = np.random.default_rng(seed)
    num_hits = int(rng.integers(1, 14))
    pairs = [(a, b) for a in range(num_hits) for b in range(a + 1, num_hits)]
    chosen = [pairs[i] for i in rng.permutation(len(pairs))[: int(rng.integers(0, 3 * num_hits))]]
    logits = np.round(rng.normal(0.3, 1.5, len(chosen)), int(rng.integers(0, 3)))  # ties
    low, high, least = rng.choice([0.0, 0.1, 0.5]), rng.choice([0.4, 0.6, 0.9]), int(rng.integers(1, 5))
    segments = {ends: (value, place) for place, (ends, value) in enumerate(zip(chosen, logits.tolist()))}
    expected = plainly.paths(range(num_hits), segments, low, high, least)
    inner, outer = np.array(chosen, np.int64).reshape(-1, 2).T
    found = walk(inner, outer, logits, num_hits, min_logit=logit(low), add_logit=logit(high), min_hits=least)
    numbers = [-1] * num_hits
    for number, track in enumerate(expected):
        for hit in track:
            numbers[hit] = number
    assert found.tolist() == numbers


def test_a_ladder_of_more_roads_than_can_be_walked_is_walked():
    # 30 layers of 5 hits, every hit joined to every one of the next layer: 5^30 paths, which would never end.
    layers, width = 30, 5
    edges = [
        (layer * width + a, (layer + 1) * width + b)
        for layer in range(layers - 1)
        for a in range(width)
        for b in range(width)
    ]
    found = np.array(walked(edges, [0.9] * len(edges), layers * width))
    assert np.bincount(found).tolist() == [layers] * width


def test_no_hits_and_no_segments():
    assert walked([], [], 0) == []
    assert walked([], [], 3) == [-1, -1, -1]
    assert walked([], [], 3, min_hits=1) == [0, 1, 2]


def test_scores_are_compared_as_logits():
    assert logit(0) == -np.inf
    assert logit(0.5) == 0
    assert logit(0.01) == pytest.approx(np.log(0.01 / 0.99), rel=1e-15)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"method": "kalman"}, "track method is 'kalman'; known: greedy, cc, walk, junction"),
        ({"min_hits": 0}, "min_hits is 0"),
        ({"score_cut": 1.0}, "score_cut is 1.0; a score is compared with a number from 0 to below 1"),
        ({"walk_min": -0.1}, "walk_min is -0.1"),
    ],
)
def test_impossible_options_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        TrackOptions(**wrong)


def test_options_tell_what_their_method_looks_at():
    assert TrackOptions(method="cc").to_json() == {
        "method": "cc",
        "score_cut": 0.5,
        "min_hits": 3,
        "refine": False,
        "stitch": True,
        "extend": False,
        "min_quality": 0.0,
    }
    assert TrackOptions(method="walk").to_json()["score_cut"] == 0.01
    assert set(TrackOptions(method="junction").to_json()) >= {"chain_cut", "double_hits"}
