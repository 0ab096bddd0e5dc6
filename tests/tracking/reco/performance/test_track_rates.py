"""Rates are None without anything to divide by, intervals are Wilson's, and the table stays in its columns."""

import math

import numpy as np
import pytest
from drawn_tracks import EVERY, drawn

from domainpar.tracking.reco.performance.counts import count_tracks
from domainpar.tracking.reco.performance.matching import TrackCuts
from domainpar.tracking.reco.performance.rates import METRICS, WIDTH, table, wilson


@pytest.mark.parametrize(("part", "whole"), [(0, 1), (1, 1), (3, 10), (5, 10), (999, 1000), (0, 40), (40, 40)])
@pytest.mark.parametrize("z", [1.0, 1.1, 1.96])
def test_the_ends_of_the_interval_are_z_standard_deviations_from_the_share(part, whole, z):
    low, high = wilson(part, whole, z)
    assert 0 <= low <= part / whole <= high <= 1
    for end in (low, high):
        distance = abs(part / whole - end)
        assert distance == pytest.approx(z * math.sqrt(end * (1 - end) / whole), abs=1e-12) or end in (0, 1)
    assert (low == 0) == (part == 0)
    assert (high == 1) == (part == whole)


def test_a_published_interval_comes_out():
    # Newcombe, Statist. Med. 17 (1998) 857, table I: 81 of 263 and 15 of 148, Wilson's without continuity correction
    assert wilson(81, 263, 1.959964) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148, 1.959964) == pytest.approx((0.0624, 0.1605), abs=5e-5)


def test_nothing_has_no_interval_and_more_than_everything_is_refused():
    assert wilson(0, 0) is None
    with pytest.raises(ValueError, match="3 of 2"):
        wilson(3, 2)
    with pytest.raises(ValueError, match="-1 of 2"):
        wilson(-1, 2)


def test_the_mean_score_leaves_out_events_without_one():
    good, none = count_tracks(*drawn("aaabb", "00011")), count_tracks(*drawn("...", "000"))
    half = count_tracks(*drawn("aaabbb", "000..."))
    assert METRICS["trackml"].value(good + none + half, "atlas") == pytest.approx((1 + 0.5) / 2)
    assert METRICS["trackml"].value(none, "atlas") is None


def counted(particles, tracks, **cuts):
    return count_tracks(*drawn(particles, tracks), TrackCuts(**cuts))


def cells(lines):
    """Those of the network."""
    return next(line.split()[1:] for line in lines if line.startswith("network"))


def test_the_table_has_a_row_for_each_finder_in_the_order_network_ckf_perfect_scores():
    found = table(
        {"perfect_scores": counted("aaaaa", "00000"), "mine": counted("aaaaa", "....."), "network": counted("", "")}
    )
    rows = {
        row.split()[0]: row.split()[1:] for row in found[:7] if row.split()[0] in ("perfect_scores", "mine", "network")
    }
    assert list(rows) == ["network", "perfect_scores", "mine"]
    assert rows["network"] == ["0", *"--------"]
    assert rows["perfect_scores"] == ["1", "1.0000", "0.5000..1.0000", *["0.0000"] * 3, *["1.0000"] * 3]
    assert rows["mine"] == ["0", "0.0000", "0.0000..0.5000", "-", "-", "-", "0.0000", "0.0000", "0.0000"]
    assert "perfect_scores: tracks that the same track builder makes" in " ".join(found)
    assert "LHC, of the tracks of such particles: network -, perfect_scores 1.0000, mine -" in " ".join(found)


def test_the_table_says_what_it_counts_and_shows_the_style_asked_for():
    counts = {"network": counted("aaaaaaaaaa", "0000011111", target={"pt": [1.0, 5.0]}, min_hits=4)}
    text = " ".join(table(counts))
    assert "1 event, 1 target particle (pt: [1.0, 5.0]), tracks of at least 4 hits, atlas matching of more than" in text
    assert "weight 1 for every labelled hit" in text
    assert "perfect_scores" not in text
    assert cells(table(counts))[1:6] == ["1.0000", "0.5000..1.0000", "0.0000", "0.0000", "1.0000"]
    assert cells(table(counts, "one_way"))[1:6] == ["0.0000", "0.0000..0.5000", "0.0000", "0.0000", "-"]
    assert "at least 0.75 of the hits" in " ".join(table({"network": counted("a", "0", fraction=0.75)}))


def test_fakes_are_counted_per_particle_and_duplicates_per_track_as_well():
    # a is found twice; the track of b and c halves is one fake; d and e were not found: 5 targets, 3 tracks
    counts = {"network": counted("aaaaaaaaaabbbcccdddeee", "0000011111222222......", target={}, min_hits=3)}
    text = table(counts)
    for note in (
        "fake tracks per target particle: network 0.2000",
        "fraction of tracks of any pT that match no particle: network 0.3333",
        "duplicates per track: network 0.3333",
    ):
        assert note in text
    nothing = table({"network": counted("", "")})
    assert "fake tracks per target particle: network -" in nothing
    assert "fraction of tracks of any pT that match no particle: network -" in nothing


def test_the_table_counts_the_tracks_that_its_heading_promises():
    assert cells(table({"network": counted("aaaaabbbb", "000001111")}))[0] == "1"  # the track of b has 4 hits


def test_a_rate_of_duplicates_that_can_only_be_zero_is_not_printed_as_a_measurement():
    # More than half of a particle's hits are on one track, but where tracks share hits.
    alone, shared = drawn("aaaaaaaaa", "000000000"), np.array([[hit, 1] for hit in range(6)])
    once, twice = count_tracks(*alone, TrackCuts()), count_tracks(*alone, TrackCuts(), shared)
    for style, found, printed in (("atlas", once, "0.0000"), ("two_way", once, "-"), ("two_way", twice, "1.0000")):
        lines = table({"network": found}, style)
        assert cells(lines)[5] == printed
        assert ("duplicates per track" in " ".join(lines)) == (printed != "-")


def test_no_line_is_wider_than_promised_whatever_the_target():
    target = {"particle_id": ["not_in", list(range(100))], "pt": [1, 2]}
    for row in table({name: counted("aaaaa" * 9, "00000" * 9, target=target) for name in ("network", "ckf")}):
        assert len(row) <= WIDTH


def test_no_counts_make_no_table_and_an_unknown_style_is_refused():
    assert table({}) == []
    with pytest.raises(ValueError, match="'ATLAS' is unknown; choose one of atlas, one_way, two_way"):
        table({"network": counted("a", "0", **EVERY)}, "ATLAS")
