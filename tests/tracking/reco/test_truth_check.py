"""Fitted parameters of tracks against those of the targets that they match: medians by definition, mistakes by name."""

import numpy as np
import pytest

from domainpar.tracking.events.graph import Particles
from domainpar.tracking.reco.performance.matching import TrackCuts
from domainpar.tracking.reco.performance.truth import EventTruth
from domainpar.tracking.reco.perigee import Perigees
from domainpar.tracking.reco.truth_check import FEWEST, Frame, mistakes, rows_of_tracks, summary

AS_IT_IS = np.eye(3)
NUMBER, VERTEX = 80, (0.4, -0.3, 20.0)


def rows(off=0.0, tesla=1.0, turned=AS_IT_IS):
    """Those of tracks that are fitted to `off` beside d0, z0, phi, theta and q/p of their particles.

    The fits are in a field `tesla` times as strong as it is, in a frame that is turned.
    """
    rng = np.random.default_rng(0)
    pt, phi, eta = rng.uniform(1.0, 9.0, NUMBER), rng.uniform(-3.1, 3.1, NUMBER), rng.uniform(-2.0, 2.0, NUMBER)
    charge = rng.choice([-1, 1], NUMBER)
    p = np.stack([pt * np.cos(phi), pt * np.sin(phi), pt * np.sinh(eta)])
    table = dict(zip(("px", "py", "pz", "charge"), (*p, charge))) | dict(
        zip(("vx", "vy", "vz"), np.outer(VERTEX, p[0] * 0 + 1))
    )
    at_hits = np.repeat(np.arange(1, NUMBER + 1), 5)
    truth = EventTruth(at_hits, at_hits, particles=Particles.from_table(np.arange(1, NUMBER + 1), table, at_hits))
    x, y, z = turned @ p
    d0 = VERTEX[1] * np.cos(phi) - VERTEX[0] * np.sin(phi)
    z0 = VERTEX[2] - (VERTEX[0] * np.cos(phi) + VERTEX[1] * np.sin(phi)) * np.sinh(eta)
    theta = np.arctan2(np.hypot(x, y), z)
    value = np.stack([d0, z0, np.arctan2(y, x), theta, charge / (tesla * np.linalg.norm(p, axis=0))], axis=1) + off
    order = rng.permutation(NUMBER)  # tracks are numbered otherwise than particles
    fits = Perigees(value[order], np.zeros((NUMBER, 5, 5)), np.zeros(NUMBER), np.zeros(NUMBER, int))
    return rows_of_tracks(truth, np.argsort(order)[at_hits - 1], None, fits, TrackCuts())


def test_medians_and_widths_are_those_of_the_differences():
    width = 0.02 * np.random.default_rng(1).normal(size=(NUMBER, 1)) * [1, 0, 0, 0, 0]
    found = rows(np.array([0.25, -0.5, 0, 0, 0]) + width, tesla=0.98)
    expected = np.quantile(width[:, 0], [0.1587, 0.5, 0.8413])
    told = f"d0 {0.25 + expected[1]:+.3f} mm ({(expected[2] - expected[0]) / 2:.2g}), z0 -0.500 mm ("
    assert summary(found).startswith("pT ratio 0.9800 (")
    assert told in summary(found)
    assert summary(found).endswith(f", {NUMBER} targets")


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ({"tesla": 2 / 3}, "3 T would make it 1, not 2 T: prepare --field 3"),
        ({"tesla": -1}, "-2 T would make it 1, not 2 T: prepare --field -2; or charges have the other sign"),
        ({"tesla": 1e-3}, "momenta look like MeV, not GeV"),
        ({"off": np.array([0.0, 5.0, 0, 0, 0])}, "hits lie 0, 0, 5 mm in x, y, z beside the vertices"),
        ({}, "tracks come from x 0.4, y -0.3 mm"),
        ({}, "prepare --beam-line=0.4,-0.3"),
        ({"turned": np.diag([1, 1, -1])}, "x, y, z of hits look like x, y, -z of the momenta"),
        ({"turned": AS_IT_IS[[2, 0, 1]]}, "x, y, z of hits look like z, x, y of the momenta"),
    ],
)
def test_what_does_not_fit_is_named_with_what_would(made, told):
    found = mistakes(rows(**made), Frame(2.0))
    assert any(told in one for one in found), found
    assert mistakes(rows(**made)[: FEWEST - 1], Frame(2.0)) == []


def test_nothing_is_said_of_fits_that_agree_on_a_beam_line():
    found = rows()
    found[:, [3, 8]] = 0.0
    assert mistakes(found, Frame(2.0)) == []
