"""Candidate edges and labels, against all pairs tried one by one and against events drawn by hand."""

import dataclasses
import re

import numpy as np
import pytest
from marks import fault

from domainpar.common.problems import Problem
from domainpar.tracking.events.construct import Cuts, build_graph, label_note
from domainpar.tracking.events.detector import DEFAULT_LAYER_PAIRS, SURFACES
from domainpar.tracking.events.features import EDGE_FEATURES
from domainpar.tracking.events.graph import Hits, Particles
from domainpar.tracking.events.simulate import simulate_event

NO_PARTICLES = Particles(*(np.zeros(shape) for shape in (0, 0, 0, (0, 3), 0, 0)))


def event(rows, particles=None):
    """Hits from (volume, layer, module, x, y, z, particle) rows."""
    table = np.array(rows, dtype=np.float64).reshape(-1, 7)
    volume, layer, module = (table[:, i].astype(np.int32) for i in range(3))
    ids = np.arange(1, len(table) + 1)
    position = table[:, 3:6].astype(np.float32)
    return Hits("drawn", ids, position, volume, layer, module, table[:, 6].astype(np.int64), None, particles)


def scattered(seed, count=400):
    """Hits anywhere on a few surfaces, so dense in phi that every window is full."""
    generator = np.random.default_rng(seed)
    barrels = [surface for surface in SURFACES if surface.is_barrel]
    chosen = generator.integers(0, len(barrels), count)
    radius = np.array([barrels[i].coordinate for i in chosen]) + generator.uniform(-3, 3, count)
    phi, z = generator.uniform(-np.pi, np.pi, count), generator.uniform(-400, 400, count)
    rows = [
        (barrels[i].volume, barrels[i].layer, 1, r * np.cos(p), r * np.sin(p), height, generator.integers(0, 30))
        for i, r, p, height in zip(chosen, radius, phi, z, strict=True)
    ]
    return event(rows)


def every_pair(hits, cuts):
    """The candidate edges by trying every pair of hits, as a set."""
    x, y, z = hits.position.astype(np.float64).T
    r, phi = np.hypot(x, y), np.arctan2(y, x)
    layer = hits.volume.astype(np.int64) * 100 + hits.layer
    allowed = {(a[0] * 100 + a[1], b[0] * 100 + b[1]) for a, b in cuts.layer_pairs}
    edges = set()
    for src in range(len(hits)):
        dr = r - r[src]
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = np.abs((phi - phi[src] + np.pi) % (2 * np.pi) - np.pi) / dr
            z0 = np.abs(z[src] - r[src] * (z - z[src]) / dr)
        for dst in np.flatnonzero((dr > 0) & (slope < cuts.phi_slope) & (z0 < cuts.z0)):
            if (layer[src], layer[dst]) in allowed:
                edges.add((src, int(dst)))
    return edges


def edge_set(graph):
    return set(zip(*graph.edge_index.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cuts", [Cuts(), Cuts(2e-3, 1000.0), Cuts(5e-2, 1e4)], ids=["default", "wide", "whole turn"])
def test_edges_are_the_pairs_that_pass_the_cuts_each_once(seed, cuts):
    for hits in (scattered(seed), simulate_event(seed, 800)):
        graph = build_graph(hits, cuts)
        assert edge_set(graph) == every_pair(hits, cuts)
        assert graph.num_edges == len(edge_set(graph))


def test_hits_that_nothing_joins_move_the_row_numbers_of_the_others_and_change_nothing_else():
    """So many that the product of two row numbers is no int32 any more."""
    hits, alone = scattered(0), 60_000
    barrel = next(surface for surface in SURFACES if surface.is_barrel)
    phi = np.random.default_rng(0).uniform(-np.pi, np.pi, alone)
    radius = barrel.coordinate
    far = event([(barrel.volume, barrel.layer, 1, radius * np.cos(p), radius * np.sin(p), 1e6, 0) for p in phi])
    names = ("position", "volume", "layer", "module", "particle_id")
    columns = {name: np.concatenate([getattr(far, name), getattr(hits, name)]) for name in names}
    both = dataclasses.replace(hits, hit_id=np.arange(1, alone + len(hits) + 1), **columns)
    expected, graph = build_graph(hits, Cuts(same_layer=True)), build_graph(both, Cuts(same_layer=True))
    src, dst = graph.edge_index
    of_hits = (src >= alone) & (dst >= alone)
    assert np.array_equal(graph.edge_index[:, of_hits] - alone, expected.edge_index)
    assert np.array_equal(graph.edge_features[of_hits], expected.edge_features)
    assert np.array_equal(graph.label[of_hits], expected.label)
    assert ((src < alone) & (dst < alone))[~of_hits].all(), "neighbours on their surface"


def test_edges_cross_the_border_at_half_a_turn():
    hits = event([(8, 2, 1, -32, 0.1, 0, 1), (8, 4, 1, -72, -0.2, 0, 1)])
    graph = build_graph(hits, Cuts())
    assert edge_set(graph) == {(0, 1)}
    assert abs(graph.edge_features[0, EDGE_FEATURES.index("dphi")]) < 0.01


@pytest.mark.parametrize("seed", range(3))
def test_half_a_turn_of_the_event_changes_no_edge_and_no_label(seed):
    hits = simulate_event(seed, 6000)
    turned = dataclasses.replace(
        hits,
        position=hits.position * np.array([-1, -1, 1], np.float32),
        particles=dataclasses.replace(hits.particles, vertex=hits.particles.vertex * np.array([-1, -1, 1], np.float32)),
    )
    a, b = build_graph(hits, Cuts(same_layer=True)), build_graph(turned, Cuts(same_layer=True))
    assert edge_set(a) == edge_set(b)
    assert a.label.sum() == b.label.sum()


def test_edges_run_outward_along_a_listed_layer_pair():
    hits = simulate_event(1, 20_000)
    graph = build_graph(hits, Cuts())
    src, dst = graph.edge_index
    radius = np.hypot(hits.position[:, 0], hits.position[:, 1])
    assert (radius[dst] > radius[src]).all()
    layers = np.stack([hits.volume[src], hits.layer[src], hits.volume[dst], hits.layer[dst]], axis=1)
    allowed = {(*a, *b) for a, b in DEFAULT_LAYER_PAIRS}
    assert {tuple(row) for row in np.unique(layers, axis=0).tolist()} <= allowed


def test_the_order_of_hits_does_not_matter():
    hits = simulate_event(2, 3000)
    order = np.random.default_rng(0).permutation(len(hits))
    names = ("hit_id", "position", "volume", "layer", "module", "particle_id", "weight")
    mixed = dataclasses.replace(hits, **{name: getattr(hits, name)[order] for name in names})
    a, b = build_graph(hits, Cuts(same_layer=True)), build_graph(mixed, Cuts(same_layer=True))

    def by_id(graph):
        return set(zip(*graph.hits.hit_id[graph.edge_index].tolist(), graph.label.tolist(), strict=True))

    assert by_id(a) == by_id(b)


# --- same-layer edges


def test_same_layer_edges_come_only_on_request_and_join_modules_of_one_surface():
    hits = simulate_event(3, 40_000)
    plain, more = build_graph(hits, Cuts()), build_graph(hits, Cuts(same_layer=True))
    np.testing.assert_array_equal(more.edge_index[:, : plain.num_edges], plain.edge_index)
    src, dst = more.edge_index[:, plain.num_edges :]
    assert len(src) > 1000
    assert (hits.volume[src] == hits.volume[dst]).all()
    assert (hits.layer[src] == hits.layer[dst]).all()
    assert (hits.module[src] != hits.module[dst]).all()
    distance = np.linalg.norm(hits.position, axis=1)
    assert (distance[dst] >= distance[src] - 1e-3).all()
    pairs = np.sort(more.edge_index[:, plain.num_edges :], axis=0)
    assert np.unique(pairs, axis=1).shape == pairs.shape


def test_same_layer_edges_find_the_overlaps_of_particles_above_half_a_gev():
    hits = simulate_event(3, 40_000)
    graph = build_graph(hits, Cuts(same_layer=True))
    found = {tuple(sorted(edge)) for edge in edge_set(graph)}
    number = np.concatenate([[0], hits.particles.pt])[hits.particle_id]
    rows = np.flatnonzero((number > 0.5) & (hits.volume <= 9))
    keys = np.stack([hits.particle_id, hits.volume, hits.layer], axis=1)[rows]
    order = np.lexsort(keys.T)
    same = (np.diff(keys[order], axis=0) == 0).all(axis=1)
    overlaps = [tuple(sorted(pair)) for pair in zip(rows[order][:-1][same], rows[order][1:][same], strict=True)]
    assert len(overlaps) > 500
    assert np.mean([pair in found for pair in overlaps]) > 0.95


# --- labels


LINE = [(8, 2, 1, 32, 0, 0, 7), (8, 4, 1, 72, 0, 0, 7), (8, 6, 1, 116, 0, 0, 7), (8, 8, 1, 172, 0, 0, 7),
        (13, 2, 1, 260, 0, 0, 7)]  # fmt: skip


def true_edges(hits, cuts=None):
    graph = build_graph(hits, cuts or Cuts())
    return {
        edge for edge, label in zip(zip(*graph.edge_index.tolist(), strict=True), graph.label, strict=True) if label
    }


def test_a_particle_s_edges_are_true_where_no_surface_lies_between():
    assert edge_set(build_graph(event(LINE), Cuts())) == {(0, 1), (1, 2), (2, 3), (3, 4), (2, 4)}
    assert true_edges(event(LINE)) == {(0, 1), (1, 2), (2, 3), (3, 4)}


def test_an_edge_over_a_missed_surface_is_true():
    assert true_edges(event([row for row in LINE if row[1] != 8])) == {(0, 1), (1, 2), (2, 3)}


def test_both_hits_of_an_overlap_are_next_to_the_neighbouring_surfaces():
    overlap = (8, 4, 2, 73, 0.1, 0, 7)
    assert true_edges(event([LINE[0], LINE[1], overlap, LINE[2]])) == {(0, 1), (0, 2), (1, 3), (2, 3)}
    assert (1, 2) in true_edges(event([LINE[0], LINE[1], overlap, LINE[2]]), Cuts(same_layer=True))


def test_a_group_stands_where_its_nearest_hit_is():
    far = (8, 4, 3, 0, 72, 400, 7)
    assert true_edges(event([*LINE[:3], far])) == {(0, 1), (1, 2)}


def test_noise_and_hits_of_two_particles_make_no_true_edge():
    assert not true_edges(event([(*row[:6], 0) for row in LINE]))
    assert not true_edges(event([(*row[:6], i + 1) for i, row in enumerate(LINE)]))


def particle_from(vertex):
    column = np.zeros(1)
    return Particles(np.array([7]), column, column, np.array([vertex], np.float32), column, column)


def test_hits_are_ordered_by_distance_from_the_production_vertex():
    inward_first = event(LINE[:3], particle_from((71.0, 0.0, 0.0)))
    assert true_edges(inward_first) == {(0, 1)}
    assert true_edges(event(LINE[:3], particle_from((0.0, 0.0, 0.0)))) == {(0, 1), (1, 2)}


def test_without_a_vertex_hits_are_ordered_from_the_origin_and_the_note_says_so():
    unknown = event(LINE[:3], particle_from((np.nan, 0.0, 0.0)))
    assert true_edges(unknown) == true_edges(event(LINE[:3])) == {(0, 1), (1, 2)}
    for hits in (unknown, event(LINE), event(LINE, NO_PARTICLES)):
        assert "from the origin" in label_note(hits)
    assert label_note(event(LINE, particle_from((0.0, 0.0, 0.0)))).endswith("from its production vertex")
    assert "2 of 7 hits" in label_note(event([*LINE, *((*row[:6], 8) for row in LINE[:2])], particle_from((0, 0, 0))))


def test_without_truth_there_are_edges_but_no_labels():
    hits = dataclasses.replace(event(LINE), particle_id=None)
    graph = build_graph(hits, Cuts())
    assert graph.num_edges == 5
    assert graph.label is None
    assert label_note(hits) is None


# --- features


def test_features_are_scaled_and_agree_with_their_definitions():
    hits = simulate_event(7, 4000)
    graph = build_graph(hits, Cuts())
    r, phi, z = graph.features.astype(np.float64).T
    x, y = hits.position[:, 0] / 1000, hits.position[:, 1] / 1000
    np.testing.assert_allclose(r, np.hypot(x, y), rtol=1e-6)
    np.testing.assert_allclose(phi, np.arctan2(y, x) / np.pi, atol=1e-6)
    np.testing.assert_allclose(z, hits.position[:, 2] / 1000, rtol=1e-6)
    src, dst = graph.edge_index
    dr, dphi, dz, deta, slope, r_slope = graph.edge_features.astype(np.float64).T
    np.testing.assert_allclose(dr, r[dst] - r[src], atol=1e-6)
    np.testing.assert_allclose(dphi, (phi[dst] - phi[src] + 1) % 2 - 1, atol=1e-6)
    np.testing.assert_allclose(dz, z[dst] - z[src], atol=1e-6)
    np.testing.assert_allclose(deta, np.arcsinh(z / r)[dst] - np.arcsinh(z / r)[src], atol=1e-5)
    np.testing.assert_allclose(slope, dphi / dr, rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(r_slope, (r[src] + r[dst]) / 2 * slope, rtol=1e-5)


@fault(22)
def test_features_stay_finite_and_clamped_at_equal_radius_and_on_the_beam():
    rows = [(8, 2, 1, 32, 0, 0, 1), (8, 2, 2, 32, 0, 0.01, 1), (8, 2, 3, 0, 0, 5, 1),
            (13, 2, 1, 260, 0.1, 0, 2), (13, 2, 2, 260, -0.1, 0, 2)]  # fmt: skip
    graph = build_graph(event(rows), Cuts(same_layer=True))
    assert {(0, 1)} < edge_set(graph)
    assert np.isfinite(graph.features).all()
    assert np.isfinite(graph.edge_features).all()
    slope = dict(zip(zip(*graph.edge_index.tolist(), strict=True), graph.edge_features[:, 4], strict=True))
    assert slope[0, 1] == 0
    assert np.abs(graph.edge_features[:, 4]).max() == 100


def test_an_event_without_hits_is_a_graph_without_edges():
    graph = build_graph(event([]), Cuts(same_layer=True))
    assert graph.edge_index.shape == (2, 0)
    assert graph.edge_features.shape == (0, 6)
    assert graph.features.shape == (0, 3)
    assert len(graph.label) == 0


# --- bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": None}, "hits have no positions"),
        ({"position": np.full((5, 3), np.nan, np.float32)}, "position holds 15 .*nan at"),
        ({"position": np.zeros((4, 3), np.float32)}, r"position .*\[4, 3\], .* \[5, 3\]"),
        ({"position": np.zeros((5, 2), np.float32)}, r"position .*\[5, 2\]"),
        ({"hit_id": np.array([1, 2, 2, 3, 4])}, "1 hit ids .*2"),
        ({"module": np.zeros(3, np.int32)}, r"module .*\[3\], .*\[5\]"),
        ({"layer": np.array([2, 4, 5, 8, 2], np.int32)}, r"1 of 5 hits .*: 8\.5 \(1\)"),
    ],
)
def test_hits_that_cannot_be_joined_are_refused_with_event_and_value(change, message):
    with pytest.raises(ValueError, match=message):
        build_graph(dataclasses.replace(event(LINE), **change), Cuts())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"phi_slope": 0.0}, "phi_slope is 0.0"),
        ({"z0": np.inf}, "z0 is inf"),
        ({"layer_pairs": (((8, 2), (8, 2)),)}, "joins a layer to itself"),
        ({"layer_pairs": (((8, 2), (8, 4)),) * 2}, "given twice"),
    ],
)
def test_cuts_that_mean_nothing_are_refused_with_the_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        Cuts(**arguments)


def test_of_another_detector_all_layers_without_a_pair_are_named_with_the_flag_that_helps():
    rows = [(101, 2, 1, 30, 0, 0, 7), (101, 4, 1, 60, 0, 0, 7), (101, 4, 2, 60, 1, 0, 7), (8, 8, 1, 172, 0, 0, 7)]
    for pairs, hits, listed, whose in (
        (Cuts().layer_pairs, 3, "101.2 (1), 101.4 (2)", "no layer pair"),
        ((((101, 2), (8, 8)),), 2, "101.4 (2)", "--layer-pairs"),
    ):
        with pytest.raises(Problem) as refused:
            build_graph(event(rows), Cuts(layer_pairs=pairs))
        assert re.fullmatch(rf"{hits} of 4 hits .*{whose}.*: {re.escape(listed)}", refused.value.what)
        assert "--layer-pairs '101." in refused.value.hint


def test_layer_pairs_of_another_detector_work_also_where_an_event_has_no_hits_on_one():
    rows = [(1, 1, 1, 30, 0, 0, 7), (1, 2, 1, 60, 0, 0, 7)]
    assert true_edges(event(rows), Cuts(layer_pairs=(((1, 1), (1, 2)),))) == {(0, 1)}
    assert true_edges(event(rows), Cuts(layer_pairs=(((1, 1), (1, 2)), ((1, 2), (1, 3))))) == {(0, 1)}
