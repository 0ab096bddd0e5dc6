"""The filter against its definition: numerical derivatives, matrices, and measurements drawn on tilted modules."""

from __future__ import annotations

import numpy as np
import pytest

from domainpar.tracking.events import detector
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.motion import advance, arc_to_radius
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.reco.ckf.detector_layout import PLACE_DTYPE
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.kalman import (
    ENERGY_LOSS,
    HIT_DTYPE,
    PION,
    STATE_DTYPE,
    UNMEASURED,
    approach,
    begin,
    fly,
    pass_material,
    point,
    residual,
    take,
)

COIL = Field.solenoid((0.0, 0.0, 0.0), 6000.0, (1.5, 0.5), (1200.0, 3200.0))
TINY = np.array([1e-3, 1e-5, 1e-8, 1e-3, 1e-5])


def state_at(x, y, psi, z, slope, k, cov=None):
    state = np.zeros(1, STATE_DTYPE).view(np.recarray)[0]
    state.x, state.y, state.z, state.slope, state.k = x, y, z, slope, k
    point(state, psi)
    if cov is not None:
        state.cov[:] = cov
    return state


def moved(deviation, x=700.0, y=200.0, psi=0.7, z=1600.0, slope=1.5, k=1e-3):
    """A state that is off by (place across, direction, k, z, slope)."""
    y_off, p_off, k_off, z_off, s_off = deviation
    return state_at(x - np.sin(psi) * y_off, y + np.cos(psi) * y_off, psi + p_off, z + z_off, slope + s_off, k + k_off)


def deviation_from(base, state, field):
    """How far a state is off, where it passes the base's point."""
    approach(state, base.x, base.y, 1e-9, field)
    across = (state.y - base.y) * base.cosine - (state.x - base.x) * base.sine
    return np.array([across, state.psi - base.psi, state.k - base.k, state.z - base.z, state.slope - base.slope])


def drawn_covariance(seed=1):
    root = np.random.default_rng(seed).normal(size=(5, 5)) * np.sqrt(TINY) * 3
    return root.T @ root


@pytest.mark.parametrize("s", [4.0, -4.0])
@pytest.mark.parametrize("field", [Field.of(2.0), COIL], ids=["even", "map"])
def test_covariances_are_moved_by_the_derivatives_of_the_flight(field, s):
    def flown(deviation):
        state = moved(deviation)
        fly(state, s, field)
        return state

    # Slopes are known less well, so that what they do to the direction in a map is seen.
    base, cov = flown(np.zeros(5)), drawn_covariance() * np.outer([1, 1, 1, 1, 50], [1, 1, 1, 1, 50])
    both = [[deviation_from(base, flown(sign * row), field) for sign in (1, -1)] for row in np.diag(TINY)]
    by = np.stack([(ahead - behind) / (2 * step) for (ahead, behind), step in zip(both, TINY)], axis=1)
    state = moved(np.zeros(5))
    state.cov[:] = cov
    fly(state, s, field)
    wanted = by @ cov @ by.T
    scale = np.sqrt(np.outer(np.diag(wanted), np.diag(wanted)))
    np.testing.assert_allclose(state.cov / scale, wanted / scale, atol=0.005)
    np.testing.assert_array_equal(state.cov, state.cov.T)


def module(tilt=0.0, across_z=False, var_u=4.0, var_v=1.0, at=(310.0, 28.0, 615.0)):
    """A hit on a module that stands along z and is tilted from the direction .7, or lies across z, turned by 'tilt'."""
    hit = np.zeros(1, HIT_DTYPE).view(np.recarray)[0]
    hit.x, hit.y, hit.z = at
    hit.var_u, hit.var_v = var_u, var_v
    sine, cosine = np.sin(0.7 + tilt), np.cos(0.7 + tilt)
    hit.u[:] = -sine, cosine, 0.0
    hit.v[:] = (cosine, sine, 0.0) if across_z else (0.0, 0.0, 1.0)
    hit.w[:] = np.cross(hit.u, hit.v)
    return hit


def seen_by(hit, psi, slope):
    """How far along u and v a module sees tracks off that are off across and along z, [2, 2], by meeting its plane."""
    flight, columns = np.array([np.cos(psi), np.sin(psi), slope]), []
    for off in (np.array([-np.sin(psi), np.cos(psi), 0.0]), np.array([0.0, 0.0, 1.0])):
        met = off - flight * (off @ hit.w) / (flight @ hit.w)
        columns.append([met @ hit.u, met @ hit.v])
    return np.array(columns).T


@pytest.mark.parametrize("across_z", [False, True], ids=["barrel", "disk"])
@pytest.mark.parametrize("tilt", [0.3, -0.3, 0.0])
def test_a_hit_corrects_a_state_as_the_matrices_of_the_filter_say(tilt, across_z):
    hit, cov = module(tilt, across_z), drawn_covariance(2) * 1e3
    state = state_at(hit.x + 0.3, hit.y - 0.2, 0.7, hit.z + 0.5, 1.5, 0.0, cov)
    ahead = (hit.x - state.x) * state.cosine + (hit.y - state.y) * state.sine
    plain = state_at(state.x, state.y, 0.7, state.z, 1.5, 0.0, cov)
    fly(plain, ahead, Field.of(2.0))
    h = np.zeros((2, 5))
    h[:, [0, 3]] = seen_by(hit, 0.7, 1.5)
    off = h[:, [0, 3]] @ [(hit.y - plain.y) * plain.cosine - (hit.x - plain.x) * plain.sine, hit.z - plain.z]
    total = h @ plain.cov @ h.T + np.diag([hit.var_u, hit.var_v])
    gain = plain.cov @ h.T @ np.linalg.inv(total)
    after, chi2 = gain @ off, off @ np.linalg.inv(total) @ off
    expected = residual(state, hit, 0.0)
    assert take(state, hit, Field.of(2.0)) == pytest.approx(chi2, rel=1e-9)
    assert expected[0] == pytest.approx(chi2, rel=1e-4)  # of a flight that is not bent
    np.testing.assert_allclose(state.cov, (np.eye(5) - gain @ h) @ plain.cov, rtol=1e-6, atol=1e-12)
    across = (state.y - plain.y) * plain.cosine - (state.x - plain.x) * plain.sine
    found = [across, state.psi - plain.psi, state.k - plain.k, state.z - plain.z, state.slope - plain.slope]
    np.testing.assert_allclose(found, after, rtol=1e-6)


@pytest.mark.parametrize("across_z", [False, True], ids=["barrel", "disk"])
@pytest.mark.parametrize("tilt", [0.3, -0.3])
def test_chi2_of_measurements_that_are_drawn_on_a_tilted_module_is_that_of_two_degrees_of_freedom(tilt, across_z):
    generator, state = np.random.default_rng(3), state_at(310.0, 28.0, 1.3, 615.0, 1.0, 0.0)
    values = []
    for u, v in generator.normal(size=(4000, 2)) * [2.0, 1.0]:
        hit = module(tilt, across_z)
        at = np.array([hit.x, hit.y, hit.z]) + u * hit.u + v * hit.v
        hit.x, hit.y, hit.z = at
        values.append(residual(state, hit, 0.0)[0])
    # Mean 2, median 2 ln 2.
    assert np.mean(values) == pytest.approx(2.0, abs=0.1)
    assert np.median(values) == pytest.approx(1.386, abs=0.08)


def test_an_axis_that_is_not_measured_tells_nothing():
    alone, cov = module(var_v=UNMEASURED**2), drawn_covariance(4) * 1e3
    states = [state_at(310.0, 28.1, 0.7, z, 1.5, 0.0, cov) for z in (615.0, 640.0)]
    chi2 = [take(state, alone, Field.of(2.0)) for state in states]
    assert chi2[0] == pytest.approx(chi2[1], rel=1e-4)
    assert states[1].z - states[0].z == pytest.approx(25.0, rel=1e-6)
    np.testing.assert_allclose(states[0].cov, states[1].cov)


@pytest.mark.parametrize(
    ("is_barrel", "slope", "path"), [(True, 0.0, 1), (True, 3.0, 10**0.5), (False, 3.0, 10**0.5 / 3)]
)
@pytest.mark.parametrize("material", [0.02, 0.05])
@pytest.mark.parametrize("side", [1, -1])
def test_material_scatters_and_slows_by_the_path_through_it(is_barrel, slope, path, material, side):
    state, place = state_at(0.0, 0.0, 0.0, 0.0, slope, 3e-4), np.zeros(1, PLACE_DTYPE).view(np.recarray)[0]
    place.is_barrel, place.by_angle, place.material = is_barrel, True, material
    pass_material(state, place, side)
    pt = 0.299792e-3 / 3e-4
    variance = 0.0136**2 * material * path / pt**2
    np.testing.assert_allclose(np.diag(state.cov), [0, variance, 0, 0, variance * (1 + slope**2)], rtol=1e-4)
    momentum = pt * np.hypot(1, slope)
    lost = ENERGY_LOSS * material * path * (1 + (PION / momentum) ** 2) ** 1.5
    assert state.k == pytest.approx(3e-4 * (1 + side * lost / momentum), rel=1e-6)


@pytest.mark.parametrize("curvature", [0.0, 1 / 500, -1 / 250])
def test_a_helix_meets_a_radius_where_it_is_that_far_out(curvature):
    generator, met = np.random.default_rng(5), 0
    for x, y, psi, radius in generator.uniform([-200, -200, -np.pi, 5], [200, 200, np.pi, 300], (400, 4)):
        for side in (1, -1):
            s = arc_to_radius(x, y, psi, curvature, radius, side)
            if not abs(s * curvature) < 2.0 or s < -1e8:
                continue
            there_x, there_y, _, turned = advance(x, y, 0.0, psi, 0.0, curvature, s)
            assert np.hypot(there_x, there_y) == pytest.approx(radius, abs=1e-6)
            assert side * (there_x * np.cos(turned) + there_y * np.sin(turned)) >= -1e-6
            met += 1
    assert met > 300


def test_a_circle_through_three_hits_begins_on_the_first_of_them():
    points = [advance(30.0, 5.0, 10.0, 0.4, 2.0, 1e-3, s)[:3] for s in (0.0, 40.0, 100.0)]
    hits = np.zeros(3, HIT_DTYPE).view(np.recarray)
    hits.x, hits.y, hits.z = np.transpose(points)
    state = state_at(0, 0, 0, 0, 0, 0)
    begin(state, *hits, Field.of(2.0))
    np.testing.assert_allclose([state.x, state.y, state.z], points[0])
    np.testing.assert_allclose([state.psi, state.slope, state.k], [0.4, 2.0, 0.5e-3], rtol=1e-5)
    begin(state, *hits, Field.of(0.0))
    assert state.k == pytest.approx(1e-2, rel=1e-5)  # as in 0.1 T: where nothing bends, nothing tells a momentum


def test_hits_of_the_simulation_are_measured_along_their_own_modules():
    event, geometry = simulate_event(4, 6000), detector.geometry()
    table = TrackHits.of(event.position, event.volume, event.layer, event.module).table
    keys = [geometry.modules[name].astype(int) for name in ("volume", "layer", "module")]
    numbers = {key: i for i, key in enumerate(zip(*(column.tolist() for column in keys)))}
    own = [numbers[key] for key in zip(*(getattr(event, name).tolist() for name in ("volume", "layer", "module")))]
    modules = geometry.modules[own]
    for ours, theirs in (("u", "u_axis"), ("v", "v_axis")):
        along = np.abs(np.einsum("ni,ni->n", table[ours], modules[theirs]))
        assert np.mean(along > 1 - 1e-9) > 0.999  # where modules overlap another may be as near
    np.testing.assert_allclose(table["w"], np.cross(table["u"], table["v"]))


def test_what_files_tell_of_a_measurement_is_taken_and_the_rest_is_the_surfaces():
    event = simulate_event(4, 500)
    told = np.full((len(event), 8), np.nan, np.float32)
    told[0, 6:], told[1, 6:], told[2, :6] = (0.1, 0.2), (0.1, np.inf), (1, 0, 0, 0, 1, 0)
    columns = event.position, event.volume, event.layer, event.module
    plain, table = TrackHits.of(*columns).table, TrackHits.of(*columns, measured=told).table
    np.testing.assert_allclose(table["var_u"][:2], 0.01, rtol=1e-6)
    np.testing.assert_allclose(table["var_v"][:2], [0.04, UNMEASURED**2], rtol=1e-6)
    assert (table["thickness"] == 0).tolist() == [True, True] + [False] * (len(event) - 2)
    assert table["w"][2].tolist() == [0.0, 0.0, 1.0]
    assert table[3:].tobytes() == plain[3:].tobytes()
