"""Helices through the hits of tracks: exact on ideal ones, unmoved by the order of hits, turning with the detector."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from domainpar.tracking.events import detector
from domainpar.tracking.events.detector import GEV_PER_TESLA_MM
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.reco.helix import fit_helices
from domainpar.tracking.reco.hit_table import TrackHits

FLOATS = ("pt", "eta", "phi", "d0", "z0")


def fitted(position, track_id, num_tracks, field=2.0):
    """The columns of the fits by name."""
    nowhere = np.zeros(len(position), np.int64)
    fits = fit_helices(TrackHits(position, nowhere, nowhere, field), track_id, num_tracks)
    names = dict(zip(FLOATS, fits.T, strict=True))
    charge = np.nan_to_num(np.sign(names["pt"]))
    return SimpleNamespace(**names | {"pt": np.abs(names["pt"])}, charge=charge, fitted=np.isfinite(fits[:, 1]))


def ideal(rng, count, hits=8, field=2.0, farthest=900.0):
    """Hits on exact helices that do not curl up: positions, track of each hit, and what they were made from."""
    pt = 10 ** rng.uniform(-0.3, 1.5, count)
    charge = rng.choice([-1, 1], count)
    true = {
        "pt": pt,
        "charge": charge,
        "phi": rng.uniform(-np.pi, np.pi, count),
        "d0": rng.uniform(-5, 5, count),
        "z0": rng.normal(0, 50, count),
        "eta": rng.uniform(-3, 3, count),
    }
    arc = np.sort(rng.uniform(20, farthest, (count, hits)), axis=1)
    curvature = -charge * GEV_PER_TESLA_MM * field / pt
    phi, k = true["phi"][:, None], curvature[:, None]
    x = -true["d0"][:, None] * np.sin(phi) + (np.sin(phi + k * arc) - np.sin(phi)) / k
    y = true["d0"][:, None] * np.cos(phi) - (np.cos(phi + k * arc) - np.cos(phi)) / k
    z = true["z0"][:, None] + np.sinh(true["eta"])[:, None] * arc
    return np.stack([x, y, z], axis=2).reshape(-1, 3), np.repeat(np.arange(count), hits), true


def apart(first, second):
    """Smallest angles between directions."""
    return np.abs((first - second + np.pi) % (2 * np.pi) - np.pi)


@pytest.mark.parametrize("hits", [3, 4, 12])
def test_an_ideal_helix_is_found_exactly(hits):
    position, track_id, true = ideal(np.random.default_rng(hits), 200, hits)
    # Three hits a few mm apart know little; the exactness asked for is that of the formulae.
    spread = np.ptp(np.hypot(position[:, 0], position[:, 1]).reshape(200, hits), axis=1) > 200
    found = fitted(position, track_id, 200)
    assert found.fitted.all()
    assert np.array_equal(found.charge[spread], true["charge"][spread])
    np.testing.assert_allclose(found.pt[spread], true["pt"][spread], rtol=1e-6)
    np.testing.assert_allclose(found.eta[spread], true["eta"][spread], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found.z0[spread], true["z0"][spread], rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(found.d0[spread], true["d0"][spread], rtol=1e-6, atol=1e-5)
    assert apart(found.phi, true["phi"])[spread].max() < 1e-6


def test_the_order_of_hits_does_not_matter():
    rng = np.random.default_rng(1)
    position, track_id, _ = ideal(rng, 50)
    position += rng.normal(0, 0.05, position.shape)
    rows = rng.permutation(len(position))
    first, second = fitted(position, track_id, 50), fitted(position[rows], track_id[rows], 50)
    for name in (*FLOATS, "charge", "fitted"):
        assert np.array_equal(getattr(first, name), getattr(second, name)), name


def test_helices_turn_with_the_detector_and_are_mirrored_with_it():
    rng = np.random.default_rng(2)
    position, track_id, _ = ideal(rng, 50)
    position += rng.normal(0, 0.05, position.shape)
    angle = 2.5
    turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
    plain, turned = fitted(position, track_id, 50), fitted(position @ turn.T, track_id, 50)
    mirrored = fitted(position * [1, -1, 1], track_id, 50)
    for name in ("pt", "eta", "d0", "z0"):
        np.testing.assert_allclose(getattr(turned, name), getattr(plain, name), rtol=1e-6, atol=1e-6, err_msg=name)
    assert apart(turned.phi, plain.phi + angle).max() < 1e-9
    np.testing.assert_allclose(mirrored.d0, -plain.d0, rtol=1e-6, atol=1e-6)
    assert np.array_equal(mirrored.charge, -plain.charge)


def test_d0_is_positive_with_the_beam_to_the_right_and_positive_charges_turn_clockwise():
    arc = np.array([0.0, 100, 200, 300])
    position = np.stack([arc, 4 - 0.0005 * arc**2, 0 * arc], axis=1)  # flies along x, 4 mm to the left of the beam
    found = fitted(position, np.zeros(4, int), 1)
    assert found.d0[0] == pytest.approx(4, abs=0.2)
    assert found.charge[0] == 1
    assert fitted(position, np.zeros(4, int), 1, field=-2.0).charge[0] == -1


def test_straight_lines_have_an_enormous_momentum_and_exact_directions():
    direction = np.array([[0.6, 0.8, 2.0], [-1.0, 0.0, -0.3], [0.0, -1.0, 0.0]])
    steps = np.array([30.0, 70, 110, 170, 500])
    position = (direction[:, None] * steps[None, :, None] + [0, 0, 3.0]).reshape(-1, 3)
    found = fitted(position, np.repeat(np.arange(3), 5), 3)
    assert found.fitted.all()
    assert (found.pt > 1e6).all()
    np.testing.assert_allclose(found.eta, np.arcsinh(direction[:, 2]), atol=1e-9)
    assert apart(found.phi, np.arctan2(direction[:, 1], direction[:, 0])).max() < 1e-9
    np.testing.assert_allclose(found.d0, 0, atol=1e-6)
    np.testing.assert_allclose(found.z0, 3, atol=1e-6)


def test_too_few_hits_or_too_few_places_are_not_fitted_and_disturb_nobody():
    position, track_id, _ = ideal(np.random.default_rng(3), 2, hits=6)
    alone = fitted(position, track_id, 2)
    poor = np.array([[30.0, 1, 5], [70, 2, 9]])  # track 2: two hits; 3: the same two places three times; 4: none
    position = np.concatenate([position, poor, poor[[0, 1, 1, 0]], np.full((4, 3), 50.0), [[1.0, 2, 3]]])
    track_id = np.concatenate([track_id, [2, 2], [3] * 4, [5] * 4, [-1]])
    found = fitted(position, track_id, 6)
    assert found.fitted.tolist() == [True, True, False, False, False, False]
    for name in FLOATS:
        assert np.array_equal(getattr(found, name)[:2], getattr(alone, name)), name
        assert np.isnan(getattr(found, name)[2:]).all(), name
    assert found.charge[2:].tolist() == [0, 0, 0, 0]


def test_a_hit_given_twice_does_not_move_an_ideal_helix():
    position, track_id, true = ideal(np.random.default_rng(4), 20)
    again = np.concatenate([position, position[3::8]])
    found = fitted(again, np.concatenate([track_id, np.arange(20)]), 20)
    np.testing.assert_allclose(found.pt, true["pt"], rtol=1e-6)


@pytest.mark.parametrize("num_tracks", [0, 3])
def test_no_hits_are_no_helices(num_tracks):
    found = fitted(np.empty((0, 3)), np.empty(0, int), num_tracks)
    assert len(found.pt) == num_tracks
    assert not found.fitted.any()


def test_an_event_of_noise_alone_has_no_helices():
    found = fitted(np.random.default_rng(5).normal(0, 100, (30, 3)), np.full(30, -1), 0)
    assert len(found.pt) == 0


def test_a_table_of_the_field_gives_the_mean_over_the_hits():
    position, track_id, _ = ideal(np.random.default_rng(6), 10)
    table = np.array([[-3e4, 1.0], [3e4, 3.0]])
    mean = np.array([2.0 + position[track_id == t, 2].mean() / 3e4 for t in range(10)])
    plain, varied = fitted(position, track_id, 10), fitted(position, track_id, 10, field=table)
    np.testing.assert_allclose(varied.pt, plain.pt * mean / 2.0, rtol=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": np.zeros((4, 2))}, "shape"),
        ({"track_id": np.zeros(3, int)}, "give one to each hit"),
        ({"track_id": np.array([0, 0, 0, 1])}, "with 1 tracks"),
        ({"track_id": np.array([0, 0, 0, -2])}, "-2 to 0"),
        ({"position": np.full((4, 3), np.nan)}, "not finite, first at row 0"),
        ({"field": np.zeros((2, 3))}, "the field has shape"),
    ],
)
def test_what_cannot_be_fitted_is_refused(change, message):
    given = {"position": np.zeros((4, 3)), "track_id": np.zeros(4, int), "num_tracks": 1} | change
    with pytest.raises(ValueError, match=message):
        fitted(**given)


@pytest.fixture(scope="module")
def simulated():
    return simulate_event(77, 30_000)


def errors(event, **options):
    """Errors of the particles above 1 GeV from the beam with at least 5 hits, and their true |eta|."""
    particles = event.particles
    found = fitted(event.position, event.particle_id - 1, len(particles.pt), **options)
    wanted = (particles.pt > 1) & (particles.nhits >= 5) & (np.hypot(*particles.vertex[:, :2].T) < 0.5)
    assert found.fitted[wanted].all()
    made = {
        "pt": found.pt / particles.pt - 1,
        "z0": found.z0 - particles.vertex[:, 2],
        "d0": found.d0,
        "eta": found.eta - particles.eta,
        "right": found.charge == particles.charge,
        "abs_eta": np.abs(particles.eta),
    }
    return {name: values[wanted] for name, values in made.items()}


def test_simulated_particles_are_measured_well(simulated):
    error = errors(simulated, field=detector.geometry().field)
    central = error["abs_eta"] < 1
    assert np.median(np.abs(error["pt"][central])) < 0.02
    assert abs(np.median(error["pt"][central])) < 0.01
    assert np.median(np.abs(error["z0"][central])) < 0.5
    assert np.median(np.abs(error["d0"][central])) < 0.15
    assert np.median(np.abs(error["eta"])) < 0.003
    assert error["right"][error["abs_eta"] < 3].mean() > 0.98


def test_the_field_map_makes_it_better(simulated):
    mapped, even = errors(simulated, field=detector.geometry().field), errors(simulated)
    assert np.median(np.abs(mapped["pt"])) < 0.6 * np.median(np.abs(even["pt"]))
