"""Each target particle that is not matched is lost for one reason: that of the first step after which it cannot be."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from drawn_tracks import EVERY, drawn, table

from domainpar.common.models import plain
from domainpar.tracking.reco.performance.counts import EDGES, TrackCounts, count_tracks
from domainpar.tracking.reco.performance.lost import REASONS, TrackEdges
from domainpar.tracking.reco.performance.matching import STYLES, TrackCuts

CUTS = TrackCuts(min_hits=4, **EVERY)


def along(particles):
    """Hits of each particle one after the other outward, so that each follows the one before."""
    place = [particles[:i].count(letter) for i, letter in enumerate(particles)]
    return np.array([[30.0 * (1 + step), 0, ord(letter)] for step, letter in zip(place, particles, strict=True)])


def joined(particles, passing, built=None):
    """All hits of a particle joined to the next, but where `passing` has a gap; `!`: its score is below the cut."""
    rows = {letter: [i for i, other in enumerate(particles) if other == letter] for letter in set(particles) - {"."}}
    pairs = [pair for of_one in rows.values() for pair in itertools.pairwise(of_one)]
    kept = [(pair, passing[pair[1]] != "!") for pair in pairs if passing[pair[1]] != " "]
    edge_index = np.array([pair for pair, _ in kept], np.int64).reshape(-1, 2).T
    return TrackEdges(edge_index, np.array([above for _, above in kept], bool), built)


def lost(particles, tracks, passing, style="atlas", built=None, cuts=CUTS):
    track_id, truth = drawn(particles, tracks, position=along(particles))
    of_built = None if built is None else drawn(particles, built)[0]
    counts = count_tracks(track_id, truth, cuts, None, joined(particles, passing, of_built)).styles[style]
    assert sum(counts.lost.values()) + counts.reconstructed == counts.targets
    return {reason for reason, number in counts.lost.items() for _ in range(number)}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("reason", "particles", "tracks", "passing", "built"),
    [
        ("hits", "aaa...", "000...", "------", None),
        ("edges", "aaaaaa", "000111", "--- --", None),
        ("score", "aaaaaa", "000111", "---!--", None),
        ("builder", "aaaaaa", "000111", "------", None),
        ("builder", "aaaaaa", "......", "------", "000111"),
        ("quality", "aaaaaa", "......", "------", "000000"),
        ("quality", "aaaaaa", "000111", "------", "00001."),
    ],
)
def test_a_particle_is_lost_in_the_first_step_that_cannot_match_it(style, reason, particles, tracks, passing, built):
    assert lost(particles, tracks, passing, style, built) == {reason}


def test_a_track_with_most_hits_that_does_not_match_is_lost_in_matching():
    mixed = "aaaaaa" + "." * 7, "0" * 13, "-" * 13
    assert lost(*mixed) == lost(*mixed, "two_way") == {"matching"}
    assert lost(*mixed, "one_way") == set()  # most of its hits are enough there
    assert lost("aaaaa", "000..", "-----", "one_way") == {"matching"}  # too short
    assert lost(*mixed[:2], "--- -- ------", "atlas") == {"edges"}  # of several reasons the first


def test_enough_hits_for_a_track_need_not_be_most_of_the_particle():
    # Four of ten hits are joined: enough for a pure track, but never for most of its hits.
    event = "a" * 10, "." * 10, "---- - - -"
    assert {style: lost(*event, style) for style in STYLES} == {
        "atlas": {"builder"}, "one_way": {"edges"}, "two_way": {"edges"},
    }  # fmt: skip


def test_without_edges_or_positions_the_finder_lost_what_no_track_holds():
    particles, tracks = "aaaaaabbbbbb.......ccc", "......1111111111111..."
    for truth, edges in (
        (drawn(particles, tracks, position=along(particles))[1], None),
        (drawn(particles, tracks)[1], joined(particles, "-" * 22)),
    ):
        counts = count_tracks(drawn(particles, tracks)[0], truth, CUTS, None, edges).styles["atlas"]
        assert counts.lost == dict.fromkeys(REASONS, 0) | {"finder": 1, "matching": 1, "hits": 1}


def test_edges_that_skip_a_hit_or_join_others_do_not_connect_a_particle():
    particles = "aaaaaabbbbbb"
    track_id, truth = drawn(particles, "." * 12, position=along(particles))
    pairs = [
        (0, 3),
        *((i, i + 2) for i in range(4)),
        *((i + 6, i) for i in range(6)),
        *itertools.pairwise(range(6, 12)),
    ]
    edges = TrackEdges(np.array(pairs).T, np.ones(len(pairs), bool))
    found = count_tracks(track_id, truth, CUTS, None, edges).styles["atlas"].lost
    assert found == dict.fromkeys(REASONS, 0) | {"edges": 1, "builder": 1}


def test_two_hits_on_one_surface_may_be_joined_to_each_other_or_to_a_neighbour():
    position = along("aaaa")[[0, 1, 1, 2, 3]]
    track_id, truth = drawn("aaaaa", ".....", position=position, surface=np.array([0, 1, 1, 2, 3]))
    cuts = TrackCuts(min_hits=5, **EVERY)
    for edges in ([(0, 1), (1, 2), (1, 3), (3, 4)], [(0, 1), (2, 0), (2, 3), (4, 3)]):
        of = TrackEdges(np.array(edges).T, np.ones(4, bool))
        assert count_tracks(track_id, truth, cuts, None, of).styles["two_way"].lost["builder"] == 1


def test_edges_above_a_cut_are_those_that_a_track_builder_takes():
    edges = np.arange(10).reshape(2, 5)
    logit, scored = np.array([-1.0, 0.0, 1e-7, 9.0, 9.0]), np.array([True] * 4 + [False])
    assert TrackEdges.of(edges, logit, scored, 0.5, None).passing.tolist() == [False, False, True, True, False]
    assert TrackEdges.of(edges, logit, scored, 0.0, None).passing.tolist() == [True] * 4 + [False]


def test_reasons_stand_in_the_bins_of_the_particles_and_against_pt_without_the_cut_on_it():
    particles, tracks = "aaaaabbbbbccccc", "..........000.."
    track_id, truth = drawn(particles, tracks)
    truth = replace(truth, particles=table([1, 2, 3], [5] * 3, pt=[2, 0.6, 3], eta=[0.2, 1.2, -2.2]))
    counts = count_tracks(track_id, truth)
    both = {"finder": [2.0, 0.6], "matching": [3.0]}, {"finder": [0.2], "matching": [-2.2]}
    for quantity, of in zip(("pt", "eta"), both, strict=True):
        edges, binned = EDGES[quantity], counts.binned["atlas"][quantity]
        for reason in REASONS:
            assert binned.lost[reason] == tuple(np.histogram(of.get(reason, []), edges)[0].tolist())
        missed = np.subtract(binned.targets, binned.reconstructed)
        assert np.array_equal(np.sum([*binned.lost.values()], axis=0), missed)
    assert counts.binned["atlas"]["phi"].lost == {}
    twice = counts + TrackCounts.read(plain(counts))
    assert twice.styles["atlas"].lost == dict.fromkeys(REASONS, 0) | {"finder": 2, "matching": 2}
    assert sum(twice.binned["atlas"]["pt"].lost["finder"]) == 4
