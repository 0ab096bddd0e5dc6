"""Bins hold what they say: particles by their own quantities, tracks by the helix fitted to them."""

from dataclasses import replace

import numpy as np
import pytest
from drawn_tracks import EVERY, drawn, table

from domainpar.tracking.events import detector
from domainpar.tracking.events.graph import surface_numbers
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.reco.helix import fit_helices
from domainpar.tracking.reco.performance.counts import EDGES, bins_of, count_tracks
from domainpar.tracking.reco.performance.matching import STYLES, TrackCuts
from domainpar.tracking.reco.performance.truth import EventTruth, distance_to_other_sectors


def bin_at(name, value):
    return int(np.searchsorted(EDGES[name], value, side="right")) - 1


def filled(binned, name):
    """Bin -> count of one row of counts, empty bins left out."""
    return {i: count for i, count in enumerate(getattr(binned, name)) if count}


def test_a_bin_holds_its_lower_border_and_the_last_one_both():
    values = [-1, 0.0, 0.5, 1.0, 1.99, 2.0, 2.01, np.nan, np.inf, -np.inf]
    assert bins_of(np.array(values), (0.0, 1.0, 2.0)).tolist() == [-1, 0, 0, 1, 1, 1, -1, -1, -1, -1]


def test_particles_are_binned_by_their_true_pt_and_eta_and_against_pt_without_the_cut_on_it():
    track_id, truth = drawn("aaaaabbbbbcccccdddd", "00000.....222223333")
    particles = table([1, 2, 3, 4], [5, 5, 5, 4], pt=[2.0, 0.3, 0.6, 2.0], eta=[0.5, 1.0, 2.0, 3.0])
    counts = count_tracks(track_id, replace(truth, particles=particles))
    for style in STYLES:
        against_pt, against_eta = counts.binned[style]["pt"], counts.binned[style]["eta"]
        # d has too few hits for either; b and c too little pT for the totals and for eta
        assert filled(against_pt, "targets") == {bin_at("pt", v): 1 for v in (2.0, 0.3, 0.6)}
        assert filled(against_pt, "reconstructed") == {bin_at("pt", v): 1 for v in (2.0, 0.6)}
        assert filled(against_eta, "targets") == filled(against_eta, "reconstructed") == {bin_at("eta", 0.5): 1}
        assert counts.styles[style].targets == 1


def test_further_tracks_of_a_target_are_its_duplicates():
    track_id, truth = drawn("aaaaaaaaaaaaaaabbbbb", "00000111112222233333")
    binned = count_tracks(track_id, truth, TrackCuts(**EVERY)).binned
    assert filled(binned["atlas"]["pt"], "duplicated") == {bin_at("pt", 2.0): 2}
    assert filled(binned["one_way"]["pt"], "duplicated") == {}
    soft = replace(truth, particles=table([1, 2], [15, 5], pt=[0.6, 2.0]))
    binned = count_tracks(track_id, soft).binned["atlas"]
    assert filled(binned["eta"], "duplicated") == {}  # no target; against pT it is one
    assert filled(binned["pt"], "duplicated") == {bin_at("pt", 0.6): 2}


def test_phi_and_border_of_a_particle_are_those_of_its_first_and_of_its_nearest_hit():
    track_id, truth = drawn("aaabbb", "000111")
    phi = np.array([1.0, 0.5, 0.1, -2.0, -1.0, -0.1])
    radius = np.array([30, 20, 10, 30, 10, 20])
    truth = replace(
        truth,
        position=np.stack([radius * np.cos(phi), radius * np.sin(phi), np.zeros(6)], axis=1).astype(np.float32),
        particles=replace(truth.particles, vertex=np.array([[0, 0, 0], [np.nan, 0, 0]], np.float32)),
        border=np.array([0.5, 0.04, 0.2, np.inf, np.inf, np.inf], np.float32),
    )
    binned = count_tracks(track_id, truth, TrackCuts(target={}, min_hits=1)).binned["atlas"]
    assert filled(binned["phi"], "targets") == {bin_at("phi", 0.1): 1, bin_at("phi", -1.0): 1}
    assert filled(binned["border"], "targets") == filled(binned["border"], "tracks") == {bin_at("border", 0.04): 1}
    displaced = replace(truth.particles, vertex=np.array([[30, 30, 0], [0, 0, 0]], np.float32))
    binned = count_tracks(track_id, replace(truth, particles=displaced), TrackCuts(target={}, min_hits=1)).binned
    assert filled(binned["atlas"]["phi"], "targets") == {bin_at("phi", 1.0): 1, bin_at("phi", -1.0): 1}


def passing(*layers, skipped=(), vertex_z=0.0, slope=0.3):
    """Hits where a straight line passes barrels of these (volume, layer), some of them without a hit."""
    radius = {
        (surface.volume, surface.layer): surface.coordinate for surface in detector.SURFACES[:] if surface.is_barrel
    }
    kept = [layer for i, layer in enumerate(layers) if i not in skipped]
    r = np.array([radius[layer] for layer in kept])
    position = np.stack([r, np.zeros_like(r), vertex_z + slope * r], axis=1)
    return position, surface_numbers(*np.array(kept).T)


BARREL = [(8, 2), (8, 4), (8, 6), (8, 8), (13, 2), (13, 4), (13, 6), (13, 8)]


@pytest.mark.parametrize(("skipped", "holes"), [((), 0), ((3,), 1), ((2, 5), 2), ((3, 4), 2), ((0, 7), 0)])
@pytest.mark.parametrize("turned", [False, True])
def test_holes_are_the_layers_between_two_hits_that_have_none(skipped, holes, turned):
    position, surface = passing(*BARREL, skipped=skipped)
    order = np.arange(len(position))[::-1] if turned else np.arange(len(position))
    truth = EventTruth(
        np.ones(len(position), np.int64), surface[order], position=position[order],
        particles=table([1], [len(position)], pt=[2.0]),
    )  # fmt: skip
    binned = count_tracks(np.zeros(len(position), np.int64), truth, TrackCuts(**EVERY)).binned["atlas"]["holes"]
    for name in ("targets", "reconstructed", "tracks"):
        assert filled(binned, name) == {bin_at("holes", holes): 1}


def test_a_second_hit_on_a_layer_is_no_hole_and_unknown_layers_are_in_no_bin():
    position, surface = passing(*BARREL)
    twice = np.repeat(np.arange(len(BARREL)), 2)
    truth = EventTruth(
        np.ones(len(twice), np.int64), surface[twice], position=position[twice] + np.arange(len(twice))[:, None] % 2,
        particles=table([1], [len(twice)], pt=[2.0]),
    )  # fmt: skip
    track_id = np.zeros(len(twice), np.int64)
    binned = count_tracks(track_id, truth, TrackCuts(**EVERY)).binned["atlas"]["holes"]
    assert filled(binned, "targets") == {bin_at("holes", 0): 1}
    elsewhere = replace(truth, surface=truth.surface + 1)
    binned = count_tracks(track_id, elsewhere, TrackCuts(**EVERY)).binned["atlas"]["holes"]
    assert filled(binned, "targets") == filled(binned, "tracks") == {}


def test_tracks_and_particles_are_binned_by_hits_and_by_the_shares_that_they_have_of_each_other():
    # Track 0 has 4 hits of particle a and 1 of b, track 1 has 3 of b, which has 5 in all; the last hit is on no track.
    binned = count_tracks(*drawn("aaaabbbbb", "00000111."), TrackCuts(target={}, min_hits=1)).binned["atlas"]
    assert filled(binned["hits"], "tracks") == {bin_at("hits", 5): 1, bin_at("hits", 3): 1}
    assert filled(binned["hits"], "targets") == {bin_at("hits", 4): 1, bin_at("hits", 5): 1}
    for name in ("tracks", "targets"):
        assert filled(binned["purity"], name) == {bin_at("purity", 0.8): 1, bin_at("purity", 0.99): 1}
        assert filled(binned["completeness"], name) == {bin_at("completeness", 0.99): 1, bin_at("completeness", 0.6): 1}


def test_particles_are_binned_by_the_helix_of_their_truth_where_its_direction_is_known():
    track_id, truth = drawn("aaaaabbbbb", "0000011111")
    nowhere = count_tracks(track_id, truth, TrackCuts(target={}, min_hits=1)).binned["atlas"]
    assert filled(nowhere["d0"], "targets") == filled(nowhere["z0"], "targets") == {}
    # From (3, 0, 40) along y: |d0| is 3 mm; along x: 0, and z0 is 40 - 3 sinh(eta).
    table = replace(truth.particles, vertex=np.tile(np.float32([3, 0, 40]), (2, 1)), phi=np.float32([np.pi / 2, 0]),
                    pt=np.float32([50, 50]), eta=np.float32([0, 2]), charge=np.int8([1, -1]))  # fmt: skip
    binned = count_tracks(track_id, replace(truth, particles=table), TrackCuts(target={}, min_hits=1)).binned["atlas"]
    assert filled(binned["d0"], "targets") == {bin_at("d0", 2.9999): 1, bin_at("d0", 0.0): 1}
    assert filled(binned["z0"], "targets") == {bin_at("z0", 40.0): 1, bin_at("z0", 40 - 3 * np.sinh(2)): 1}
    assert filled(binned["vz"], "targets") == {bin_at("vz", 40.0): 2}


def test_without_positions_tracks_lie_in_no_bin_and_the_totals_still_count_them():
    counts = count_tracks(*drawn("aaaaa.....", "0000011111"))
    for name in set(EDGES) - {"hits", "purity", "completeness"}:
        assert set(counts.binned["atlas"][name].tracks) == set(counts.binned["atlas"][name].fakes) == {0}
    assert sum(counts.binned["atlas"]["phi"].targets) == 0
    assert counts.styles["atlas"].matchable == 2


@pytest.fixture(scope="module")
def simulated():
    hits = simulate_event(5, 2000)
    sector = np.floor((np.arctan2(hits.position[:, 1], hits.position[:, 0]) + np.pi) / np.pi * 2)
    border = distance_to_other_sectors(hits.position, sector)
    rng = np.random.default_rng(0)
    track_id = np.where(hits.particle_id > 0, hits.particle_id - 1, -1)
    track_id = np.where(rng.random(len(track_id)) < 0.4, rng.integers(0, 200, len(track_id)), track_id)
    surface = surface_numbers(hits.volume, hits.layer)
    field = detector.geometry().field  # pT would be another in the default field
    return track_id, EventTruth(hits.particle_id, surface, hits.weight, hits.position, hits.particles, border, 4, field)


def test_tracks_are_binned_by_their_fitted_helix_and_fakes_among_them(simulated):
    track_id, truth = simulated
    counts = count_tracks(track_id, truth)
    long_enough = np.bincount(track_id[track_id >= 0]) >= 5
    pt, eta, phi = fit_helices(truth.hits, track_id, len(long_enough)).T[:3]
    for name, values in {"pt": np.abs(pt), "eta": eta, "phi": phi}.items():
        counted = long_enough & np.isfinite(pt) & ((name == "pt") | (np.abs(pt) >= 1))  # of targets: 1 GeV and more
        expected = np.histogram(values[counted], EDGES[name])[0]
        assert expected.sum() > 20
        for style in STYLES:
            assert counts.binned[style][name].tracks == tuple(expected)
    for style in STYLES:
        of_style, binned = counts.styles[style], counts.binned[style]["phi"]
        assert sum(binned.tracks) == of_style.in_range < of_style.matchable  # all of them could be fitted
        assert sum(binned.fakes) == of_style.fakes > 0
        assert counts.unfitted == 0


def test_bins_hold_all_targets_when_none_lies_outside(simulated):
    counts = count_tracks(*simulated, TrackCuts(target={"nhits": [5, np.inf], "eta": [-4, 4], "pt": [0.1, 50]}))
    assert not np.isinf(simulated[1].border).any()
    for style in STYLES:
        of_style = counts.styles[style]
        assert of_style.reconstructed < of_style.targets
        for name in ("pt", "eta", "phi"):
            binned = counts.binned[style][name]
            assert sum(binned.targets) == of_style.targets, name
            assert sum(binned.reconstructed) == of_style.reconstructed, name
            assert sum(binned.duplicated) == of_style.target_pairs - of_style.reconstructed, name


def test_particles_are_binned_by_the_radius_of_their_vertex_and_tracks_are_not():
    track_id, truth = drawn("aaabbb", "000111")
    vertex = np.array([[3, 4, 90], [np.nan, 0, 0]], np.float32)
    truth = replace(truth, particles=replace(truth.particles, vertex=vertex))
    binned = count_tracks(track_id, truth, TrackCuts(target={}, min_hits=1)).binned["atlas"]["radius"]
    assert filled(binned, "targets") == filled(binned, "reconstructed") == {bin_at("radius", 5.0): 1}
    assert filled(binned, "tracks") == {}


def test_particles_and_tracks_are_binned_by_the_hits_around_theirs():
    track_id, truth = drawn("aaabbb....", "000111....")
    # Three hits alone, each in a cell of its own; three in one cell with four of noise.
    eta = np.array([0.05, 1.05, 2.05, *[3.05] * 7])
    phi, radius = np.where(eta > 3, 2.0, 0.3), np.linspace(30, 90, 10)
    position = np.stack([radius * np.cos(phi), radius * np.sin(phi), radius * np.sinh(eta)], axis=1)
    truth = replace(truth, position=position.astype(np.float32))
    binned = count_tracks(track_id, truth, TrackCuts(target={}, min_hits=1)).binned["atlas"]["density"]
    for row in ("targets", "tracks"):
        assert filled(binned, row) == {bin_at("density", 1.0): 1, bin_at("density", 7.0): 1}
