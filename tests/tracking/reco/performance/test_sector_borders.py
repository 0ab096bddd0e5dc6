"""The distance to the nearest border is that to the nearest hit of another sector, whatever sectors look like."""

import numpy as np
import pytest

from domainpar.tracking.reco.performance.truth import directions, distance_to_other_sectors


def plain(position, sector):
    """Every pair of hits."""
    eta, phi = directions(position)
    turn = np.abs(phi[:, None] - phi[None, :])
    distance = np.hypot(eta[:, None] - eta[None, :], np.minimum(turn, 2 * np.pi - turn))
    distance[sector[:, None] == sector[None, :]] = np.inf
    return distance.min(axis=1, initial=np.inf)


def hits_at(eta, phi):
    """A hit at radius 100 for each direction."""
    eta, phi = np.asarray(eta, float), np.asarray(phi, float)
    return 100 * np.stack([np.cos(phi), np.sin(phi), np.sinh(eta)], axis=1)


def wedges(position, number):
    return np.floor((directions(position)[1] + np.pi) / (2 * np.pi) * number).astype(int)


SECTORS = {
    "wedges": lambda position, rng: wedges(position, 4),
    "two halves": lambda position, rng: wedges(position, 2),
    "along eta": lambda position, rng: np.digitize(directions(position)[0], [-1, 0, 2]),
    "scattered": lambda position, rng: rng.integers(0, 5, len(position)),
    "one hit apart": lambda position, rng: np.arange(len(position)) == 0,
    "all apart": lambda position, rng: np.arange(len(position)),
}


@pytest.mark.parametrize("num_hits", [1, 2, 15, 16, 33, 400])
@pytest.mark.parametrize("kind", SECTORS)
def test_distances_are_those_of_all_pairs(kind, num_hits):
    rng = np.random.default_rng(num_hits)
    position = rng.normal(0, [300, 300, 900], (num_hits, 3)).astype(np.float32)
    position[: num_hits // 10] = position[0]  # several hits at one place
    sector = SECTORS[kind](position, rng)
    found = distance_to_other_sectors(position, sector)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, plain(position, sector), rtol=1e-5, atol=1e-6)


def test_drawn_hits_have_the_distances_one_measures_by_hand():
    position = hits_at([0.0, 0.3, 0.0, 2.0], [0.0, 0.4, 3.1, -3.1])
    found = distance_to_other_sectors(position, np.array([0, 1, 0, 1]))
    over_pi = np.hypot(2.0, 2 * np.pi - 6.2)
    np.testing.assert_allclose(found, [0.5, 0.5, over_pi, over_pi], rtol=1e-6)


def test_hits_on_both_sides_of_half_a_turn_are_neighbours():
    position = hits_at([0, 0], [np.pi - 0.01, -np.pi + 0.01])
    np.testing.assert_allclose(distance_to_other_sectors(position, np.array([3, 7])), [0.02, 0.02], rtol=1e-5)


def test_one_sector_has_no_border_and_no_hits_have_no_distance():
    assert np.isinf(distance_to_other_sectors(hits_at([0, 1, 2], [0, 1, 2]), np.array([4, 4, 4]))).all()
    assert distance_to_other_sectors(np.zeros((0, 3), np.float32), np.zeros(0, int)).tolist() == []


def test_hits_on_the_beam_line_and_at_the_origin_have_finite_distances():
    position = np.array([[0, 0, 0], [0, 0, 500], [0, 0, -500], [30, 0, 0]], np.float32)
    assert np.isfinite(distance_to_other_sectors(position, np.array([0, 1, 0, 1]))).all()


def test_the_order_of_hits_does_not_change_their_distances():
    rng = np.random.default_rng(2)
    position = rng.normal(0, 300, (300, 3))
    order = rng.permutation(300)
    found = distance_to_other_sectors(position, wedges(position, 5))
    assert (distance_to_other_sectors(position[order], wedges(position, 5)[order]) == found[order]).all()
