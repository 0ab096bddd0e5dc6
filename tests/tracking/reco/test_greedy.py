"""Tracks grown along helices: of one particle, whatever segments say of its neighbours."""

from __future__ import annotations

import math

import numpy as np
import plainly
import pytest

from domainpar.tracking.events.construct import Cuts, build_graph
from domainpar.tracking.events.detector import GEV_PER_TESLA_MM, field_of
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.graph import surface_numbers
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.reco.ckf.detector_layout import layout_of
from domainpar.tracking.reco.greedy import MOST_HITS, link_greedily, refine
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.kalman import chi2_of, room
from domainpar.tracking.reco.tracks import TrackOptions, build_tracks, finished

RADII = np.array([32.0, 72.0, 116.0, 172.0, 260.0, 360.0, 500.0, 660.0])


def helix(pt=1.0, charge=1, phi=0.3, eta=0.4, radii=RADII):
    """Hits of a particle from the origin at these radii, [n, 3]; field 2 T."""
    rho = charge * GEV_PER_TESLA_MM * 2.0 / pt
    arc = 2 * np.arcsin(rho * radii / 2) / rho
    direction = phi - rho * arc / 2
    return np.stack([radii * np.cos(direction), radii * np.sin(direction), math.sinh(eta) * arc], axis=1)


def two_particles(**second):
    """Hits of two particles, a surface for each radius: the first's, then the second's."""
    position = np.concatenate([helix(), helix(**{"charge": -1, "phi": -0.7, **second})])
    count = len(RADII)
    return TrackHits(position, np.tile(np.arange(1, count + 1), 2), np.repeat([1, 2], count))


def chains(count=8):
    """Segments along both particles."""
    inner = np.concatenate([np.arange(count - 1), np.arange(count, 2 * count - 1)])
    return inner, inner + 1


def test_a_good_segment_between_two_particles_joins_nothing_that_is_no_helix():
    inner, outer = chains()
    between = np.array([3]), np.array([12])
    order = np.concatenate([inner, between[0]]), np.concatenate([outer, between[1]])
    assert link_greedily(*order, two_particles(), 1.0).tolist() == [0] * 8 + [8] * 8
    # Also if it comes first: the two hits that it joins are one of 16 then.
    order = np.concatenate([between[0], inner]), np.concatenate([between[1], outer])
    grown = link_greedily(*order, two_particles(), 1.0)
    assert np.bincount(grown).max() <= 8


def test_halves_of_a_particle_are_joined_by_their_one_segment():
    inner, outer = np.array([0, 1, 2, 4, 5, 6, 3]), np.array([1, 2, 3, 5, 6, 7, 4])
    assert link_greedily(inner, outer, two_particles(), 1.0)[:8].tolist() == [0] * 8


def test_two_hits_of_a_module_are_on_two_tracks_and_of_overlapping_ones_on_one():
    double = helix(radii=np.array([118.0]))  # on the third surface
    position = np.concatenate([helix(), double])
    surface = np.append(np.arange(1, 9), 3)
    inner, outer = np.append(np.arange(7), 1), np.append(np.arange(1, 8), 8)
    for module, expected in ((2, 0), (1, 8), (0, 0)):
        hits = TrackHits(position, surface, np.append(np.ones(8, int), module))
        assert link_greedily(inner, outer, hits, 1.0)[8] == expected, module
    far = TrackHits(np.concatenate([helix(), helix(radii=np.array([146.0]))]), surface, np.append(np.ones(8, int), 2))
    assert link_greedily(inner, outer, far, 1.0)[8] == 8


def test_hits_of_no_detector_have_no_surfaces_to_conflict():
    hits = TrackHits(helix(), np.zeros(8, np.int64), np.ones(8, np.int64))
    assert link_greedily(np.arange(7), np.arange(1, 8), hits, 1.0).tolist() == [0] * 8


def of_barrel(sigma_u, sigma_v):
    """Surfaces at `RADII`, layers 1 to 8 of volume 1, with these resolutions."""
    rows = [["barrel", radius, -2000.0, 2000.0, sigma_u, sigma_v, 1] for radius in RADII]
    return layout_of({"surfaces": [[1, layer, *row] for layer, row in enumerate(rows, 1)]})


@pytest.mark.parametrize(("sigmas", "axis"), [((1.5, 0.02), 0), ((0.02, 3.0), 1)])
def test_hits_may_lie_from_their_helix_as_far_as_the_resolution_of_their_surfaces_says(sigmas, axis):
    away = np.random.default_rng(5).normal(0, sigmas[axis], 8)
    position = helix(pt=20.0, phi=0.0)  # flies along x: across is y
    position[:, 1 + axis] += away
    surface = surface_numbers(np.ones(8, int), np.arange(1, 9))
    halves, chain = np.repeat([0, 1], 4), (np.arange(7), np.arange(1, 8))
    for layout, together in ((of_barrel(*sigmas), True), (of_barrel(0.02, 0.02), False), (None, False)):
        hits = TrackHits(position, surface, np.ones(8, int), 2.0, layout)
        grown = link_greedily(*chain, hits, 4.0)
        assert (len(set(grown.tolist())) == 1) == together, layout
        stitched = finished(halves, hits, TrackOptions())
        assert (len(set(stitched.tolist())) == 1) == together, layout


def test_a_track_ends_at_the_most_hits_it_may_have():
    radii = np.linspace(30, 1000, MOST_HITS + 8)
    hits = TrackHits(helix(radii=radii), np.arange(1, len(radii) + 1), np.ones(len(radii), int))
    grown = link_greedily(np.arange(len(radii) - 1), np.arange(1, len(radii)), hits, 1.0)
    assert np.bincount(grown).max() == MOST_HITS


@pytest.mark.parametrize("pt", [20.0, 2.0, 0.5, 0.3])
def test_the_filter_weighs_hits_as_the_definition_of_chi2_does(pt):
    rng, nowhere = np.random.default_rng(1), np.zeros(len(RADII), np.int64)
    chi2 = []
    for eta in np.repeat([0.0, 1.0, 2.0], 12):
        position = helix(pt=pt, eta=eta) + rng.normal(0, 0.2, (len(RADII), 3))
        hits = TrackHits(position, nowhere, nowhere)
        outward, most = np.arange(len(RADII)), np.inf
        by_filter = chi2_of(room()[0], outward, hits.table, hits.places, Field.of(2.0), most)
        chi2.append((by_filter, plainly.off_helix(hits, outward)))
    ratio = np.divide(*np.transpose(chi2))
    # The filter scatters by the momentum that the hits so far tell, the definition by that of all.
    assert 0.8 < ratio.min() < ratio.max() < 1.2
    assert abs(np.median(ratio) - 1) < 0.03


# --- refining --------------------------------------------------------------------------------------------------------


def test_refining_takes_two_particles_apart_and_leaves_one_whole():
    assert refine(np.zeros(16, np.int64), two_particles(phi=2.5), 1.0, 3).tolist() == [0] * 8 + [8] * 8
    alone = TrackHits(helix(), np.arange(1, 9), np.ones(8, int))
    assert len(set(refine(np.full(8, 5), alone, 1.0, 3).tolist())) == 1


def test_refining_drops_an_outlier():
    position = np.concatenate([helix(), [[250.0, 250.0, 400.0]]])
    hits = TrackHits(position, np.arange(1, 10), np.ones(9, int))
    assert (refine(np.zeros(9, np.int64), hits, 1.0, 3) >= 0).tolist() == [True] * 8 + [False]


def test_hits_on_no_track_stay_free():
    assert refine(np.full(16, -1), two_particles(), 1.0, 3).tolist() == [-1] * 16


def test_without_positions_there_is_no_helix():
    bare = TrackHits(None, np.zeros(4, np.int64), np.zeros(4, np.int64))
    with pytest.raises(ValueError, match="no positions"):
        link_greedily(np.array([0]), np.array([1]), bare, 1.0)
    with pytest.raises(ValueError, match="no positions"):
        refine(np.zeros(4, np.int64), bare, 1.0, 3)


# --- a whole event ---------------------------------------------------------------------------------------------------


def test_wrong_segments_with_good_scores_cost_components_far_more_than_grown_tracks():
    hits = simulate_event(3, 2500)
    graph = build_graph(hits, Cuts())
    surface = surface_numbers(hits.volume, hits.layer)
    known = TrackHits(hits.position, surface, hits.module, field_of({}, hits.volume, hits.layer))
    rng = np.random.default_rng(0)
    logits = np.where(graph.label > 0, 3.0, -3.0)
    wrong = np.flatnonzero(graph.label == 0)
    logits[rng.choice(wrong, 300, replace=False)] = 2.0
    pure = {}
    for method in ("cc", "greedy"):
        options = TrackOptions(method, score_cut=0.5)
        tracks = finished(build_tracks(graph.edge_index, logits, known, options), known, options)
        joined = np.stack([tracks, hits.particle_id])[:, tracks >= 0]
        pairs, count = np.unique(joined, axis=1, return_counts=True)
        most = np.zeros(tracks.max() + 1)
        np.maximum.at(most, pairs[0], count)
        pure[method] = most.sum() / np.count_nonzero(tracks >= 0)
    assert pure["cc"] < 0.8 < 0.93 < pure["greedy"]
