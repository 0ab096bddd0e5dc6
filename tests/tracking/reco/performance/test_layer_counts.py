"""Hits of matched tracks are counted layer by layer, and lie as far from their track as geometry says."""

import numpy as np
import pytest
from drawn_tracks import EVERY, drawn

from domainpar.tracking.events.graph import surface_numbers
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.performance.counts import count_tracks
from domainpar.tracking.reco.performance.layers import RESIDUALS, median_and_width_of_bins
from domainpar.tracking.reco.performance.matching import TrackCuts
from domainpar.tracking.reco.residuals import residuals

CUTS = TrackCuts(min_hits=3, **EVERY)


def by_layer(particles, tracks, layers, cuts=CUTS, shared=None):
    surface = surface_numbers(np.full(len(layers), 8), np.array([int(layer) for layer in layers]))
    return count_tracks(*drawn(particles, tracks, surface=surface), cuts, shared)


def held(counts):
    return {name: (of.held, of.hits) for name, of in counts.layers.items()}


def test_a_layer_has_the_hits_of_found_particles_and_those_that_their_tracks_hold():
    # one of the two hits of a on layer 3 is on no track; the track of b is not pure; noise is of nobody
    counts = by_layer("aaaaabbbb...", "00.001...011", "123341234512")
    assert held(counts) == {"8.1": (1, 1), "8.2": (1, 1), "8.3": (1, 2), "8.4": (1, 1)}
    of_targets = TrackCuts(min_hits=3, target={"nhits": [6, 9]})
    assert by_layer("aaaaa", "00000", "12345", of_targets).layers == {}


def test_each_track_of_a_particle_and_each_further_track_of_a_hit_counts():
    assert held(by_layer("aaaaaaa", "0000111", "1234567")) == {f"8.{n}": (1, 2) for n in range(1, 8)}
    shared = held(by_layer("aaaaaaa", "0000111", "1234567", shared=np.array([[0, 1]])))
    assert shared == {f"8.{n}": (1 + (n == 1), 2) for n in range(1, 8)}


def test_events_with_different_layers_add_up():
    found = by_layer("aaa", "000", "123") + by_layer("aaaa", "000.", "2345")
    assert held(found) == {"8.1": (1, 1), "8.2": (2, 2), "8.3": (2, 2), "8.4": (1, 1), "8.5": (0, 1)}
    assert all(sum(of.across) == sum(of.along) == 0 for of in found.layers.values())  # no positions, no helix


@pytest.mark.parametrize("charge", [1, -1])
def test_distances_are_those_from_the_track_that_the_other_hits_tell(charge):
    turned = np.linspace(0.05, 0.8, 9)
    along = 900 * np.stack([np.sin(turned), charge * (np.cos(turned) - 1), 0.7 * turned], axis=1)
    track, nothing = np.append(np.zeros(9, np.int64), [-1, 1]), np.zeros(11, np.int64)
    left = 900 * np.stack([charge * np.sin(turned), np.cos(turned), 0 * turned], axis=1)  # of the flight
    for hit, (across, up) in ((4, (0.3, 0.0)), (2, (-0.3, 0.0)), (6, (0.0, 0.5)), (0, (0.0, 0.0))):
        position = along.copy()
        position[hit] += across * left[hit] / 900 + [0, 0, up]
        hits = TrackHits(np.append(position, [[1, 2, 3], [4, 5, 6]], axis=0), nothing, nothing)
        off = residuals(hits, track, 2)
        assert np.isnan(off[9:]).all()  # on no track, and on one without a fit
        np.testing.assert_allclose(off[hit], [across, up / np.hypot(1, 0.7)], atol=0.03)


def test_held_hits_stand_in_the_bins_of_their_distances():
    turned = np.linspace(0.1, 0.9, 9)
    position = 900 * np.stack([np.sin(turned), 1 - np.cos(turned), turned], axis=1)
    position[4] += [0, 0, 5.0]  # and not the noise on the track
    layers = surface_numbers(np.full(9, 8), np.arange(9))
    event = drawn("aaaaaaaa.", "000000000", position=position, surface=layers)
    off = residuals(event[1].hits, event[0], 1)
    found = count_tracks(*event, CUTS).layers
    assert set(found) == {f"8.{n}" for n in range(8)}
    for n in range(8):
        counted = found[f"8.{n}"]
        for values, histogram in zip(off[n], (counted.across, counted.along), strict=True):
            assert histogram == tuple(np.histogram(values, RESIDUALS)[0].tolist())


def test_medians_and_widths_come_from_the_bins():
    rng = np.random.default_rng(0)
    for middle, sigma in ((0.0, 0.02), (0.3, 0.1), (-1.0, 2.0)):
        values = np.clip(rng.normal(middle, sigma, 200_000), RESIDUALS[0], RESIDUALS[-1])
        found = median_and_width_of_bins(np.histogram(values, RESIDUALS)[0].tolist())
        assert found == pytest.approx((middle, sigma), abs=0.08 * sigma)
    assert median_and_width_of_bins([0] * (len(RESIDUALS) - 1)) is None


def test_what_lies_beyond_the_last_bin_counts_in_it():
    turned = np.linspace(0.1, 0.9, 9)
    position = 900 * np.stack([np.sin(turned), 1 - np.cos(turned), turned], axis=1)
    position[::2, 2] += 100.0
    found = count_tracks(*drawn("a" * 9, "0" * 9, position=position), CUTS).layers
    assert sum(of.along[0] + of.along[-1] for of in found.values()) == 9
