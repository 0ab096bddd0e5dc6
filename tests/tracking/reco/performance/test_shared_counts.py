"""A hit on several tracks counts on each of them, once for its particle, and once in the TrackML score."""

from dataclasses import replace

import numpy as np
import pytest
from drawn_tracks import drawn, plain_majority, plain_score, plain_styles, random_case

from domainpar.common.models import plain
from domainpar.tracking.reco.performance.counts import EDGES, count_tracks
from domainpar.tracking.reco.performance.matching import TrackCuts, find_overlaps

CUTS = TrackCuts(target={}, min_hits=4)


def random_shared(seed, track_id):
    """Further tracks of some hits that lie on one: (hit, track) ascending, int64 [S, 2]."""
    rng = np.random.default_rng(seed)
    pairs = np.argwhere(rng.random((len(track_id), track_id.max(initial=-1) + 1)) < 0.2)
    return pairs[(track_id[pairs[:, 0]] >= 0) & (track_id[pairs[:, 0]] != pairs[:, 1])]


def test_a_shared_hit_is_counted_on_each_of_its_tracks():
    # Track 1 has three b, and takes two of a's hits; all five of a's are on 0.
    track_id, truth = drawn("aaaaabbb.", "00000111.")
    shared = np.array([[3, 1], [4, 1]])
    overlaps = find_overlaps(track_id, truth.particle_id, shared)
    assert overlaps.track_hits.tolist() == [5, 5]
    assert overlaps.particle_hits.tolist() == [5, 3]
    pairs = zip(overlaps.track.tolist(), overlaps.particle.tolist(), overlaps.shared.tolist())
    assert list(pairs) == [(0, 0, 5), (1, 0, 2), (1, 1, 3)]
    counts = count_tracks(track_id, truth, CUTS, shared)
    assert (counts.tracks, counts.hits_on_tracks, counts.shared) == (2, 8, 2)
    # Without them track 1 is too short to count.
    assert (counts.styles["atlas"].matchable, counts.styles["atlas"].reconstructed) == (2, 2)
    alone = count_tracks(track_id, truth, CUTS)
    assert (alone.styles["atlas"].matchable, alone.styles["atlas"].reconstructed, alone.shared) == (1, 1, 0)
    assert (counts.majority.lhc, alone.majority.lhc) == (1, 2)  # three of five are not more than 75 %


def test_a_hit_that_a_track_lacked_makes_it_perfect_and_leaves_the_trackml_score_as_it_was():
    # b's fourth hit lies on the track of a as well, and first.
    track_id, truth = drawn("aaaabbbb", "00001110")
    counts = [count_tracks(track_id, truth, CUTS, shared) for shared in (None, np.array([[7, 1]]))]
    assert [of.majority.perfect for of in counts] == [0, 1]
    assert [of.styles["one_way"].reconstructed for of in counts] == [1, 2]
    assert counts[0].trackml_score == counts[1].trackml_score == (7 / 8,)


def test_counts_of_shared_hits_add_up():
    track_id, truth = drawn("aaaaabbb.", "00000111.")
    one = count_tracks(track_id, truth, CUTS, np.array([[3, 1], [4, 1]]))
    assert (one + count_tracks(track_id, truth, CUTS) + one).shared == 4


@pytest.mark.parametrize("seed", range(60))
def test_counts_of_shared_hits_agree_with_the_definitions_written_plainly(seed):
    track_id, truth, cuts = random_case(seed)
    shared = random_shared(seed, track_id)
    counts = count_tracks(track_id, truth, cuts, shared)
    styles = {style: plain(of_style) for style, of_style in counts.styles.items()}
    assert styles == plain_styles(track_id, truth, cuts, shared)
    assert plain(counts.majority) == plain_majority(track_id, truth, cuts, shared)
    assert counts.trackml_score == (pytest.approx(plain_score(track_id, truth)),)
    assert counts.shared == len(shared)


def test_tracks_are_binned_with_their_shared_hits():
    # Four hits of each, on two circles; the common one is the nearest to a border, and lies where others are.
    track_id, truth = drawn("aaaabbbb", "00001111")
    radius, side = np.tile([30.0, 60.0, 90.0, 120.0], 2), np.repeat([1.0, -1.0], 4)
    phi = side * (0.4 - 0.001 * radius)
    position = np.stack([radius * np.cos(phi), radius * np.sin(phi), 0.5 * radius], axis=1)
    border = np.array([0.3, 0.3, 0.3, 0.004, 0.3, 0.3, 0.3, 0.3], np.float32)
    truth = replace(truth, position=position.astype(np.float32), border=border, border_sectors=4)
    shared = np.array([[3, 1]])
    bins = count_tracks(track_id, truth, CUTS, shared).binned["atlas"]
    # The same as if the hit were there twice, but for what lies around it and for its particle.
    twice = replace(
        truth, **{name: np.append(getattr(truth, name), getattr(truth, name)[[3]], axis=0)
                  for name in ("particle_id", "surface", "position", "border")})  # fmt: skip
    copied = count_tracks(np.append(track_id, 1), twice, CUTS).binned["atlas"]
    for name in ("pt", "eta", "phi", "border"):
        assert bins[name].tracks == copied[name].tracks, name
    alone = count_tracks(track_id, truth, CUTS).binned["atlas"]
    assert bins["pt"].tracks != alone["pt"].tracks
    assert bins["border"].tracks[EDGES["border"].index(0.0)] == 2 != alone["border"].tracks[0]


def test_around_a_track_are_the_hits_around_its_shared_hits_too():
    # The hit that 1 takes from 0 has forty of noise in its cell, the others lie alone.
    track_id, truth = drawn("aaaabbbb" + "." * 40, "00001111" + "." * 40)
    eta = np.append(np.arange(8) + 0.05, np.full(40, 3.05))
    radius = np.append(np.full(8, 50.0), np.linspace(30, 90, 40))
    truth = replace(truth, position=np.stack([radius, 0 * radius, radius * np.sinh(eta)], axis=1))
    found = count_tracks(track_id, truth, CUTS, np.array([[3, 1]])).binned["atlas"]["density"].tracks
    bins = np.searchsorted(EDGES["density"], [(3 + 41) / 4, (4 + 41) / 5], side="right") - 1
    assert np.flatnonzero(found).tolist() == sorted(bins)
