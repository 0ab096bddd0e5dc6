"""Clusters count as gnn_tracking says, and the TrackML score is that of the challenge."""

from dataclasses import replace

import numpy as np
import pytest
from drawn_tracks import NAN, drawn, plain_majority, plain_score, random_case, table

from domainpar.common.models import plain
from domainpar.tracking.reco.performance.counts import count_tracks
from domainpar.tracking.reco.performance.rates import METRICS

# Of `a`, 10 hits unless said otherwise: (clusters, perfect, double_majority, lhc)
DRAWN = {
    ("aaaaaaaaaa", "0000000000"): (1, 1, 1, 1),
    ("aaaaaaaaaa", "000000...."): (1, 0, 1, 1),
    ("aaaaaaaaaa", "00000....."): (1, 0, 0, 1),  # half of the particle is not more than half
    ("aaaaaaaaaa.", "00000000000"): (1, 0, 1, 1),  # 91 % pure
    ("aaaaaaaaaa...", "0000000000000"): (1, 0, 1, 1),  # 77 % pure
    ("a" * 99 + ".", "0" * 100): (1, 0, 1, 1),  # 99 % is not more than 99 %
    ("a" * 100 + ".", "0" * 101): (1, 1, 1, 1),
    ("aaa.", "0000"): (1, 0, 1, 0),  # 75 % is not more than 75 %
    ("aaa...", "000000"): (0, 0, 0, 0),  # noise is as much: the majority is noise
    ("aaaaaaaaaa", "0000000011"): (1, 0, 1, 1),  # a cluster of two hits does not count
    ("aaabbb", "000000"): (1, 0, 0, 0),  # of two equals the first, with half of the cluster
    ("aa", "00"): (0, 0, 0, 0),
    ("", ""): (0, 0, 0, 0),
    (".....", "00000"): (0, 0, 0, 0),
}


@pytest.mark.parametrize(("event", "expected"), DRAWN.items())
def test_drawn_clusters_are_counted_as_by_hand(event, expected):
    counts = count_tracks(*drawn(*event)).majority
    assert (counts.clusters, counts.perfect, counts.double_majority, counts.lhc) == expected


def test_particles_of_interest_have_three_surfaces_little_eta_and_enough_pt():
    track_id, truth = drawn("aaaabbbbccccddddeeee", "0000111122223333....")
    surface = np.tile([1, 1, 2, 2], 5)  # two surfaces only
    assert count_tracks(track_id, replace(truth, surface=surface)).majority.particles == 0
    particles = table([1, 2, 3, 4, 5], [4] * 5, pt=[1.0, 0.99, 2.0, NAN, 2.0], eta=[3.9, 0.0, -4.0, 0.0, 0.0])
    counts = count_tracks(track_id, replace(truth, particles=particles)).majority
    assert plain(counts) == {"clusters": 1, "particles": 2, "perfect": 1, "double_majority": 1, "lhc": 1}


def test_particles_divide_perfect_and_double_majority_and_clusters_divide_lhc():
    counts, nothing = count_tracks(*drawn("aaaabbbbccccdddd", "000011122222....")), count_tracks(*drawn("", ""))
    # 0 is perfect, 1 has three quarters of b, 2 has four c and one b; d is not found
    for name, expected in {"perfect": 1 / 4, "double_majority": 3 / 4, "lhc": 3 / 3}.items():
        assert METRICS[name].value(counts, "atlas") == expected
        assert METRICS[name].value(nothing, "atlas") is None


@pytest.mark.parametrize("seed", range(150))
def test_majorities_and_scores_agree_with_the_definitions_written_plainly(seed):
    track_id, truth, cuts = random_case(seed)
    counts = count_tracks(track_id, truth, cuts)
    assert plain(counts.majority) == plain_majority(track_id, truth, cuts)
    assert counts.trackml_score == (pytest.approx(plain_score(track_id, truth)),)
    assert counts.weights == ("one per labelled hit" if truth.weight is None else "truth")


def test_the_score_is_the_weight_of_the_majority_hits_of_good_tracks():
    weight = np.array([4, 4, 4, 1, 1, 1, 2, 3, 0, 0], np.float32)
    track_id, truth = drawn("aaabbbcc..", "000011.2.2", weight=weight)
    # 0 has all of a and one b: 12 of a count. 1 has two of three b: they count. 2 has half of c.
    assert count_tracks(track_id, truth).trackml_score == ((12 + 2) / 20,)


def test_without_weights_every_labelled_hit_weighs_one_and_without_labels_there_is_no_score():
    counts = count_tracks(*drawn("aaabbb....", "000011.222"))
    assert (counts.trackml_score, counts.weights) == ((5 / 6,), "one per labelled hit")
    assert count_tracks(*drawn("...", "000")).trackml_score == (None,)
    assert count_tracks(*drawn("", "")).trackml_score == (None,)
