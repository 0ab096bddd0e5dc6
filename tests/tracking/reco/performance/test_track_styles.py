"""Tracks match particles as the three styles of the acorn framework say, noise and hits on no track aside."""

from dataclasses import replace

import numpy as np
import pytest
import yaml
from drawn_tracks import EVERY, NAN, drawn, plain_styles, random_case, table

from domainpar.common.models import plain
from domainpar.tracking.events import detector
from domainpar.tracking.events.graph import surface_numbers
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.reco.performance.counts import count_tracks
from domainpar.tracking.reco.performance.matching import STYLES, TrackCuts
from domainpar.tracking.reco.performance.rates import METRICS, ratio
from domainpar.tracking.reco.performance.rates import table as rates_table
from domainpar.tracking.reco.performance.truth import EventTruth


def rates(particles, tracks, style, **cuts):
    track_id, truth = drawn(particles, tracks)
    return rates_of(count_tracks(track_id, truth, TrackCuts(**{**EVERY, **cuts})), style)


def rates_of(counts, style):
    names = ("efficiency", "fake_rate", "unlabelled_rate", "duplicate_rate")
    return tuple(ratio(*METRICS[name].counted(counts.styles[style], counts)) for name in names)


DRAWN = {
    # particles, tracks: (efficiency, fake rate, unlabelled rate, duplicate rate) in atlas, one_way and two_way style
    ("aaaaabbbbb", "0000011111"): [(1, 0, 0, 0)] * 3,
    # b is found and so is a, but not c: its hits are on no track
    ("aaaaabbbbbccccc", "0000011111....."): [(2 / 3, 0, 0, 0)] * 3,
    # b has no long track: 4 hits are not matchable, neither as found nor as fake
    ("aaaaabbbbb", "000001111."): [(1 / 2, 0, 0, 0)] * 3,
    # a in two pure halves, neither of which holds more than half of it
    ("aaaaaaaaaa", "0000011111"): [(1, 0, 0, 1), (0, 0, 0, None), (0, 1, 0, None)],
    # a in two pure tracks, one of which holds more than half of it
    ("aaaaaaaaaaa", "00000011111"): [(1, 0, 0, 1), (1, 0, 0, 0), (1, 1 / 2, 0, 0)],
    # all of a within a track of mostly noise: complete, not pure; truth does not know whose track it is
    ("aaaaa......", "00000000000"): [(0, 0, 1, None), (1, 0, 1, 0), (0, 0, 1, None)],
    # half is not more than half, of a track or of a particle
    ("aaaaabbbbb", "0000000000"): [(0, 1, 0, None), (1, 1, 0, 0), (0, 1, 0, None)],
    # half of noise is not more than half either: a fake
    ("aaaaa.....", "0000000000"): [(0, 1, 0, None), (1, 1, 0, 0), (0, 1, 0, None)],
    # a track of noise is unlabelled, however much noise it has
    ("aaaaa.....", "0000011111"): [(1, 0, 1 / 2, 0)] * 3,
    (".....", "00000"): [(None, 0, 1, None)] * 3,
    ("aaaaa", "....."): [(0, None, None, None)] * 3,
    ("", ""): [(None, None, None, None)] * 3,
    ("a", "0"): [(0, None, None, None)] * 3,
}


@pytest.mark.parametrize(("event", "expected"), DRAWN.items())
def test_drawn_tracks_have_the_rates_one_counts_by_hand(event, expected):
    assert [rates(*event, style) for style in STYLES] == expected


def test_hits_on_no_track_are_no_track_of_their_own():
    track_id, truth = drawn("aaaaabbbbb", "00000.....")
    counts = count_tracks(track_id, truth, TrackCuts(**EVERY))
    assert (counts.tracks, counts.hits_on_tracks, counts.hits) == (1, 5, 10)
    assert counts.styles["atlas"].matchable == 1


def test_a_larger_fraction_need_only_be_reached():
    for fraction, found in ((0.5, 1), (0.6, 1), (0.61, 0), (0.7, 0)):
        assert rates("aaabb", "00000", "atlas", fraction=fraction, min_hits=5)[0] == found / 2
    assert rates("aaaaabbbbb", "0000000000", "atlas", fraction=0.500001)[0] == 0
    # As a float, 0.55 is a little more than 11 of 20.
    assert rates("a" * 11 + "b" * 9, "0" * 20, "atlas", fraction=0.55)[0] == 1 / 2
    assert rates("aaaaa", "00000", "two_way", fraction=1.0)[0] == 1
    assert rates("aaaaa", "00001", "two_way", fraction=1.0, min_hits=1)[0] == 0


def test_targets_meet_the_conditions_and_have_a_hit_while_others_still_match_tracks():
    track_id, truth = drawn("aaaaabbbbbcccccddddd", "00000111112222233333")
    particles = table([1, 2, 3, 9], [9] * 4, pt=[2.0, 0.5, NAN, 2.0])  # 4 is in no table, 9 left no hit here
    counts = count_tracks(track_id, replace(truth, particles=particles))
    for style in STYLES:
        found = counts.styles[style]
        assert (found.targets, found.reconstructed, found.target_pairs) == (1, 1, 1)
        assert (found.matchable, found.matched, found.particles, found.pairs) == (4, 4, 4, 4)


def test_duplicates_are_counted_among_targets_only():
    track_id, truth = drawn("aaaaaaaaaabbbbbbbbbb", "00000111112222222222")
    truth = replace(truth, particles=table([1, 2], [9, 9], pt=[0.5, 2.0]))
    counts = count_tracks(track_id, truth)
    of = counts.styles["atlas"]
    assert (of.pairs, of.particles, of.target_pairs, of.reconstructed) == (3, 2, 1, 1)
    assert rates_of(counts, "atlas")[3] == 0


@pytest.mark.parametrize("seed", range(150))
def test_counts_agree_with_the_definitions_written_plainly(seed):
    track_id, truth, cuts = random_case(seed)
    found = count_tracks(track_id, truth, cuts).styles
    assert {style: plain(counts) for style, counts in found.items()} == plain_styles(track_id, truth, cuts)


@pytest.mark.parametrize("seed", range(30))
def test_a_track_matches_one_particle_and_a_particle_is_complete_on_one_track_at_most(seed):
    track_id, truth, cuts = random_case(seed)
    counts = count_tracks(track_id, truth, cuts).styles
    assert counts["atlas"].pairs == counts["atlas"].matched
    assert counts["one_way"].pairs == counts["one_way"].particles
    assert counts["two_way"].pairs == counts["two_way"].particles == counts["two_way"].matched


@pytest.mark.parametrize("seed", range(30))
def test_neither_new_names_of_tracks_nor_another_order_of_hits_changes_anything(seed):
    track_id, truth, cuts = random_case(seed)
    expected = count_tracks(track_id, truth, cuts)
    rng = np.random.default_rng(seed)
    names = np.append(rng.permutation(1000)[: track_id.max(initial=0) + 1], -1)
    assert count_tracks(names[track_id], truth, cuts) == expected
    order = rng.permutation(len(truth))
    weight = None if truth.weight is None else truth.weight[order]
    permuted = replace(truth, particle_id=truth.particle_id[order], surface=truth.surface[order], weight=weight)
    assert count_tracks(track_id[order], permuted, cuts) == expected


def test_perfect_tracks_find_every_target_without_fakes_or_duplicates_in_all_styles():
    hits = simulate_event(3, 1500)
    truth = EventTruth(
        hits.particle_id, surface_numbers(hits.volume, hits.layer), hits.weight, hits.position, hits.particles
    )
    tracks = np.where(hits.particle_id > 0, hits.particle_id, -1)
    counts = count_tracks(tracks, truth, TrackCuts(target={"nhits": [5, np.inf]}))
    for style in STYLES:
        assert counts.styles[style].targets > 50
        assert rates_of(counts, style) == (1, 0, 0, 0)
    assert counts.trackml_score == (1.0,)
    assert counts.majority.perfect == counts.majority.particles == counts.majority.lhc > 5


def test_what_cannot_be_counted_is_refused():
    track_id, truth = drawn("aaaaa", "00000")
    with pytest.raises(ValueError, match=r"\(4,\) track ids for 5 hits"):
        count_tracks(track_id[:4], truth)
    with pytest.raises(ValueError, match="a track id is -2"):
        count_tracks(track_id - 2, truth)
    with pytest.raises(ValueError, match="needs a particle table"):
        count_tracks(track_id, replace(truth, particles=None))
    unknown = replace(truth, particles=table([1], [5], pt=NAN))
    with pytest.raises(ValueError, match="does not have it"):
        count_tracks(track_id, unknown)
    assert count_tracks(track_id, unknown, TrackCuts(**EVERY)).styles["atlas"].reconstructed == 1


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ({"fraction": 0.4}, "fraction is 0.4"),
        ({"fraction": NAN}, "fraction is nan"),
        ({"fraction": 1.5}, "fraction is 1.5"),
        ({"min_hits": 0}, "min_hits is 0"),
        ({"majority_pt": -1}, "majority_pt is -1"),
    ],
)
def test_cuts_that_make_no_sense_are_refused(cuts, message):
    with pytest.raises(ValueError, match=message):
        TrackCuts(**cuts)


def test_targets_are_written_as_the_command_line_takes_them():
    assert TrackCuts().target_text == "nhits: [5, .inf], pt: [1.0, .inf]"
    assert TrackCuts(**EVERY).target_text == ""
    assert TrackCuts(target={"charge": ["in", [-1, 1]]}).target_text == "charge: [in, [-1, 1]]"
    assert TrackCuts().target_without_pt == {"nhits": [5, np.inf]}


def on_circles(particles, tracks, *momenta):
    """The same letters and digits; track i lies on a circle of this pT in GeV, in 2 T, whoever left its hits."""
    track_id, truth = drawn(particles, tracks)
    position = np.zeros((len(track_id), 3), np.float32)
    for track, pt in enumerate(momenta):
        hits, radius = np.flatnonzero(track_id == track), pt / (2 * detector.GEV_PER_TESLA_MM)
        angle, turn = np.linspace(30, 400, len(hits)) / radius, track  # each in a direction of its own
        x, y = radius * np.sin(angle), radius * (1 - np.cos(angle))
        position[hits, 0], position[hits, 1] = x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn)
    return track_id, replace(truth, position=position)


def test_fakes_are_counted_among_the_tracks_that_targets_could_have_left():
    # 0 and 2 are of a and b; 1 and 3 mix them, 4 and 5 are of noise: one of each lies below 1 GeV, and one above 5
    particles, tracks = "aaaaaaabababbbbbbbababab............", "000000111111222222333333444444555555"
    event = on_circles(particles, tracks, 2, 0.7, 0.7, 3, 0.7, 9)
    counted = {}
    for text in ("", "1, .inf", "1, 5", "0, 1"):
        target = {"pt": yaml.safe_load(f"[{text}]")} if text else {}
        of_style = count_tracks(*event, TrackCuts(target=target)).styles["atlas"]
        counted[text] = of_style.in_range, of_style.fakes, of_style.unlabelled
        assert (of_style.matchable, of_style.matched) == (6, 2)
    assert counted == {"": (6, 2, 2), "1, .inf": (3, 1, 1), "1, 5": (2, 1, 0), "0, 1": (3, 1, 1)}
    of_pt = count_tracks(*event, TrackCuts(target={"pt": [1, 5]})).binned["atlas"]
    assert (sum(of_pt["pt"].tracks), sum(of_pt["pt"].fakes)) == (6, 2)  # a cut on pT would hide them
    assert (sum(of_pt["phi"].tracks), sum(of_pt["phi"].fakes)) == (2, 1)


def test_a_track_without_a_fit_is_counted_and_said():
    track_id, truth = on_circles("aaaaaaababab", "000000111111", 2, 3)
    truth.position[track_id == 1] = [30, 0, 0]  # all hits at one place
    counts = count_tracks(track_id, truth, TrackCuts(target={"pt": [1, np.inf]}))
    assert (counts.styles["atlas"].in_range, counts.styles["atlas"].fakes, counts.unfitted) == (2, 1, 1)
    assert "without a fitted pT, taken to be in range: network 1" in " ".join(rates_table({"network": counts}))
    without = replace(truth, position=None)
    counts = count_tracks(track_id, without, TrackCuts(target={"pt": [1, np.inf]}))
    assert (counts.styles["atlas"].in_range, counts.unfitted) == (2, 2)
    assert count_tracks(track_id, without, TrackCuts(**EVERY)).unfitted == 0  # nothing was asked of its pT
