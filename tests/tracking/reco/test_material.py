"""Surfaces of a tenth of a radiation length: tracks are whole where this is told, and fall apart where it is not."""

import numpy as np
from test_perigee import BARRELS, hits_of, particles

from domainpar.tracking.events.beam_spot import BeamSpot
from domainpar.tracking.events.field import Field
from domainpar.tracking.reco.ckf.finder import find_tracks
from domainpar.tracking.reco.ckf.layout import layout_of

HEAVY = [(*row, 0.1) for row in BARRELS]


def whole_tracks(surfaces, hits, particle):
    """Fraction of the particles with all hits on one track."""
    volume, layer = np.array([row[:2] for row in BARRELS]).repeat(particle.max() + 1, axis=0).T
    layout = layout_of({"surfaces": [list(row) for row in surfaces]})
    module = np.zeros(len(particle), int)
    track = find_tracks(hits.position, volume, layer, module, Field.of(2.0), BeamSpot(0, 30), layout)
    found = [np.unique(track[particle == number]) for number in range(particle.max() + 1)]
    return np.mean([len(tracks) == 1 and tracks[0] >= 0 for tracks in found])


def test_the_kalman_filter_scatters_by_the_material_that_is_told():
    truth = particles(150, 5, -1.0, 1.0)
    truth[:, 4] *= 2.2  # of 0.5 GeV and more
    hits, particle = hits_of(truth, Field.of(2.0), HEAVY, seed=1)
    assert whole_tracks(HEAVY, hits, particle) > 0.97
    assert whole_tracks(BARRELS, hits, particle) < 0.8
