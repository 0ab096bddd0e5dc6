"""Parameters of tracks at the beam line: against an integrator that uses nothing of the fit, and simulated truth."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from domainpar.testing import patient
from domainpar.tracking.events import detector
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.graph import surface_numbers
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.reco import perigee
from domainpar.tracking.reco.ckf.detector_layout import layout_of
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.kalman import ENERGY_LOSS, PION
from domainpar.tracking.reco.perigee import NAMES, fit_perigees, flown_back

RADII, PLANES = (33, 70, 115, 170, 260, 380, 520, 700, 900), (300, 420, 560, 720, 900, 1150, 1400, 1700, 2000)
ERRORS = [(0.012, 0.05)] * 4 + [(0.03, 0.12)] * 5
BARRELS = [(1, i, "barrel", r, -3000.0, 3000.0, *ERRORS[i], 1) for i, r in enumerate(RADII)]
UNLIKE = [(*row, 0.005 if row[3] < 200 else 0.06) for row in BARRELS]  # light inside, heavy outside
DISKS = [(2, i, "disk", z, 5.0, 1100.0, 0.015, 0.06, 1) for i, z in enumerate(PLANES)]


def solenoid():
    """A field that falls along z, with the radial part that keeps it free of divergence near the beam."""
    r, z = np.meshgrid(np.linspace(0, 1200, 61), np.linspace(-3200, 3200, 257), indexing="ij")
    bz = 2 / (1 + (z / 2500) ** 4) * np.ones_like(r)
    slope = -2 / (1 + (z / 2500) ** 4) ** 2 * 4 * z**3 / 2500**4
    return Field(20.0, -3200.0, 25.0, bz, -0.5 * r * slope)


FIELDS = {
    "one number": Field.of(2.0),
    "the other way": Field.of(-1.5),
    "table": Field.along([-3000, 0, 3000], [0.6, 2.1, 0.9]),
    "map": solenoid(),
}


def field_of(field, at):
    """B in T at points [N, 3], [N, 3]."""
    bz, br = field.at(at)
    r = np.maximum(np.hypot(at[:, 0], at[:, 1]), 1e-9)
    return np.stack([br * at[:, 0] / r, br * at[:, 1] / r, bz], axis=1)


def flown(at, p, charge, s, field):
    """Points and momenta (GeV) after the path lengths s in mm, by one step of Runge-Kutta for each."""

    def slope(at, p):
        unit = p / np.linalg.norm(p, axis=1, keepdims=True)
        return unit, 0.299792458e-3 * charge[:, None] * np.cross(unit, field_of(field, at))

    s = s[:, None]
    v1, f1 = slope(at, p)
    v2, f2 = slope(at + s / 2 * v1, p + s / 2 * f1)
    v3, f3 = slope(at + s / 2 * v2, p + s / 2 * f2)
    v4, f4 = slope(at + s * v3, p + s * f3)
    return at + s / 6 * (v1 + 2 * v2 + 2 * v3 + v4), p + s / 6 * (f1 + 2 * f2 + 2 * f3 + f4)


def flown_to(at, p, charge, field, surface):
    """To a cylinder or a plane; steps of 10 mm at most."""
    for _ in range(400):
        unit = p / np.linalg.norm(p, axis=1, keepdims=True)
        if surface[2] == "barrel":
            r = np.hypot(at[:, 0], at[:, 1])
            left, rate = surface[3] - r, (at[:, 0] * unit[:, 0] + at[:, 1] * unit[:, 1]) / np.maximum(r, 1e-6)
        else:
            left, rate = surface[3] - at[:, 2], unit[:, 2]
        if np.abs(left).max() < 1e-7:
            return at, p
        s = np.clip(left / np.maximum(rate, 0.2), -10, 10)
        at, p = flown(at, p, charge, s, field)
    raise AssertionError("it does not get there")


def particles(number, seed, low, high, displaced=0.05):
    """Parameters at the beam line of particles with |eta| from low to high, [N, 5], by definition of a perigee."""
    generator = np.random.default_rng(seed)
    eta = generator.uniform(low, high, number)
    p = generator.uniform(1.0, 10.0, number) * np.cosh(eta)
    phi, charge = generator.uniform(-np.pi, np.pi, number), generator.choice([-1, 1], number)
    d0, z0 = generator.normal(0, displaced, number), generator.normal(0, 30.0, number)
    return np.stack([d0, z0, phi, 2 * np.arctan(np.exp(-eta)), charge / p], axis=1)


def hits_of(truth, field, surfaces, seed=None):
    """Hits of particles on surfaces, exact without a seed; with one they scatter, lose energy and are measured."""
    generator = np.random.default_rng(seed)
    d0, z0, phi, theta, qop = truth.T
    charge, momentum = np.sign(qop), np.abs(1 / qop)
    at = np.stack([-d0 * np.sin(phi), d0 * np.cos(phi), z0], axis=1)
    p = momentum[:, None] * np.stack([np.sin(theta) * np.cos(phi), np.sin(theta) * np.sin(phi), np.cos(theta)], axis=1)
    position = []
    for surface in surfaces:
        at, p = flown_to(at, p, charge, field, surface)
        hit, r = at.copy(), np.hypot(at[:, 0], at[:, 1])[:, None]
        out = np.concatenate([at[:, :2] / r, np.zeros_like(r)], axis=1)
        along = np.cross([0, 0, 1.0], out)
        # The fit takes the energy that a pion loses from what it measures, so it is always lost here.
        size = np.linalg.norm(p, axis=1, keepdims=True)
        material = surface[9] if len(surface) > 9 else detector.MATERIAL
        # Of a barrel it passes more the flatter it flies, of a disk the steeper.
        path = size / (np.abs(p[:, 2:]) if surface[2] == "disk" else np.hypot(p[:, :1], p[:, 1:2]))
        lost = p * (1 - ENERGY_LOSS * path * material * (1 + (PION / size) ** 2) ** 1.5 / size)
        if seed is not None:
            hit += along * generator.normal(0, surface[6], (len(at), 1))
            hit += (out if surface[2] == "disk" else np.array([0, 0, 1.0])) * generator.normal(
                0, surface[7], (len(at), 1)
            )
            across = np.cross([0, 0, 1.0], p)
            across /= np.linalg.norm(across, axis=1, keepdims=True)
            kicks = generator.normal(0, 1, (2, len(at), 1)) * 0.0136 * np.sqrt(path * material) / size
            lost = lost + size * (kicks[0] * across + kicks[1] * np.cross(p / size, across))
        p = lost
        position.append(hit)
    layout = layout_of({"surfaces": [list(row) for row in surfaces]})
    numbers = surface_numbers(*np.array([row[:2] for row in surfaces]).T)
    tracks = np.tile(np.arange(len(truth)), len(surfaces))
    hits = TrackHits(
        np.concatenate(position), np.repeat(numbers, len(truth)), np.zeros(len(tracks), int), field, layout
    )
    return hits, tracks


def fitted(fit):
    return np.isfinite(fit.value).all(axis=1)


def residuals(fit, truth):
    difference = fit.value - truth
    difference[:, 2] = (difference[:, 2] + np.pi) % (2 * np.pi) - np.pi
    return difference


def pulls(fit, truth):
    return residuals(fit, truth) / np.sqrt(np.einsum("tii->ti", fit.covariance))


def width(values):
    """Half of the interval that holds 68.3 %, of each column."""
    low, high = np.quantile(values, [0.1587, 0.8413], axis=0)
    return (high - low) / 2


@pytest.mark.parametrize(("surfaces", "eta"), [(BARRELS, (-1.0, 1.0)), (DISKS, (1.5, 2.3))], ids=["barrels", "disks"])
@pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS)
def test_exact_hits_give_the_parameters_that_an_integrator_began_with(field, surfaces, eta):
    truth = particles(60, 1, *eta, displaced=1.0)
    fit = fit_perigees(*hits_of(truth, field, surfaces), len(truth))
    assert fitted(fit).all()
    # A twentieth of what measurement and scattering allow, at most.
    assert np.abs(pulls(fit, truth)).max() < 0.05


@pytest.mark.parametrize(
    ("surfaces", "eta"),
    [(BARRELS, (-1.0, 1.0)), (DISKS, (1.5, 2.3)), (UNLIKE, (-1.0, 1.0))],
    ids=["barrels", "disks", "unlike"],
)
@pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS)
def test_pulls_of_measured_hits_have_mean_0_and_width_1(field, surfaces, eta):
    truth = particles(1500, 2, *eta)
    fit = fit_perigees(*hits_of(truth, field, surfaces, seed=3), len(truth))
    pull = pulls(fit, truth)
    assert np.abs(pull.mean(axis=0)).max() < 0.12, dict(zip(NAMES, pull.mean(axis=0)))
    assert np.abs(width(pull) - 1).max() < 0.1, dict(zip(NAMES, width(pull)))
    assert abs(np.mean(fit.chi2 / fit.ndf) - 1) < 0.08
    # All five together: chi^2 with five degrees of freedom, so correlations are right, too.
    difference = residuals(fit, truth)
    together = np.einsum("ti,tij,tj->t", difference, np.linalg.inv(fit.covariance), difference)
    assert abs(np.median(together) / 4.351 - 1) < 0.1


@pytest.fixture(scope="module")
def simulated():
    """Hits, tracks and particles of four built-in events."""
    events = [simulate_event(seed, 60_000) for seed in range(4)]
    columns = [(event.position, surface_numbers(event.volume, event.layer), event.module) for event in events]
    hits = [TrackHits(*of_event, detector.geometry().field) for of_event in columns]
    return [(of_event, event.particle_id - 1, event.particles) for of_event, event in zip(hits, events)]


def test_pulls_of_simulated_events_have_mean_0_and_width_1(simulated):
    all_pulls = []
    for hits, tracks, particles in simulated:
        fit = fit_perigees(hits, tracks, len(particles.pt))
        x, y, z = particles.vertex.astype(float).T
        slope, phi = np.sinh(particles.eta.astype(float)), particles.phi.astype(float)
        # So near to the beam line the helix is straight.
        counted = (particles.pt > 1) & (particles.nhits >= 6) & (np.hypot(x, y) < 1)
        d0, z0 = y * np.cos(phi) - x * np.sin(phi), z - slope * (x * np.cos(phi) + y * np.sin(phi))
        qop = particles.charge / (particles.pt * np.hypot(1, slope))
        truth = np.stack([d0, z0, phi, np.arctan2(1, slope), qop], axis=1)
        assert fitted(fit)[counted].mean() > 0.999
        all_pulls.append(pulls(fit, truth)[counted & fitted(fit)])
    pull = np.concatenate(all_pulls)
    assert len(pull) > 1500
    assert np.abs(np.median(pull, axis=0)).max() < 0.1
    assert (width(pull) > 0.9).all(), dict(zip(NAMES, width(pull)))
    assert (width(pull) < 1.2).all(), dict(zip(NAMES, width(pull)))


def test_neither_the_order_of_hits_nor_the_other_tracks_change_a_bit(simulated):
    hits, tracks, particles = simulated[0]
    fit = fit_perigees(hits, tracks, len(particles.pt))
    order = np.random.default_rng(0).permutation(len(hits))
    mixed = replace(hits, **{name: getattr(hits, name)[order] for name in ("position", "surface", "module")})
    again = fit_perigees(mixed, tracks[order], len(particles.pt))
    some = np.where(tracks % 3 == 0, tracks // 3, -1)
    alone = fit_perigees(hits, some, some.max() + 1)
    # By rows: a track whose hits lie on two tracks has both.
    rows = np.concatenate([np.arange(len(hits)), np.flatnonzero(tracks == 7)])
    twice = fit_perigees(
        hits, np.append(tracks, np.full(len(rows) - len(hits), len(particles.pt))), len(particles.pt) + 1, rows
    )
    for name in ("value", "covariance", "chi2", "ndf"):
        values = getattr(fit, name)
        assert values.tobytes() == getattr(again, name).tobytes()
        assert values[::3].tobytes() == getattr(alone, name).tobytes()
        assert values[7].tobytes() == getattr(twice, name)[-1].tobytes()


@pytest.mark.filterwarnings("error")
def test_hits_of_no_one_particle_have_a_fit_with_positive_variances_or_none(simulated):
    hits = simulated[0][0]
    for number in (6000, 3000, 300):
        tracks = np.random.default_rng(number).integers(-1, number, len(hits))
        position = hits.position.copy()
        position[::7], position[::11] = position[0], 0.0
        fit = fit_perigees(replace(hits, position=position), tracks, number)
        there = fitted(fit)
        assert 0 < there.sum() < number
        assert (np.einsum("tii->ti", fit.covariance[there]) > 0).all()
        assert np.isfinite(fit.covariance[there]).all()
        assert np.isnan(fit.covariance[~there]).all()
        assert np.isnan(fit.value[~there]).all()
        assert np.array_equal(np.isfinite(fit.chi2), there)


@pytest.mark.parametrize("bz", [2.0, -2.0])
@pytest.mark.parametrize("charge", [1, -1])
@pytest.mark.parametrize("d0", [1.0, -1.0])
def test_signs_are_those_of_a_perigee_of_acts(d0, charge, bz):
    # Along x at y = d0: the track passes the beam line on its left side (z x p . r > 0) for positive d0.
    truth = np.array([[d0, 5.0, 0.0, np.pi / 2, charge / 2.0]])
    hits, tracks = hits_of(truth, Field.of(bz), BARRELS)
    # The force q v x B bends a positive charge towards -y in a field along +z.
    assert np.sign(hits.position[-1, 1] - d0) == -charge * np.sign(bz)
    fit = fit_perigees(hits, tracks, 1)
    np.testing.assert_allclose(fit.value, truth, atol=2e-3)


def test_tracks_without_a_helix_are_not_fitted_and_say_so():
    truth = particles(3, 5, -1, 1)
    hits, tracks = hits_of(truth, Field.of(2.0), BARRELS)
    rows = np.flatnonzero((tracks != 1) | (hits.surface == hits.surface[0]))  # track 1 has one hit
    few = replace(hits, **{name: getattr(hits, name)[rows] for name in ("position", "surface", "module")})
    fit = fit_perigees(few, tracks[rows], 4)
    assert fitted(fit).tolist() == [True, False, True, False]
    assert np.isnan(fit.covariance[1]).all()
    assert np.isnan(fit.chi2[[1, 3]]).all()
    with pytest.raises(ValueError, match="positions"):
        fit_perigees(replace(few, position=None), tracks[rows], 4)


def test_covariances_are_carried_over_by_the_derivatives_of_the_parameters():
    reference = np.array([3.0, 0.4, 2e-4, 20.0, 1.7])

    def parameters(state):
        """Of a straight track that is moved and turned about the reference's closest point, by their definition."""
        y, turn, k, z, slope = state - np.array([reference[0], reference[1], 0, 0, 0])
        at = (reference[0] + y) * np.array([-np.sin(reference[1]), np.cos(reference[1])])
        phi = reference[1] + turn
        ahead = at @ np.array([np.cos(phi), np.sin(phi)])
        d0 = at @ np.array([-np.sin(phi), np.cos(phi)])
        return np.array([d0, z - slope * ahead, phi, np.arctan2(1, slope), -k / 0.299792e-3 / np.hypot(1, slope)])

    steps = np.diag([1e-4, 1e-6, 1e-9, 1e-4, 1e-6])
    by = np.stack([(parameters(reference + d) - parameters(reference - d)) / (2 * d.sum()) for d in steps], axis=1)
    root = np.random.default_rng(1).normal(size=(5, 5)) * [0.01, 1e-3, 1e-6, 0.1, 1e-3]
    np.testing.assert_allclose(perigee._parameters(reference[None])[0], parameters(reference), rtol=1e-9)
    covariance = perigee._carried_over(reference[None], (root.T @ root)[None])[0]
    np.testing.assert_allclose(covariance, by @ root.T @ root @ by.T, rtol=1e-4)


@pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS)
def test_particles_that_began_elsewhere_are_flown_back_to_the_parameters_of_their_helix(field):
    truth = particles(50, 7, -1.5, 1.5, displaced=10.0)
    d0, z0, phi, theta, qop = truth.T
    at = np.stack([-d0 * np.sin(phi), d0 * np.cos(phi), z0], axis=1)
    p = (
        np.stack([np.sin(theta) * np.cos(phi), np.sin(theta) * np.sin(phi), np.cos(theta)], axis=1)
        / np.abs(qop)[:, None]
    )
    for _ in range(20):  # to 200 mm along the way
        at, p = flown(at, p, np.sign(qop), np.full(len(at), 10.0), field)
    pt = np.hypot(p[:, 0], p[:, 1])
    begun = np.column_stack([at, np.arctan2(p[:, 1], p[:, 0]), pt, np.arcsinh(p[:, 2] / pt), np.sign(qop)])
    np.testing.assert_allclose(flown_back(begun, field), truth, rtol=1e-4, atol=0.02)
    begun[3, 3], begun[4, 6] = np.nan, 0
    assert np.isnan(flown_back(begun, field)).all(axis=1).tolist() == [3 <= i <= 4 for i in range(len(begun))]


def all_bits():
    """A hash of fits, and of particles flown back."""
    truth = particles(40, 9, -1.0, 1.0)
    fit = fit_perigees(*hits_of(truth, FIELDS["table"], BARRELS), len(truth))
    begun = np.column_stack([np.zeros((40, 3)), truth[:, 2], np.full(40, 2.0), np.linspace(-2, 2, 40), np.ones(40)])
    tables = fit.value, fit.covariance, fit.chi2, flown_back(begun + 0.5, FIELDS["table"])
    return hashlib.sha256(b"".join(table.tobytes() for table in tables)).hexdigest()


def test_no_bit_depends_on_what_becomes_of_memory_that_was_freed():
    """Nothing is read before it is written; the state of a fit was once in freed memory, too."""
    # glibc gives what is freed to whoever asks next, whatever the size, and writes over it at once.
    environment = {
        **os.environ,
        "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.perturb=85",
        "PYTHONPATH": str(Path(perigee.__file__).parents[3]),
    }
    program = [sys.executable, "-c", "import test_perigee; print(test_perigee.all_bits())"]
    ended = subprocess.run(
        program, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True, timeout=patient(120)
    )
    assert ended.stdout.strip() == all_bits(), ended.stderr
