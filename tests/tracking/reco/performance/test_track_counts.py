"""Counts of several events add up to those of all of them together, are written as JSON, and mix with no others."""

import json
from dataclasses import replace

import numpy as np
import pytest
from drawn_tracks import EVERY, drawn, random_case

from domainpar.common.models import plain
from domainpar.tracking.events.graph import Particles
from domainpar.tracking.reco.performance.counts import BOTH_WEIGHTS, TrackCounts, count_tracks, total
from domainpar.tracking.reco.performance.matching import TrackCuts
from domainpar.tracking.reco.performance.truth import EventTruth


def random_event_counts(seed, cuts):
    track_id, truth, _ = random_case(seed)
    rng = np.random.default_rng(seed)
    position = rng.normal(0, 300, (len(truth), 3)).astype(np.float32)
    truth = replace(truth, position=position, border=rng.random(len(truth)).astype(np.float32), border_sectors=4)
    return track_id, truth, count_tracks(track_id, truth, cuts)


def side_by_side(first, second):
    """One event that holds two, particles and tracks of the second renamed."""
    (tracks, truth, _), (more_tracks, more_truth, _) = first, second
    shift, names = 10_000, 1000
    more_ids = np.where(more_truth.particle_id != 0, more_truth.particle_id + shift, 0)
    table, more_table = truth.particles, replace(
        more_truth.particles, particle_id=more_truth.particles.particle_id + shift
    )  # fmt: skip
    joined = {
        name: np.concatenate([getattr(truth, name), getattr(more_truth, name)])
        for name in ("surface", "position", "border")
    }
    return np.concatenate([tracks, np.where(more_tracks >= 0, more_tracks + names, -1)]), EventTruth(
        particle_id=np.concatenate([truth.particle_id, more_ids]),
        particles=Particles(
            *(
                np.concatenate([getattr(table, name), getattr(more_table, name)])
                for name in ("particle_id", "pt", "eta", "vertex", "nhits", "charge")
            )
        ),
        border_sectors=4,
        **joined,
    )


@pytest.mark.parametrize("seed", range(25))
def test_the_sum_of_two_events_is_what_both_together_count(seed):
    cuts = TrackCuts(target={"nhits": [2, 7]}, min_hits=3)
    first, second = random_event_counts(seed, cuts), random_event_counts(seed + 1000, cuts)
    found = total([first[2], second[2]])
    together = count_tracks(*side_by_side(first, second), cuts)
    assert found.events == 2
    assert found.trackml_score == first[2].trackml_score + second[2].trackml_score
    same = {"events": 1, "trackml_score": together.trackml_score, "weights": together.weights}
    assert found.changed(**same) == together


def test_sums_do_not_depend_on_their_grouping():
    cuts = TrackCuts(**EVERY)
    a, b, c = (random_event_counts(seed, cuts)[2] for seed in (1, 2, 3))
    assert (a + b) + c == a + (b + c) == total([a, b, c])


def test_an_empty_event_adds_an_event_and_nothing_else():
    counts = count_tracks(*drawn("aaaaab....", "0000011111"))
    found = counts + count_tracks(*drawn("", ""))
    assert found == counts.changed(events=2, trackml_score=(*counts.trackml_score, None))


@pytest.mark.parametrize(
    ("cuts", "name"),
    [({"min_hits": 4}, "min_hits"), ({"fraction": 0.6}, "fraction"), ({"target": {}}, "target"),
     ({"majority_pt": 0.9}, "majority_pt")],
)  # fmt: skip
def test_counts_with_other_cuts_are_not_added(cuts, name):
    track_id, truth = drawn("aaaaa", "00000")
    with pytest.raises(ValueError, match=f"counts with {name} .* have no sum"):
        count_tracks(track_id, truth) + count_tracks(track_id, truth, TrackCuts(**cuts))


def test_counts_with_other_sectors_or_other_bins_are_not_added():
    track_id, truth = drawn("aaaaa", "00000")
    counts = count_tracks(track_id, truth)
    with pytest.raises(ValueError, match="counts with border_sectors None and 8 have no sum"):
        counts + count_tracks(track_id, replace(truth, border_sectors=8))
    written = plain(counts)
    written["binned"]["two_way"]["eta"]["edges"][3] += 0.1
    with pytest.raises(ValueError, match="different bins"):
        counts + TrackCounts.read(written)
    del written["binned"]["two_way"]["holes"]
    with pytest.raises(ValueError, match="missing holes"):
        counts + TrackCounts.read(written)


def test_tracks_without_a_fit_are_those_of_both_events():
    one, two = count_tracks(*drawn("aaaaa", "00000")), count_tracks(*drawn("aaaaabbbbb", "0000011111"))
    assert [one.unfitted, two.unfitted, (one + two).unfitted] == [1, 2, 3]


def test_a_sum_over_events_with_and_without_weights_says_so():
    track_id, truth = drawn("aaaaa", "00000")
    weighted = count_tracks(track_id, replace(truth, weight=np.ones(5, np.float32)))
    assert (weighted + weighted).weights == "truth"
    assert (weighted + count_tracks(track_id, truth)).weights == BOTH_WEIGHTS
    assert (weighted + count_tracks(track_id, truth) + weighted).weights == BOTH_WEIGHTS


@pytest.mark.parametrize("seed", range(5))
def test_counts_come_back_from_json_as_they_were(seed):
    counts = random_event_counts(seed, TrackCuts(target={"pt": [1, np.inf]}))[2]
    written = json.dumps(plain(counts), allow_nan=False, sort_keys=True)
    assert TrackCounts.read(json.loads(written)) == counts == TrackCounts.read(plain(counts))


def test_everything_in_the_json_is_a_plain_value():
    def is_plain(value):
        if isinstance(value, dict):
            return all(type(name) is str and is_plain(part) for name, part in value.items())
        return all(map(is_plain, value)) if type(value) is list else type(value) in (int, float, str, type(None))

    assert is_plain(plain(random_event_counts(2, TrackCuts())[2]))


def test_json_of_another_version_is_refused_by_name():
    written = plain(count_tracks(*drawn("aaaaa", "00000")))
    del written["styles"]["atlas"]["pairs"]
    with pytest.raises(ValueError, match=r"styles.*missing required field pairs"):
        TrackCounts.read(written)
    with pytest.raises(ValueError, match="unknown field colour"):
        TrackCounts.read({**plain(count_tracks(*drawn("", ""))), "colour": 1})
