"""Simulated events: truth, geometry, and likeness to real ones."""

import numpy as np
import pytest

from domainpar.tracking.events import simulate
from domainpar.tracking.events.beam_spot import BeamSpot
from domainpar.tracking.events.construct import Cuts, build_graph
from domainpar.tracking.events.detector import SEED_LAYER_PAIRS, SURFACES, geometry
from domainpar.tracking.events.motion import advance, twisted
from domainpar.tracking.events.simulate import simulate_event

# Mean hits per surface of 55 real events (mean size 101.7 k hits), all barrels and one disk of each kind.
REAL_HITS = {
    (8, 2): 7300, (8, 4): 6178, (8, 6): 5544, (8, 8): 5122, (13, 2): 5959, (13, 4): 5691, (13, 6): 5428,
    (13, 8): 5021, (17, 2): 4656, (17, 4): 4731, (7, 14): 2515, (9, 8): 2076, (12, 12): 1245, (14, 8): 1056,
    (16, 8): 384, (18, 4): 420,
}  # fmt: skip


@pytest.fixture(scope="module")
def full():
    return simulate_event(seed=5, num_hits=101_700)


@pytest.fixture(scope="module")
def small():
    return simulate_event(seed=11, num_hits=5_000)


def columns(hits):
    table = [hits.hit_id, hits.position, hits.volume, hits.layer, hits.module, hits.particle_id, hits.weight]
    return table + [getattr(hits.particles, name) for name in ("pt", "eta", "vertex", "nhits", "charge")]


def test_equal_seeds_give_equal_events_and_unequal_ones_do_not():
    for a, b in zip(columns(simulate_event(3, 1000)), columns(simulate_event(3, 1000)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(simulate_event(3, 1000).position[:20], simulate_event(4, 1000).position[:20])


def test_an_event_does_not_depend_on_the_global_generator():
    np.random.seed(1)  # noqa: NPY002
    first = simulate_event(3, 600).position
    np.random.seed(2)  # noqa: NPY002
    np.testing.assert_array_equal(first, simulate_event(3, 600).position)


@pytest.mark.parametrize("num_hits", [500, 3_000, 30_000])
def test_the_number_of_hits_is_about_the_one_asked_for(num_hits):
    sizes = [len(simulate_event(seed, num_hits)) for seed in range(5)]
    assert abs(np.mean(sizes) / num_hits - 1) < 0.12
    assert len(set(sizes)) > 1


def test_hits_are_numbered_in_detector_order(small):
    np.testing.assert_array_equal(small.hit_id, np.arange(1, len(small) + 1))
    order = np.lexsort((small.module, small.layer, small.volume))
    np.testing.assert_array_equal(order, np.arange(len(small)))


def test_the_particle_table_agrees_with_the_hits(small):
    particles = small.particles
    ids, counts = np.unique(small.particle_id[small.particle_id != 0], return_counts=True)
    np.testing.assert_array_equal(ids, particles.particle_id)
    np.testing.assert_array_equal(counts, particles.nhits)
    assert set(np.unique(particles.charge)) == {-1, 1}
    for values in (particles.pt, particles.eta, particles.vertex):
        assert np.isfinite(values).all()


def test_weights_are_equal_shares_of_particles_with_enough_hits(small):
    nhits = np.concatenate([[0], small.particles.nhits])[small.particle_id]
    counted = nhits >= simulate.MIN_WEIGHTED_HITS
    assert abs(small.weight.sum(dtype=np.float64) - 1) < 1e-5
    assert len(np.unique(small.weight[counted])) == 1
    assert not small.weight[~counted].any()


def test_every_hit_lies_inside_its_module(small):
    modules = geometry().modules
    row = {(m["volume"], m["layer"], m["module"]): i for i, m in enumerate(modules)}
    keys = zip(small.volume, small.layer, small.module, strict=True)
    module = modules[[row[key] for key in keys]]
    away = small.position - module["centre"]
    u, v, w = (np.einsum("ij,ij->i", away, module[axis]) for axis in ("u_axis", "v_axis", "normal"))
    assert np.abs(w).max() < 2e-3
    assert (np.abs(u) <= module["half_outer"] + module["pitch_u"]).all()
    assert (np.abs(v) <= module["half_v"] + module["pitch_v"]).all()


def test_hits_of_prompt_particles_lie_on_a_circle_of_their_transverse_momentum(full):
    """The sagitta of (vertex, 8,8, 13,8): also that positive charges turn clockwise."""
    particles = full.particles
    chosen = (particles.pt > 1) & (np.abs(particles.eta) < 0.8) & (np.hypot(*particles.vertex[:, :2].T) < 0.2)
    measured = []
    for number in particles.particle_id[chosen][:200]:
        mine = full.particle_id == number
        middle = np.flatnonzero(mine & (full.volume == 8) & (full.layer == 8))
        outer = np.flatnonzero(mine & (full.volume == 13) & (full.layer == 8))
        if len(middle) and len(outer):
            a, b = full.position[middle[0], :2].astype(float), full.position[outer[0], :2].astype(float)
            curvature = 2 * (b[0] * a[1] - b[1] * a[0]) / np.linalg.norm(a) / np.linalg.norm(b) / np.linalg.norm(b - a)
            measured.append(curvature * particles.pt[number - 1] * particles.charge[number - 1])
    assert len(measured) > 50
    assert np.median(measured) == pytest.approx(0.299792e-3 * 2.0, rel=0.03)


def test_prompt_particles_beyond_eta_3_leave_no_barrel_hits(full):
    """A property of the real events, seen in the first barrel layer: it ends where |eta| = 3 does."""
    particles = full.particles
    steep = (np.abs(particles.eta) > 3.001) & (np.hypot(*particles.vertex[:, :2].T) < 0.2)
    mine = np.isin(full.particle_id, particles.particle_id[steep])
    assert mine.sum() > 5000
    assert not np.isin(full.volume[mine], (8, 13, 17)).any()


def test_the_truth_order_of_hits_says_nothing_about_noise(full):
    """Of two neighbours on one module, signal and noise come first equally often."""
    same = (np.diff(full.module) == 0) & (np.diff(full.layer) == 0) & (np.diff(full.volume) == 0)
    noise = full.particle_id == 0
    first, second = noise[:-1][same], noise[1:][same]
    assert abs(np.sum(first & ~second) / np.sum(first != second) - 0.5) < 0.03


def test_noise_falls_evenly_on_modules_and_is_a_sixth_of_the_hits(full):
    noise = full.particle_id == 0
    assert np.mean(noise) == pytest.approx(0.175, abs=0.015)
    per_module = np.sum(noise) / 18_728
    for volume, layer, modules in ((8, 2, 224), (17, 4, 3192), (9, 2, 108)):
        count = np.sum(noise & (full.volume == volume) & (full.layer == layer))
        assert abs(count - per_module * modules) < 4 * np.sqrt(per_module * modules)


def test_a_full_event_has_the_hits_per_surface_of_real_ones(full):
    total = sum(REAL_HITS.values())
    found = {key: np.sum((full.volume == key[0]) & (full.layer == key[1])) for key in REAL_HITS}
    scale = total / sum(found.values())
    for key, expected in REAL_HITS.items():
        assert found[key] * scale == pytest.approx(expected, rel=0.2), key


def test_a_full_event_has_the_hits_per_particle_and_overlaps_of_real_ones(full):
    nhits = full.particles.nhits
    assert nhits.mean() == pytest.approx(9.9, rel=0.05)
    assert np.mean(nhits <= 2) == pytest.approx(0.09, abs=0.02)
    assert nhits.max() <= 30
    signal = full.particle_id != 0
    keys = np.stack([full.particle_id, full.volume, full.layer])[:, signal]
    assert np.mean(np.unique(keys, axis=1, return_counts=True)[1] >= 2) == pytest.approx(0.28, abs=0.03)


def test_a_full_event_has_the_graph_of_a_real_one(full):
    """Real events, 52 pairs of layers: about 1.0e-4 edges per pair of hits, 3.7 % of them true, median degree 16."""
    graph = build_graph(full, Cuts(layer_pairs=SEED_LAYER_PAIRS))
    degree = np.bincount(graph.edge_index.ravel(), minlength=len(full))
    assert graph.num_edges / len(full) ** 2 == pytest.approx(1.0e-4, rel=0.12)
    assert graph.label.mean() == pytest.approx(0.037, rel=0.12)
    assert np.median(degree[degree > 0]) == pytest.approx(16, abs=2)


def test_every_surface_is_hit_in_a_full_event(full):
    hit = set(zip(full.volume.tolist(), full.layer.tolist(), strict=True))
    assert hit == {(surface.volume, surface.layer) for surface in SURFACES}


def test_a_steep_or_single_cell_passage_reads_out_the_cell_centre():
    mean = simulate._cell_average(np.array([0.13, 0.26, -0.01]), np.zeros(3), np.full(3, 0.1))
    np.testing.assert_allclose(mean, [0.15, 0.25, -0.05], atol=1e-9)


def test_a_passage_over_cells_is_weighted_by_path_length():
    # From 0.05 to 0.25 over cells of width 0.1: half a cell at 0.05, one at 0.15, half at 0.25.
    np.testing.assert_allclose(simulate._cell_average(np.array([0.15]), np.array([0.2]), np.array([0.1])), [0.15])
    # From 0.09 to 0.12: a third at 0.05, two thirds at 0.15.
    found = simulate._cell_average(np.array([0.105]), np.array([-0.03]), np.array([0.1]))
    np.testing.assert_allclose(found, [0.05 / 3 + 0.15 * 2 / 3])


@pytest.mark.parametrize(
    ("volume", "u_range", "v_range"),
    [
        (8, (0.007, 0.012), (0.002, 0.004)),
        (7, (0.009, 0.014), (0.005, 0.008)),
        (13, (0.011, 0.020), (0.10, 0.25)),
        (17, (0.013, 0.025), (2.3, 3.2)),
        (16, (0.013, 0.030), (2.2, 3.0)),
    ],
)
def test_positions_are_as_wrong_as_measured(volume, u_range, v_range):
    """Median distance in mm from the true crossing, against the resolution of real events in each kind of sensor."""
    generator = np.random.default_rng(0)
    tracks = simulate._draw_tracks(generator, 2000, None)
    _, index, local = simulate._cross_modules(generator, tracks, geometry().field)
    modules = geometry().modules[index]
    away = simulate._read_out(generator, index, local) - modules["centre"]
    chosen = modules["volume"] == volume
    for axis, column, (low, high) in (("u_axis", 0, u_range), ("v_axis", 1, v_range)):
        wrong = np.abs(np.einsum("ij,ij->i", away, modules[axis]) - local[:, column])[chosen]
        assert low < np.median(wrong) < high


def test_a_helix_step_is_exact_and_has_a_straight_limit():
    state = (10.0, -5.0, 1.0, 0.3)
    whole = advance(*state, 0.7, 2e-3, 40.0)
    half = advance(*advance(*state, 0.7, 2e-3, 20.0), 0.7, 2e-3, 20.0)
    np.testing.assert_allclose(whole, half, rtol=1e-12)
    straight = advance(*state, 0.7, 0.0, 40.0)
    np.testing.assert_allclose(straight, (10 + 40 * np.cos(0.3), -5 + 40 * np.sin(0.3), 29.0, 0.3))


def test_a_radial_field_turns_a_flight_and_leaves_its_momentum():
    slope, pt = 2.0, 1.5
    for _ in range(1000):
        slope, less = twisted(slope, 1e-4)
        pt *= less
    assert slope > 2.4
    assert pt * np.hypot(1, slope) == pytest.approx(1.5 * np.hypot(1, 2.0), rel=1e-4)


def test_secondary_vertices_lie_around_the_collisions():
    particles = simulate_event(2, 20_000, beam_spot=BeamSpot(200.0, 5.0)).particles
    away = np.hypot(*particles.vertex[:, :2].T)
    for some in (away < 1, (away > 1) & (away < 40)):
        assert np.median(particles.vertex[some, 2]) == pytest.approx(200.0, abs=20.0)


def test_events_that_cannot_be_are_refused_with_the_value():
    with pytest.raises(ValueError, match="num_hits is 3"):
        simulate_event(0, 3)
    with pytest.raises(ValueError, match="seed is -1"):
        simulate_event(-1)


def test_the_smallest_event_is_an_event():
    hits = simulate_event(0, simulate.MIN_HITS)
    assert build_graph(hits, Cuts()).num_nodes == len(hits)
