"""Segments are pairs of hits on consecutive surfaces along a target; graph construction finds them or loses them."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from drawn_tracks import table

from domainpar.tracking.events.construct import Cuts, build_graph
from domainpar.tracking.events.graph import surface_numbers
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.reco.performance.lost import TrueSegments, count_segments
from domainpar.tracking.reco.performance.truth import EventTruth

"""
Particle 1 along x: hits 0 | 1, 2 (one surface) | 3, and noise 4; particle 2: hits 5 | 6.
"""
X = [10, 20, 20.5, 30, 40, 10, 20]
TRUTH = EventTruth(
    particle_id=np.array([1, 1, 1, 1, 0, 2, 2]),
    surface=np.array([8, 4, 4, 2, 1, 8, 4]),
    position=np.array([[x, 0, 0] for x in X], np.float32),
    particles=table([1, 2], [4, 2], pt=[2.0, 0.5]),
)


def counted(edges, target=None, passing=None, truth=TRUTH):
    edge_index = np.array(edges, np.int64).reshape(-1, 2).T
    found = count_segments(truth, edge_index, target or {}, passing)
    return found.segments, found.in_graph, found.passing


def test_segments_join_consecutive_surfaces_and_edges_find_each_once():
    assert counted([]) == (5, 0, 0)  # 0-1, 0-2, 1-3, 2-3 and 5-6
    assert counted([(0, 1), (1, 0), (0, 1)]) == (5, 1, 1)
    assert counted([(0, 1), (0, 2), (1, 3), (2, 3), (5, 6)]) == (5, 5, 5)
    # one surface, a surface left out, noise, another particle, itself
    assert counted([(1, 2), (0, 3), (3, 4), (0, 6), (5, 5)]) == (5, 0, 0)


def test_only_targets_count():
    assert counted([(0, 1), (5, 6)], {"pt": [1, 9]}) == (4, 1, 1)
    assert counted([(0, 1), (5, 6)], {"pt": [3, 9]}) == (0, 0, 0)


def test_passing_edges_are_counted_against_all_segments():
    edges = [(0, 1), (0, 1), (2, 3), (0, 3)]
    assert counted(edges, passing=np.array([False, True, False, True])) == (5, 2, 1)
    found = count_segments(TRUTH, np.array(edges).T, {}, np.array([False, True, False, True]))
    assert (found.construction_efficiency, found.cumulative_efficiency) == (2 / 5, 1 / 5)


def test_surfaces_are_ordered_from_the_production_vertex():
    far = replace(TRUTH.particles, vertex=np.array([[22, 0, 0], [np.nan, 0, 0]], np.float32))
    # From x = 22 the surfaces follow as 20, 30 and 10: 1-3 and 2-3 stay, then 3-0.
    assert counted([(0, 1), (1, 3), (0, 3)], truth=replace(TRUTH, particles=far)) == (4, 2, 2)


def test_no_particles_no_positions_and_no_hits_have_no_segments():
    assert counted([(0, 1)], truth=replace(TRUTH, particle_id=np.zeros(7, np.int64))) == (0, 0, 0)
    assert count_segments(replace(TRUTH, position=None), np.zeros((2, 0), np.int64), {}) is None
    nothing = EventTruth(np.zeros(0, np.int64), np.zeros(0, np.int64), position=np.zeros((0, 3), np.float32))
    found = count_segments(nothing, np.zeros((2, 0), np.int64), {})
    assert found == TrueSegments(0, 0, 0)
    assert (found.construction_efficiency, found.cumulative_efficiency) == (None, None)


def test_sums_are_counts_of_both():
    assert TrueSegments(5, 3, 2) + TrueSegments(1, 1, 0) == TrueSegments(6, 4, 2)


@pytest.mark.parametrize("seed", [1, 2])
def test_segments_in_the_graph_are_its_labels_between_surfaces(seed):
    hits = simulate_event(seed, 1500)
    surface = surface_numbers(hits.volume, hits.layer)
    truth = EventTruth(hits.particle_id, surface, position=hits.position, particles=hits.particles)
    graph = build_graph(hits, Cuts(phi_slope=2e-3, same_layer=True))
    between = surface[graph.edge_index[0]] != surface[graph.edge_index[1]]
    labelled = np.flatnonzero((graph.label > 0) & between)
    found = count_segments(truth, graph.edge_index, {}, graph.label > 0)
    assert found.segments > found.in_graph == found.passing > 300
    assert found.in_graph == len({tuple(sorted(pair)) for pair in graph.edge_index[:, labelled].T.tolist()})
    assert found.segments == plain_segments(hits, surface)


def plain_segments(hits, surface):
    count = 0
    for row, particle in enumerate(hits.particles.particle_id):
        of_particle = np.flatnonzero(hits.particle_id == particle)
        distance = np.linalg.norm(hits.position[of_particle] - hits.particles.vertex[row].astype(float), axis=1)
        visited = list(dict.fromkeys(surface[of_particle[np.argsort(distance, kind="stable")]].tolist()))
        on = [int(np.sum(surface[of_particle] == each)) for each in visited]
        count += sum(a * b for a, b in itertools.pairwise(on))
    return count
