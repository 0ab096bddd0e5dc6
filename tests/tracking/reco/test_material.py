"""Surfaces of much material, and surfaces without a hit: tracks are whole where this is told, else they fall apart."""

import numpy as np
from test_perigee import BARRELS, hits_of, particles

from domainpar.tracking.events.beam_spot import BeamSpot
from domainpar.tracking.events.field import Field
from domainpar.tracking.reco.ckf.detector_layout import layout_of
from domainpar.tracking.reco.ckf.finder import Search, find_tracks
from domainpar.tracking.reco.hit_table import TrackHits

LADDER = [(1, i, "barrel", 40.0 + 60.0 * i, -3000.0, 3000.0, 0.01, 0.03, int(i < 3)) for i in range(9)]
HEAVY = [(*row, 0.1) for row in BARRELS]


def whole_tracks(surfaces, hits, particle):
    """Fraction of the particles with all hits on one track."""
    volume, layer = np.array([row[:2] for row in BARRELS]).repeat(particle.max() + 1, axis=0).T
    layout = layout_of({"surfaces": [list(row) for row in surfaces]})
    module = np.zeros(len(particle), int)
    track = find_tracks(TrackHits.of(hits.position, volume, layer, module, Field.of(2.0), layout), BeamSpot(0, 30))
    found = [np.unique(track[particle == number]) for number in range(particle.max() + 1)]
    return np.mean([len(tracks) == 1 and tracks[0] >= 0 for tracks in found])


def test_the_kalman_filter_scatters_by_the_material_that_is_told():
    truth = particles(150, 5, -1.0, 1.0)
    truth[:, 4] *= 2.2  # of 0.5 GeV and more
    hits, particle = hits_of(truth, Field.of(2.0), HEAVY, seed=1)
    assert whole_tracks(HEAVY, hits, particle) > 0.97
    assert whole_tracks(BARRELS, hits, particle) < 0.8


def at_once(surfaces, z_of, max_holes=2):
    """Hits on the longest track of a particle of 0.5 GeV that leaves one on each surface at `z_of` its radius."""
    truth = np.array([[0.0, 0.0, 0.3, np.pi / 2, 2.0]])
    hits, _ = hits_of(truth, Field.of(2.0), surfaces)
    position = hits.position.copy()
    position[:, 2] = z_of(np.hypot(*position[:, :2].T))
    layout = layout_of(
        {
            "surfaces": [
                list(row)
                for row in ([*surfaces, *(row for row in LADDER if row[:2] not in [of[:2] for of in surfaces])])
            ]
        }
    )
    volume, layer = np.array([row[:2] for row in surfaces]).T
    search = Search(min_pt=0.4, d0=2.0, z0=0.0, min_hits=5, max_holes=max_holes)
    module = np.zeros(len(position), int)
    track = find_tracks(TrackHits.of(position, volume, layer, module, Field.of(2.0), layout), BeamSpot(0, 30), [search])
    return np.bincount(track[track >= 0], minlength=1).max()


def test_seeds_scatter_as_the_thickest_surface_makes_them():
    thick = [(*row, 0.3 if i < 3 else 0.01) for i, row in enumerate(LADDER)]
    # Behind the second surface the flight is turned by twice the angle that .3 radiation lengths turn it by.
    kink = 2 * 0.0136 * 0.3**0.5 / 0.5
    assert at_once(thick, lambda r: kink * np.maximum(r - LADDER[1][3], 0)) == len(LADDER)


def test_holes_that_hits_follow_count_for_all_of_a_track():
    seen = [row for i, row in enumerate(LADDER) if i not in (3, 6)]
    assert at_once(seen, np.zeros_like) == len(seen)
    assert at_once(seen, np.zeros_like, max_holes=1) < len(seen)
