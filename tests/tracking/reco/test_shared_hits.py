"""Hits on several tracks: where one helix goes through them all, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_greedy import RADII, helix

from domainpar.tracking.reco.greedy import MOST_HITS, share
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.tracks import TrackOptions, build_tracks, finished, shared_hits

ON = TrackOptions("greedy", shared_hits=True)
CROSSING = 4
"""The surface at which the two tracks of `crossing` meet, and the row of the hit there."""


def crossing():
    """Two particles on the same modules that meet at a hit: rows 0 to 7, and 8 to 14 with row 4."""
    bend = 0.3 - np.arctan2(*helix()[CROSSING, 1::-1])  # from its direction at the start to that of the hit
    second = np.delete(helix(charge=-1, phi=0.3 - 2 * bend), CROSSING, axis=0)
    surface = np.arange(1, len(RADII) + 1)
    return TrackHits(
        np.concatenate([helix(), second]),
        np.concatenate([surface, np.delete(surface, CROSSING)]),
        np.ones(15, np.int64),
    )


def chains():
    """Edges along both particles, the second by way of the common hit, and their logits: those to it are worse."""
    first, second = np.arange(8), np.array([8, 9, 10, 11, CROSSING, 12, 13, 14])
    edge_index = np.concatenate([np.stack([hits[:-1], hits[1:]]) for hits in (first, second)], axis=1)
    return edge_index, 5 - 0.01 * np.arange(14) - 2 * (edge_index == CROSSING).any(axis=0) * (np.arange(14) > 6)


def found(edge_index, logits, hits, options=ON):
    """Tracks, and the pairs of hits and further tracks."""
    tracks = finished(build_tracks(edge_index, logits, hits, options), hits, options)
    shared = shared_hits(tracks, edge_index, logits, hits, options)
    return tracks.tolist(), None if shared is None else shared.tolist()


def test_two_tracks_that_cross_in_a_hit_share_it():
    assert found(*chains(), crossing()) == ([0] * 8 + [1] * 7, [[CROSSING, 1]])


def test_without_the_option_nothing_is_shared_and_tracks_are_the_same():
    assert found(*chains(), crossing(), replace(ON, shared_hits=False)) == ([0] * 8 + [1] * 7, None)


@pytest.mark.parametrize("off", [0.0, 5.0, 10.0, 20.0, 40.0])
def test_a_hit_off_the_helix_is_not_taken(off):
    hits = crossing()
    hits.position[CROSSING] += (0, 0, off)
    tracks = np.array([0] * 8 + [1] * 7)
    for most, taken in ((12.0, off == 0.0), (1e6, True)):
        shared = share(tracks, np.array([11]), np.array([CROSSING]), hits, most)
        assert shared.tolist() == ([[CROSSING, 1]] if taken else [])


def test_segments_below_the_score_cut_share_nothing():
    edge_index, logits = chains()
    logits[(edge_index == CROSSING).any(axis=0) & (np.arange(14) > 6)] = -3.0
    assert found(edge_index, logits, crossing()) == ([0] * 8 + [1] * 7, [])


@pytest.mark.parametrize(("module", "beside", "taken"), [(1, 2.0, True), (2, 2.0, False), (1, 30.0, False)])
def test_a_surface_has_a_second_hit_only_beside_the_first_on_another_module(module, beside, taken):
    hits = crossing()
    # The second particle has a hit of its own there, on module 2, so far along the beam.
    own = hits.position[CROSSING] + (0, 0, beside)
    hits = TrackHits(
        np.concatenate([hits.position, [own]]),
        np.append(hits.surface, CROSSING + 1),
        np.append(hits.module, 2),
    )
    hits.module[CROSSING] = module
    tracks = np.array([0] * 8 + [1] * 8)
    shared = share(tracks, np.array([11]), np.array([CROSSING]), hits, 1e4)
    assert shared.tolist() == ([[CROSSING, 1]] if taken else [])


@pytest.mark.parametrize(("own", "taken"), [(3, False), (4, True)])
def test_tracks_of_three_hits_do_not_know_their_helix(own, taken):
    hits = crossing()
    tracks = np.array([0] * 8 + [1] * own + [-1] * (7 - own))
    shared = share(tracks, np.array([9]), np.array([CROSSING]), hits, 1.0)
    assert shared.tolist() == ([[CROSSING, 1]] if taken else [])


def test_hits_on_no_track_and_own_hits_are_not_shared():
    hits = replace(crossing(), surface=np.zeros(15, np.int64))  # no surface forbids it
    tracks = np.array([0] * 4 + [-1] + [0] * 3 + [1] * 7)
    assert share(tracks, np.array([11, 8]), np.array([CROSSING, 9]), hits, 1.0).shape == (0, 2)


def test_of_two_hits_at_one_place_the_best_is_taken_and_of_equals_the_first():
    hits = crossing()
    # The hit is there twice, on tracks of two other particles.
    twice = TrackHits(
        np.concatenate([hits.position, hits.position[[CROSSING]]]),
        np.append(hits.surface, CROSSING + 1),
        np.append(hits.module, 1),
    )
    tracks = np.array([0] * 8 + [1] * 7 + [2])
    for order, expected in (((CROSSING, 15), CROSSING), ((15, CROSSING), 15)):
        assert share(tracks, np.array([11, 11]), np.array(order), twice, 1.0).tolist() == [[expected, 1]]
    edge_index = np.array([[11, 11], [15, CROSSING]])
    for logits, expected in (((2.0, 2.0), 15), ((2.0, 3.0), CROSSING)):
        assert shared_hits(tracks, edge_index, np.array(logits), twice, ON).tolist() == [[expected, 1]]


def test_a_hit_that_several_segments_lead_to_is_taken_once():
    hits = replace(crossing(), surface=np.zeros(15, np.int64))  # no surface could tell
    tracks = np.array([0] * 8 + [1] * 7)
    shared = share(tracks, np.array([10, 11, CROSSING]), np.array([CROSSING, CROSSING, 12]), hits, 1.0)
    assert shared.tolist().count([CROSSING, 1]) == 1


def test_both_of_two_tracks_that_touch_twice_take_the_hit_of_the_other():
    hits = crossing()
    # Beside the hit of the first the second has one on the module that overlaps.
    hits = TrackHits(
        np.concatenate([hits.position, hits.position[[CROSSING]] + 0.01]),
        np.append(hits.surface, CROSSING + 1),
        np.append(hits.module, 2),
    )
    tracks = np.array([0] * 8 + [1] * 8)
    assert share(tracks, np.array([CROSSING]), np.array([15]), hits, 1.0).tolist() == [[CROSSING, 1], [15, 0]]


def test_a_full_track_takes_nothing():
    radii = np.linspace(30, 1000, MOST_HITS + 2)
    hits = TrackHits(helix(radii=radii), np.arange(1, len(radii) + 1), np.ones(len(radii), int))
    tracks = np.repeat([0, 1], [MOST_HITS - 1, 3])
    inner, outer = np.array([5, 5, 6]), np.array([MOST_HITS, MOST_HITS - 1, MOST_HITS + 1])
    assert share(tracks, inner, outer, hits, 1.0).tolist() == [[MOST_HITS, 0]]
    tracks[MOST_HITS - 1 :] = 0
    assert share(np.append(tracks[:-1], 1), inner, outer, hits, 1.0).tolist() == []


@pytest.mark.parametrize("seed", range(10))
def test_the_order_of_hits_and_of_edges_does_not_matter(seed):
    hits, (edge_index, logits) = crossing(), chains()
    rng = np.random.default_rng(seed)
    order, edges = rng.permutation(len(hits)), rng.permutation(len(logits))
    place = np.argsort(order)
    moved = TrackHits(hits.position[order], hits.surface[order], hits.module[order])
    tracks, shared = found(place[edge_index][:, edges], logits[edges], moved)
    assert shared == [[place[CROSSING], tracks[place[8]]]]


def test_without_positions_no_helix_shares_anything():
    bare = TrackHits(None, np.zeros(4, np.int64), np.zeros(4, np.int64))
    with pytest.raises(ValueError, match="no positions"):
        share(np.zeros(4, np.int64), np.array([0]), np.array([1]), bare, 1.0)
